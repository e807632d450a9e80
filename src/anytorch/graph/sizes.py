"""Sizes that may be unknown until a graph is called: whole numbers, or sums of products of named ones.

    b = Size.named("b");  4 * b + 1;  (4 * b) // 4 == b

A known size is a plain int, so a graph of static shapes never meets this class. (sympy could do this and far more; it takes
0.4 s to import, and reading an expression back from a file would run it as code.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Union

Monomial = tuple[str, ...]  # names, sorted; () is the constant term
SizeLike = Union[int, "Size"]
Shape = tuple[SizeLike, ...]
NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


class Size:
    """A polynomial with whole coefficients in named sizes. Immutable; equal if all coefficients are."""

    __slots__ = ("_terms",)

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self._terms = tuple(sorted((names, count) for names, count in terms.items() if count))

    @staticmethod
    def named(name: str) -> Size:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for a size: use letters, digits and _")
        return Size({(name,): 1})

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for names, _ in self._terms for name in names)

    def at(self, known: Mapping[str, int]) -> int:
        """The number it is for these sizes. Raises KeyError for a name without one."""
        return sum(count * prod(known[name] for name in names) for names, count in self._terms)

    def solved(self, number: int, known: Mapping[str, int]) -> dict[str, int]:
        """The one name without a number that makes this size `number`, with its own; {} where there is not just one."""
        left, factors = number, dict[str, int]()
        for names, count in self._terms:
            missing = [name for name in names if name not in known]
            if len(missing) > 1:
                return {}
            by = count * prod(known[name] for name in names if name in known)
            if missing:
                factors[missing[0]] = factors.get(missing[0], 0) + by
            else:
                left -= by
        if len(factors) != 1:
            return {}
        ((name, factor),) = factors.items()
        return {name: left // factor} if factor and left % factor == 0 else {}

    def renamed(self, names: Mapping[str, str]) -> Size:
        """The same with other names: `names` gives the new one for each old one."""
        return Size({tuple(sorted(names[name] for name in term)): count for term, count in self._terms})

    def products(self) -> Iterator[Monomial]:
        """The products of several names in it."""
        yield from (names for names, _ in self._terms if len(names) > 1)

    def joined(self, factors: Monomial, name: str) -> Size:
        """The same with one name for a product of names, wherever that is a factor."""
        terms: dict[Monomial, int] = {}
        for names, count in self._terms:
            left = list(names)
            if all(left.count(one) >= factors.count(one) for one in factors):
                for one in factors:
                    left.remove(one)
                left.append(name)
            terms[tuple(sorted(left))] = count
        return Size(terms)

    def __add__(self, other: SizeLike) -> SizeLike:
        terms = dict(self._terms)
        for names, count in _terms_of(other):
            terms[names] = terms.get(names, 0) + count
        return _simple(terms)

    def __mul__(self, other: SizeLike) -> SizeLike:
        terms: dict[Monomial, int] = {}
        for names, count in self._terms:
            for more, times in _terms_of(other):
                both = tuple(sorted(names + more))
                terms[both] = terms.get(both, 0) + count * times
        return _simple(terms)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> SizeLike:
        return self * -1

    def __sub__(self, other: SizeLike) -> SizeLike:
        return self + -other

    def __rsub__(self, other: SizeLike) -> SizeLike:
        return -self + other

    def __floordiv__(self, other: SizeLike) -> SizeLike:
        """The quotient where the division leaves nothing over for any size. Raises ValueError where that is not known."""
        if isinstance(other, Size) and other == self:
            return 1
        divisor = _terms_of(other)
        if len(divisor) != 1:
            raise ValueError(f"{self} cannot be divided by {other}")
        ((by_names, by),) = divisor
        terms: dict[Monomial, int] = {}
        for names, count in self._terms:
            left = list(names)
            for name in by_names:
                if name not in left:
                    raise ValueError(f"{self} is not always a multiple of {other}")
                left.remove(name)
            if count % by:
                raise ValueError(f"{self} is not always a multiple of {other}")
            terms[tuple(left)] = count // by
        return _simple(terms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self._terms == other._terms

    def __hash__(self) -> int:
        return hash(self._terms)

    def __str__(self) -> str:
        def text(names: Monomial, count: int) -> str:
            return "*".join([*([str(count)] if count != 1 or not names else []), *names])

        # The constant comes last, as people write it.
        return " + ".join(text(*term) for term in sorted(self._terms, key=lambda term: not term[0]))

    __repr__ = __str__


def read_size(text: SizeLike | str) -> SizeLike:
    """The size that `str` wrote: "b", "4*b + 1", or a number. Raises ValueError for anything else."""
    if isinstance(text, (int, Size)):
        return text
    total: SizeLike = 0
    for part in text.split("+"):
        factors = [factor.strip() for factor in part.split("*")]
        total = total + product(int(one) if re.fullmatch(r"-?\d+", one) else Size.named(one) for one in factors)
    return total


def product(sizes: Iterable[SizeLike]) -> SizeLike:
    total: SizeLike = 1
    for size in sizes:
        total = total * size
    return total


def divided(size: SizeLike, by: SizeLike) -> SizeLike:
    """The quotient, which must be a whole number whatever the sizes are. Raises ValueError."""
    if isinstance(size, Size):
        return size // by
    if isinstance(by, Size) or not by or size % by:
        raise ValueError(f"{size} is not a multiple of {by}")
    return size // by


def at(size: Any, known: Mapping[str, int]) -> Any:
    """What a size is for these sizes; a number is itself."""
    return size.at(known) if isinstance(size, Size) else size


def shape_at(shape: Iterable[SizeLike], known: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size.at(known) if isinstance(size, Size) else size for size in shape)


def names_of(shape: Iterable[SizeLike]) -> frozenset[str]:
    return frozenset(name for size in shape if isinstance(size, Size) for name in size.names)


def decided(sizes: Iterable[SizeLike]) -> frozenset[str]:
    """The names whose numbers follow from those of all these sizes, as `Size.solved` finds them."""
    known: set[str] = set()
    waiting = [size for size in sizes if isinstance(size, Size)]
    while more := {name for size in waiting for name in size.solved(0, dict.fromkeys(known, 1))}:
        known |= more
    return frozenset(known)


def row_major(shape: Sequence[SizeLike]) -> Shape:
    """The strides of a tensor of this shape whose elements lie one after another."""
    strides: list[SizeLike] = []
    step: SizeLike = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def words(shape: Iterable[SizeLike]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _terms_of(size: SizeLike) -> list[tuple[Monomial, int]]:
    return list(size._terms) if isinstance(size, Size) else [((), size)]


def _simple(terms: Mapping[Monomial, int]) -> SizeLike:
    """An int where no name is left."""
    made = Size(terms)
    if not made._terms:
        return 0
    ((names, count), *rest) = made._terms
    return count if not rest and not names else made
