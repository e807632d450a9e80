"""Our cheap frozen dataclass behaves as the standard one does; values from a file are checked by their class."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from anytorch.values import checked, dataclass


@dataclass(frozen=True)
class Ours:
    """A value."""

    a: int
    b: str = "b"
    c: tuple[int, ...] = ()
    d: dict[str, int] = field(default_factory=dict, compare=True)

    @property
    def twice(self) -> int:
        return 2 * self.a


@dataclasses.dataclass(frozen=True)
class Standard:
    """The same value."""

    a: int
    b: str = "b"
    c: tuple[int, ...] = ()
    d: dict[str, int] = field(default_factory=dict, compare=True)


@pytest.mark.parametrize(
    ("positional", "named"),
    [((1,), {}), ((1, "x"), {"c": (1, 2)}), ((), {"d": {"k": 1}, "a": 3}), ((1, "x", (), {"k": 2}), {})],
)
def test_made_alike(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    ours, standard = Ours(*positional, **named), Standard(*positional, **named)
    assert asdict(ours) == asdict(standard)
    assert repr(ours) == repr(standard).replace("Standard", "Ours")
    assert ours == Ours(*positional, **named) and ours != Ours(99)
    assert copy.deepcopy(ours) == ours == pickle.loads(pickle.dumps(ours))


@pytest.mark.parametrize(("positional", "named"), [((), {}), ((1, 2, 3, 4, 5), {}), ((1,), {"a": 2}), ((1,), {"z": 2})])
def test_refused_alike(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    for kind in (Ours, Standard):
        with pytest.raises(TypeError):
            kind(*positional, **named)


def test_dataclass_functions_work() -> None:
    assert is_dataclass(Ours) and [f.name for f in fields(Ours)] == ["a", "b", "c", "d"]
    assert replace(Ours(1), b="x") == Ours(1, "x")
    assert Ours(2).twice == 4
    first, second = Ours(1), Ours(1)
    assert first.d is not second.d, "a factory makes a new one each time"
    assert Ours(1) != Standard(1)


def test_frozen_and_hashable() -> None:
    value = Ours(1)
    with pytest.raises(FrozenInstanceError):
        value.a = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del value.a  # type: ignore[misc]
    with pytest.raises(TypeError):
        hash(value)  # it holds a dictionary, as the standard one would

    @dataclass(frozen=True)
    class Plain:
        """Hashable."""

        x: int

    assert len({Plain(1), Plain(1), Plain(2)}) == 2


def test_only_frozen() -> None:
    with pytest.raises(AssertionError):
        dataclass(frozen=False)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"a": "1"}, "a is of the kind str"),
        ({"a": True}, "a is of the kind bool"),
        ({"a": 1.0}, "a is of the kind float"),
        ({"a": 2**63}, "too large"),
        ({"b": None}, "b is of the kind NoneType"),
        ({"c": "soon"}, "c is of the kind str"),
        ({"d": []}, "d is of the kind list"),
        ({"e": [1]}, "e is of the kind list"),
    ],
)
def test_values_from_a_file_are_of_the_kinds_their_class_names(wrong: dict[str, Any], told: str) -> None:
    right: dict[str, Any] = {"a": 1, "b": "x", "c": None, "d": {}, "e": (1,), "f": object()}
    for fine in ({}, {"c": 1}, {"c": 2.5}, {"c": float("nan")}, {"a": -(2**63) + 1}):
        assert checked(Stored(**{**right, **fine})).b == "x"
    with pytest.raises(TypeError, match=told):
        checked(Stored(**{**right, **wrong}))


@dataclass(frozen=True)
class Stored:
    """One field of each kind; the last one's is not known and not looked at."""

    a: int
    b: str
    c: float | None
    d: Mapping[str, int]
    e: tuple[int, ...]
    f: Path
