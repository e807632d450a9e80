"""Which schedules are worth trying for a kernel in Triton, the likeliest first: a pure function of kernel and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from anytorch.graph.emit.cpp_schedules import main_product, rows_and_columns, size, volume
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.loops import Kernel

MOST = 24
WIDEST = 1 << 14  # elements of a row that one program can hold
TILE = 1 << 15  # elements of the largest block in a program


def schedules(kernel: Kernel, known: Mapping[str, int], units: int = 132) -> list[Schedule]:
    """At most `MOST` schedules; `units` is how many programs keep the device busy."""
    found: dict[str, Schedule] = {}
    for one in (*_of_products(kernel, known, units), *_of_rows(kernel, known)):
        if len(found) < MOST and _holds(kernel, one, known):
            found.setdefault(one.name, one)
    return list(found.values())


def power(length: int) -> int:
    """The next power of two."""
    return 1 << max(0, length - 1).bit_length()


def _holds(kernel: Kernel, one: Schedule, known: Mapping[str, int]) -> bool:
    for store in kernel.stores:
        for expr in (*store.value.walk(), store.value):
            tile = 1
            for axis in expr.axes:
                tile *= one.block(axis)
            if tile > TILE:
                return False
    return True


def _of_products(kernel: Kernel, known: Mapping[str, int], units: int) -> Iterator[Schedule]:
    dot = main_product(kernel, known)
    if dot is None:
        return
    (over,) = dot.over
    rows, columns = rows_and_columns(kernel, dot)
    inner = {axis for one in kernel.reductions for axis in one.over} - {over}
    # What is reduced inside (the width of a head, the rank of an adapter) is held whole.
    whole = {axis: max(16, power(size(kernel, axis, known))) for axis in inner}
    if not columns:
        return
    column = columns[-1]
    row = rows[-1] if rows else ""
    n, k = size(kernel, column, known), size(kernel, over, known)
    nested = any(over in one.axes for one in kernel.reductions)  # attention: the columns are held whole as well
    heights = [16] if not row or size(kernel, row, known) <= 16 else [64, 128, 32]
    widths = [power(n)] if nested else [width for width in (32, 64, 16, 128) if width <= max(16, power(n))]
    depths = [depth for depth in ((64, 128, 32) if nested else (128, 256, 64)) if depth <= max(32, power(k))]
    for height in heights:
        for width in widths:
            for depth in depths:
                blocks = {**whole, column: max(16, width), over: depth}
                if row:
                    blocks[row] = height
                for warps, stages in ((4, 4), (8, 3), (4, 3), (2, 4)) if not nested else ((4, 2), (8, 2), (4, 3)):
                    yield Schedule(blocks, warps=warps, stages=stages)


def _of_rows(kernel: Kernel, known: Mapping[str, int]) -> Iterator[Schedule]:
    if not kernel.axes or any(one.how == "dot" for one in kernel.reductions):
        return
    reduced = {axis for one in kernel.reductions for axis in one.over}
    last = kernel.axes[-1]
    rest = volume(kernel, frozenset(kernel.axes[:-1]), known)
    length = max([size(kernel, axis, known) for axis in reduced] or [size(kernel, last, known)])
    if reduced and length <= WIDEST:
        blocks = {axis: power(size(kernel, axis, known)) for axis in (*reduced, last)}
        if last not in {axis for store in kernel.stores for axis in store.index.axes}:
            blocks.pop(last)
        for warps in (4, 8, 2) if length <= 4096 else (8, 16, 4):
            yield Schedule(blocks, warps=warps, stages=1)
        return
    for block in (1024, 2048, 512, 256):
        blocks = {axis: min(block, power(size(kernel, axis, known))) for axis in (*reduced, last)}
        if len(kernel.axes) > 1 and not reduced and blocks[last] < block and rest > 1:
            blocks[kernel.axes[-2]] = min(power(size(kernel, kernel.axes[-2], known)), block // blocks[last])
        for warps in (4, 8):
            yield Schedule(blocks, warps=warps, stages=2)
