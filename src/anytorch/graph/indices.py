"""Whole-number expressions of a kernel's axes: which element of a buffer is read or written at a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from anytorch.graph.sizes import SizeLike, divided


@dataclass(frozen=True)
class Part:
    """`index // by` ("//") or `index % by` ("%"), where that is not a sum of axes."""

    how: str
    index: Index
    by: SizeLike


Atom = str | Part  # the name of an axis, or a part


@dataclass(frozen=True)
class Index:
    """A sum of axes (and parts) times steps, plus a start. Terms are sorted, so equal sums are equal values."""

    terms: tuple[tuple[Atom, SizeLike], ...] = ()
    start: SizeLike = 0

    @staticmethod
    def axis(name: str) -> Index:
        return Index(((name, 1),))

    @cached_property
    def axes(self) -> frozenset[str]:
        return frozenset().union(*({atom} if isinstance(atom, str) else atom.index.axes for atom, _ in self.terms))

    def step(self, axis: str) -> SizeLike | None:
        """By how much it grows with the axis; None if that is not the same everywhere."""
        if any(isinstance(atom, Part) and axis in atom.index.axes for atom, _ in self.terms):
            return None
        return next((step for atom, step in self.terms if atom == axis), 0)

    def __add__(self, other: Index | SizeLike) -> Index:
        if not isinstance(other, Index):
            return Index(self.terms, self.start + other)
        steps: dict[Atom, SizeLike] = dict(self.terms)
        for atom, step in other.terms:
            steps[atom] = steps.get(atom, 0) + step
        return _index(steps, self.start + other.start)

    def __mul__(self, by: SizeLike) -> Index:
        return _index({atom: step * by for atom, step in self.terms}, self.start * by)

    def divided(self, by: SizeLike, extents: Mapping[str, SizeLike]) -> tuple[Index, Index]:
        """(self // by, self % by), as plain sums wherever the axes' extents show that they are."""
        if by == 1:
            return self, Index()
        whole: dict[Atom, SizeLike] = {}
        rest: dict[Atom, SizeLike] = {}
        for atom, step in self.terms:
            quotient = exactly(step, by)
            (rest if quotient is None else whole)[atom] = step if quotient is None else quotient
        start = exactly(self.start, by)
        over = _index(rest, self.start if start is None else 0)
        front = _index(whole, 0 if start is None else start)
        if _below(over, by, extents):
            return front, over
        return front + Index(((Part("//", over, by), 1),)), Index(((Part("%", over, by), 1),))

    def __str__(self) -> str:
        def text(atom: Atom, step: SizeLike) -> str:
            name = atom if isinstance(atom, str) else f"({atom.index} {atom.how} {atom.by})"
            return name if step == 1 else f"{name}*{step}" if isinstance(step, int) else f"{name}*({step})"

        said = [text(atom, step) for atom, step in self.terms]
        return " + ".join([*said, *([str(self.start)] if self.start != 0 or not said else [])])


def _index(steps: Mapping[Atom, SizeLike], start: SizeLike) -> Index:
    for atom, step in steps.items():
        # x // n * (n * s) + x % n * s = x * s: what one reshape takes apart another one puts together.
        if isinstance(atom, Part) and atom.how == "%":
            front = Part("//", atom.index, atom.by)
            if steps.get(front, 0) == step * atom.by and step != 0:
                rest = {one: times for one, times in steps.items() if one not in (atom, front)}
                return Index(_index(rest, 0).terms, start) + atom.index * step
    kept = [(atom, step) for atom, step in steps.items() if step != 0]
    return Index(tuple(sorted(kept, key=lambda term: str(term[0]))), start)


def exactly(size: SizeLike, by: SizeLike) -> SizeLike | None:
    try:
        return 0 if size == 0 else divided(size, by)
    except ValueError:
        return None


def _below(index: Index, bound: SizeLike, extents: Mapping[str, SizeLike]) -> bool:
    """Whether it is certainly in [0, bound)."""
    top = index.start
    for atom, step in index.terms:
        if isinstance(step, int) and step < 0:
            return False
        most = extents[atom] if isinstance(atom, str) else atom.by if atom.how == "%" else None
        if most is None:
            return False
        top = top + step * (most - 1)
    left = bound - 1 - top
    return (left >= 0) if isinstance(left, int) else False


def linear(indices: Sequence[Index], strides: Sequence[SizeLike]) -> Index:
    total = Index()
    for index, stride in zip(indices, strides, strict=True):
        total = total + index * stride
    return total
