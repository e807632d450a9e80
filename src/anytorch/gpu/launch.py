"""The one launch path of every kernel: plan, pack, dispatch.

    plan        once per geometry: the program, the grid, and every parameter that the geometry decides
    pack        at every call: the numbers that change, and where each operand begins in its buffer
    dispatch    record the launch (`runtime`)

A kernel's parameters come in this order: the `head`, the numbers that change, the places of its operands, the `tail`. Places
are in the order of the bindings; operands that always start their buffers (new tensors) have none and are bound last.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT
from anytorch.gpu.launcher import address as address_of
from anytorch.gpu.programs import Source
from anytorch.gpu.runtime import open_runtime

MOST_GROUPS = 65_535  # in one dimension of a grid
Kernel = TypeVar("Kernel", bound=Hashable)


def grid(groups: int) -> tuple[int, int]:
    """The launch grid of so many workgroups, in two dimensions."""
    x = min(groups, MOST_GROUPS)
    return x, -(-groups // max(x, 1))


def words(numbers: Sequence[int | float]) -> bytes:
    """Numbers as parameters of 32 bits each. Steps may be negative: adding 2³² − 1 is taking one away."""
    wrapped = [number if isinstance(number, float) else number % 2**32 for number in numbers]
    return struct.pack(f"<{''.join('f' if isinstance(word, float) else 'I' for word in wrapped)}", *wrapped)


class Plan:
    """All of a launch but the addresses of its operands and the numbers that change from call to call.

    `result` is what the family needs to make the tensor that the launch writes: its arguments of `sized_tensor`.
    """

    __slots__ = (
        "at_starts",
        "head",
        "native",
        "numbers",
        "pack",
        "program",
        "result",
        "runtime",
        "shifts",
        "tail",
        "x",
        "y",
    )

    def __init__(
        self,
        kernel: Kernel,
        render: Callable[[Kernel], Source],
        groups: tuple[int, int],
        places: Sequence[int],
        writable: int,
        *,
        unplaced: int = 0,
        head: Sequence[int | float] = (),
        numbers: str = "",
        tail: Sequence[int | float] = (),
        result: Any = None,
    ) -> None:
        """`places` are the bytes of an element of each operand that has a place, `numbers` the codes (of `struct`) of the
        numbers that change. `writable` has bit i set if binding i is written.
        """
        self.runtime = open_runtime()
        self.head, self.tail = words(head), words(tail)
        changing = struct.Struct(f"<{numbers}{len(places)}I")
        self.pack = changing.pack
        self.numbers = numbers
        # The parameters when every operand starts its buffer, as most do.
        self.at_starts = b"" if numbers else self.head + bytes(changing.size) + self.tail
        self.shifts = tuple(size.bit_length() - 1 for size in places)
        self.program = self.runtime.programs.make(
            kernel,
            lambda: render(kernel),
            buffers=len(places) + unplaced,
            writable=writable,
            immediates=len(self.head) + changing.size + len(self.tail),
        )
        self.x, self.y = groups
        self.result = result
        self.native = self._for_launcher(self.head + bytes(changing.size) + self.tail)

    def _for_launcher(self, at_starts: bytes) -> Any:
        """The plan as C++ knows it; None where there is no such launcher, or the plan is too large for it."""
        launcher = self.runtime.launcher
        if launcher is None:
            return None
        codes = "".join(code * int(count or 1) for count, code in re.findall(r"(\d*)(\D)", self.numbers))
        program = self.program
        return launcher.plan(
            *(program, address_of(program.handle), id(program.groups), self.x, self.y, program.buffers),
            *(at_starts, len(self.head), codes.encode(), bytes(self.shifts), self.result),
        )

    def __call__(self, addresses: Sequence[int], *numbers: float) -> None:
        """Launch on the operands at these addresses, in the order of the bindings."""
        runtime = self.runtime
        launcher = runtime.launcher
        if launcher is not None and self.native is not None:
            launcher.launch(self.native, addresses, *numbers)
            return
        table = runtime.buffers
        buffers = []
        bits = 0
        for address in addresses:
            bits |= address
            buffers.append(table[address >> SHIFT])
        if numbers or bits & OFFSET_MASK:
            places = [(address & OFFSET_MASK) >> shift for address, shift in zip(addresses, self.shifts, strict=False)]
            immediates = self.head + self.pack(*numbers, *places) + self.tail
        else:
            immediates = self.at_starts
        runtime.dispatch(self.program, buffers, immediates, self.x, self.y)

    def within(self, windows: tuple[tuple[int, int], ...], addresses: Sequence[int], *numbers: float) -> None:
        """The same, bound to an (offset, nbytes) window of each operand's buffer: for buffers beyond the binding limit."""
        table = self.runtime.buffers
        places = [
            (address & OFFSET_MASK) - window[0] >> shift
            for address, window, shift in zip(addresses, windows, self.shifts, strict=False)
        ]
        immediates = self.head + self.pack(*numbers, *places) + self.tail
        buffers = [table[address >> SHIFT] for address in addresses]
        self.runtime.dispatch(self.program, buffers, immediates, self.x, self.y, windows=windows)


class ReportingPlan(Plan):
    """A plan of a kernel that reports indices out of range: `site` is its last parameter, the fault buffer bound last."""

    __slots__ = ("fault",)

    def __init__(
        self,
        kernel: Kernel,
        render: Callable[[Kernel], Source],
        groups: tuple[int, int],
        places: Sequence[int],
        writable: int,
        *,
        site: int,
        unplaced: int = 0,
        tail: Sequence[int | float] = (),
        **more: Any,
    ) -> None:
        last = 1 << (len(places) + unplaced)
        super().__init__(
            kernel, render, groups, places, writable | last, unplaced=unplaced + 1, tail=(*tail, site), **more
        )
        self.fault = self.runtime.faults.buffer.address

    def __call__(self, addresses: Sequence[int], *numbers: float) -> None:
        super().__call__((*addresses, self.fault), *numbers)
        # After the launch: another thread that looks in between finds this report at its next look, not never.
        faults = self.runtime.faults
        faults.pending = True
        if faults.checks == "now":
            self.runtime.synchronize()


def plan_of(*args: Any, site: int = 0, **more: Any) -> Plan:
    """A `ReportingPlan` where `site` names an op, else a `Plan`; both take the same arguments."""
    return ReportingPlan(*args, site=site, **more) if site else Plan(*args, **more)
