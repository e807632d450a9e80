"""Which schedules are worth trying for a kernel in Triton, the likeliest first: a pure function of kernel and sizes.

Products are ranked by an estimate: what must come from memory, how evenly the programs share it, and whether enough of it
is on its way at any time to keep the memory busy. The estimate only sorts; what is chosen is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from anytorch.graph import ops
from anytorch.graph.emit.cpp_schedules import main_product, rows_and_columns, size, volume
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.triton_functions import unwidened
from anytorch.graph.loops import Expr, Kernel
from anytorch.graph.partition import ITEM_BYTES

MOST = 32
UNPADDED = 8  # of them without the matrix unit, where there is one row
WIDEST = 1 << 14  # elements of a row that one program can hold
TILE = 1 << 15  # elements of the largest block in a program


@dataclass(frozen=True)
class Unit:
    """A device as far as the estimate needs it; an H200 by default. Others differ in scale, which matters little here."""

    units: int = 132
    shared_bytes: int = 220 << 10  # on-chip memory of a unit, for tiles on their way
    bytes_per_s: float = 4.2e12
    near_bytes_per_s: float = 9e12  # from the cache that all units share
    flops_per_s: float = 7e14
    steps_per_s: float = 1.2e13  # of plain arithmetic, conversions and rearrangement included
    in_flight: int = 40 << 10  # bytes on their way that keep a unit's share of the memory busy
    join_s: float = 2.5e-6  # what sharing a tile costs
    launch_s: float = 2e-6


def schedules(kernel: Kernel, known: Mapping[str, int], device: Unit | None = None) -> list[Schedule]:
    """At most `MOST` schedules."""
    device = device or Unit()
    products = [one for one in _of_products(kernel, known, device) if _holds(kernel, one)]
    products.sort(key=lambda one: estimate(kernel, one, known, device))
    padded = _by_turns([one for one in products if one.padded])
    plain = _by_turns([one for one in products if not one.padded])
    ranked = [*padded[: MOST - UNPADDED], *plain] if padded else plain
    found: dict[str, Schedule] = {}
    for one in (*ranked, *(one for one in _of_rows(kernel, known) if _holds(kernel, one))):
        if len(found) < MOST:
            found.setdefault(one.name, one)
    return list(found.values())


def _by_turns(products: Sequence[Schedule]) -> list[Schedule]:
    """With tiles whole and shared by turns: the estimate knows little of what it costs to share one."""
    whole, shared = ([one for one in products if (one.parts > 1) == way] for way in (False, True))
    return [one for pair in zip_longest(whole, shared) for one in pair if one is not None]


def power(length: int) -> int:
    """The next power of two."""
    return 1 << max(0, length - 1).bit_length()


def _holds(kernel: Kernel, one: Schedule) -> bool:
    return all(
        math.prod(one.block(axis) for axis in expr.axes) <= TILE
        for store in kernel.stores
        for expr in (*store.value.walk(), store.value)
    )


def _of_products(kernel: Kernel, known: Mapping[str, int], device: Unit) -> Iterator[Schedule]:
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
    # A row times a matrix of half numbers: the matrix unit takes fifteen rows more at no cost. Of float32 it would not.
    single = not row and not nested and any(body.dtype in ops.HALVES for body in unwidened(*dot.bodies))
    few = not row or size(kernel, row, known) <= 16
    heights = [16] if few else [height for height in (32, 64, 128) if height <= power(size(kernel, row, known))]
    widths = [power(n)] if nested else [width for width in (16, 32, 64, 128, 256) if width <= max(16, power(n))]
    depths = [depth for depth in ((32, 64, 128) if nested else (32, 64, 128, 256)) if depth <= max(32, power(k))]
    for height in heights:
        for width in widths:
            for depth in depths:
                blocks = {**whole, column: max(16, width), over: depth}
                if row:
                    blocks[row] = height
                for parts in _parts(kernel, blocks, over, known, device):
                    # Of each tiling the few that ever won.
                    for warps, stages in ((4, 3), (4, 2), (8, 3)) if nested else ((4, 4), (2, 4), (4, 3)):
                        one = Schedule(blocks, warps=warps, stages=stages, parts=parts)
                        yield one
                        if single:
                            yield replace(one, padded=True)


def tiles(kernel: Kernel, blocks: Mapping[str, int], known: Mapping[str, int]) -> int:
    return math.prod(-(-size(kernel, axis, known) // blocks.get(axis, 1)) for axis in kernel.axes)


def _parts(kernel: Kernel, blocks: Mapping[str, int], over: str, known: Mapping[str, int], device: Unit) -> list[int]:
    """Into how many parts a tile's loop may go: one, and numbers that fill the device evenly, once to four times."""
    count, rounds = tiles(kernel, blocks, known), -(-size(kernel, over, known) // blocks[over])
    found = {1: None}
    for times in (1, 2, 3, 4):
        parts = min(times * device.units // count, rounds // 2, 128)
        if parts > 1:
            found.setdefault(-(-rounds // -(-rounds // parts)))  # as many as leave none without work
    return list(found)


def estimate(kernel: Kernel, one: Schedule, known: Mapping[str, int], device: Unit) -> float:
    """Seconds, roughly."""
    dot = main_product(kernel, known)
    assert dot is not None
    (over,) = dot.over
    loads: dict[Expr, None] = {}
    computed = 0  # elements of a round that are not merely moved from memory into a product
    seen: set[Expr] = set()
    for store in kernel.stores:
        for expr in store.value.walk():
            if expr in seen:
                continue
            seen.add(expr)
            if expr.op == "load" and expr.index:
                loads.setdefault(expr)
            elif over in expr.axes and expr.op not in ("constant", "position"):
                computed += math.prod(one.block(axis) for axis in expr.axes)
    # Values of a round of the loop, which are on their way while another round is computed.
    step, narrow, least = 0, 1.0, 0
    for load in loads:
        assert load.index is not None
        item = ITEM_BYTES[load.dtype]
        least += math.prod(size(kernel, axis, known) for axis in load.index.axes) * item
        if over in load.index.axes:
            step += math.prod(one.block(axis) for axis in load.index.axes) * item
            row = max((one.block(axis) for axis in load.index.axes if load.index.step(axis) == 1), default=1)
            narrow = max(narrow, 128 / max(16, min(128, row * item)))
    rounds = -(-size(kernel, over, known) // one.block(over))
    count = tiles(kernel, one.blocks, known)
    programs, held = count * one.parts, one.stages * step
    if held > device.shared_bytes:
        return math.inf
    resident = max(1, min(device.shared_bytes // held, 64 // one.warps, 16))
    # Programs that run at the same time share the memory evenly; what comes after them has it to itself.
    waves = programs / (device.units * resident)
    idle = math.ceil(waves) / waves if waves > 1 else max(1.0, device.units / (1.6 * programs))
    longest = math.ceil(rounds / one.parts) * one.parts / rounds
    on_their_way = min(programs / device.units, resident) * (one.stages - 1) * step
    thin = max(1.0, device.in_flight / on_their_way)
    far = least / device.bytes_per_s * thin * (1.0 + 0.1 * math.log2(narrow))
    near = count * rounds * step / device.near_bytes_per_s
    tile = math.prod(one.block(axis) for axis in dot.axes)
    flops = 2.0 * tile * one.block(over) * rounds * count
    multiplying = flops / device.flops_per_s * max(1.0, math.sqrt(128 * 128 / tile)) / 2
    computing = computed * rounds * count / device.steps_per_s
    joining = device.join_s + 2e-8 * one.parts if one.parts > 1 else 0.0
    return max(far, near, multiplying, computing) * idle * longest + device.launch_s + joining


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
        # Few long rows: several programs for each, which all compute its sums.
        for cut in (4, 8) if last in blocks and blocks[last] >= 1024 and rest < 128 else ():
            yield Schedule({**blocks, last: blocks[last] // cut}, warps=4, stages=1)
        return
    for block in (1024, 2048, 512, 256):
        blocks = {axis: min(block, power(size(kernel, axis, known))) for axis in (*reduced, last)}
        if len(kernel.axes) > 1 and not reduced and blocks[last] < block and rest > 1:
            blocks[kernel.axes[-2]] = min(power(size(kernel, kernel.axes[-2], known)), block // blocks[last])
        for warps in (4, 8):
            yield Schedule(blocks, warps=warps, stages=2)
