"""A launch that is prepared once: the same kernel on arrays of the same geometry differs only in a few numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from anytorch.gpu.launch import words
from anytorch.gpu.runtime import open_runtime
from anytorch.lite.gpu.memory import Layout


class ArrayLaunch:
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
        self.head, self.tail = (words(numbers) for numbers in (before, after))
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
