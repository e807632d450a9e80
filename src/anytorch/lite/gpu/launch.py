"""A launch that is prepared once: the same kernel on arrays of the same geometry differs only in a few numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

from anytorch.gpu.runtime import device_memory, open_runtime
from anytorch.lite.gpu.memory import Layout

MOST_GROUPS = 65_535  # in one dimension of a launch
MOST_KEPT = 10_000  # prepared launches of one sort; shapes that never come again would pile up
Kept = TypeVar("Kept")


def grid(groups: int) -> tuple[int, int]:
    x = min(groups, MOST_GROUPS)
    return x, -(-groups // x)


def remember(known: dict[Any, Kept], key: Any, made: Kept) -> Kept:
    if len(known) >= MOST_KEPT:
        known.clear()
    known[key] = made
    return made


class Launch:
    """A program with its parameters: `head` and `tail` never change; what lies between is packed at every call."""

    __slots__ = ("head", "pack", "program", "runtime", "tail", "x", "y")

    def __init__(
        self,
        key: Any,
        render: Any,
        buffers: int,
        writable: int,
        parameters: tuple[Sequence[int | float], str, Sequence[int | float]],
        groups: tuple[int, int],
    ) -> None:
        """`key` names the program, `render` writes it. The parameters are the head, the format of what changes, the tail."""
        self.runtime = open_runtime()
        before, between, after = parameters
        self.head, self.tail = (packed(numbers) for numbers in (before, after))
        changing = struct.Struct(f"<{between}")
        self.pack = changing.pack
        self.program = self.runtime.programs.make(
            ("lite", key),
            lambda: render(key),
            buffers=buffers,
            writable=writable,
            immediates=len(self.head) + changing.size + len(self.tail),
        )
        self.x, self.y = groups

    def __call__(self, layouts: Sequence[Layout], *changing: int | float) -> None:
        parameters = self.head + self.pack(*changing) + self.tail
        buffers = tuple([layout.memory.buffer for layout in layouts])
        self.runtime.dispatch(self.program, buffers, parameters, self.x, self.y)


def packed(numbers: Sequence[int | float]) -> bytes:
    """As 32-bit words. Steps may be negative: in 32 bits, adding 2³² − 1 is taking one away."""
    words = [number if isinstance(number, float) else number % 2**32 for number in numbers]
    return struct.pack(f"<{''.join('f' if isinstance(word, float) else 'I' for word in words)}", *words)


__all__ = ["Launch", "device_memory", "grid", "remember"]
