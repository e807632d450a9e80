"""`@dataclass(frozen=True)` that is five times cheaper to define; and a check of values that were read from a file.

The standard decorator writes six methods per class as text and compiles them: half a millisecond per class, and 17 of
the 80 ms of CPU time that `anytorch info` may use in all. Here the methods are shared and ask `__dataclass_fields__`,
so that `fields`, `replace`, `asdict` and type checkers notice no difference. Making an instance takes some microseconds
more: use it for values there are few of, and the standard one where there are many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen):
        """Make a class a frozen dataclass. `frozen=True` is written out, so that the reader and mypy see it."""
        assert frozen, "for a mutable one use dataclasses.dataclass"
        return _frozen


def _frozen(cls: Any) -> Any:
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    made.__init__, made.__repr__, made.__eq__, made.__hash__ = _init, _repr, _eq, _hash
    made.__setattr__, made.__delattr__ = _set, _delete
    return made


def _init(self: Any, *positional: Any, **named: Any) -> None:
    known = self.__dataclass_fields__
    if len(positional) > len(known):
        raise TypeError(f"{type(self).__name__} takes {len(known)} arguments, not {len(positional)}")
    given = dict(zip(known, positional))  # noqa: B905  (checked above; the shorter one ends it)
    for name, value in named.items():
        if name not in known:
            raise TypeError(f"{type(self).__name__} has no field {name!r}")
        if name in given:
            raise TypeError(f"{type(self).__name__} got its field {name!r} twice")
        given[name] = value
    for name, field in known.items():  # in the order of the class, whatever the order of the call
        if name in given:
            self.__dict__[name] = given[name]
        elif field.default is not dataclasses.MISSING:
            self.__dict__[name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            self.__dict__[name] = field.default_factory()
        else:
            raise TypeError(f"{type(self).__name__} needs its field {name!r}")


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(self.__dict__[name] for name in self.__dataclass_fields__)


def _repr(self: Any) -> str:
    inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
    return f"{type(self).__qualname__}({inside})"


def _eq(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _set(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


# --- values from a file -------------------------------------------------------------------------------------------

T = TypeVar("T")
LARGEST = 2**63  # more is no measurement, and the largest ones are no float either
KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "None": (type(None),), "tuple": (tuple,),
    "Mapping": (Mapping,),
}  # fmt: skip


def checked(made: T) -> T:
    """The same value of a dataclass, all of whose plain fields are of the kinds that its class names.

    For what was read from a file. Raises TypeError for a field of another kind and for a whole number of more than 63 bits;
    what a mapping or a tuple holds is not looked at.
    """
    fields: dict[str, Any] = made.__dataclass_fields__  # type: ignore[attr-defined]
    for name, field in fields.items():
        value = getattr(made, name)
        kinds = [KINDS.get(kind.partition("[")[0]) for kind in str(field.type).split(" | ")]
        if None in kinds:
            continue  # another class, whose values are made and checked by themselves
        allowed = tuple(one for kind in kinds for one in kind or ())
        fits = isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))
        if not fits or (isinstance(value, int) and abs(value) >= LARGEST):
            raise TypeError(f"{name} is of the kind {type(value).__name__}, or too large; it should be {field.type}")
    return made
