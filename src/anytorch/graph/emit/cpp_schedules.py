"""Which schedules are worth trying for a kernel in C++, the likeliest first: a function of kernel, sizes and machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from anytorch.graph.emit.cpp import render
from anytorch.graph.emit.cpp_functions import CannotVectorize
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.loops import Expr, Kernel, Reduction
from anytorch.graph.sizes import at

MOST_VECTORS = 16  # of a row of results, in registers
MOST_ROWS = 8  # of a product, in registers
CACHED, LARGER = 1 << 16, 1 << 17  # bytes of sums in memory that stay near the processor; they lie on the stack
LEAST_WORK = 1 << 14  # elementary steps worth an item of their own


@dataclass(frozen=True)
class Machine:
    threads: int
    width: int  # floats in a vector
    registers: int = 16


def schedules(kernel: Kernel, known: Mapping[str, int], machine: Machine) -> list[Schedule]:
    """Schedules that can be written, without repetition; the last one, without vectors, always can."""
    found: dict[str, Schedule] = {}
    for one in considered(kernel, known, machine):
        if one.name in found:
            continue
        try:
            render(kernel, one)
        except CannotVectorize:
            continue
        found[one.name] = one
    return list(found.values())


def considered(kernel: Kernel, known: Mapping[str, int], machine: Machine) -> list[Schedule]:
    """The same, and some that cannot be written: writing them all takes longer than finding one again may take."""
    every = [*_of_products(kernel, known, machine), *_of_rows(kernel, known, machine), Schedule()]
    cut = [_with_chunks(kernel, one, known, machine) for one in every]
    # Sums in memory also with one long item for every thread: rows of a matrix are then read from end to end.
    cut[1:1] = [_with_chunks(kernel, one, known, machine, each=1, cached=LARGER) for one in every if one.spread]
    return [one for one in cut if all(axis in kernel.extents for axis in one.blocks)]


def loads(kernel: Kernel) -> Iterator[Expr]:
    for store in kernel.stores:
        yield from (one for one in store.value.walk() if one.op == "load")


def size(kernel: Kernel, axis: str, known: Mapping[str, int]) -> int:
    return int(at(kernel.extents[axis], known))


def volume(kernel: Kernel, axes: frozenset[str], known: Mapping[str, int]) -> int:
    count = 1
    for axis in axes:
        count *= size(kernel, axis, known)
    return count


def main_product(kernel: Kernel, known: Mapping[str, int]) -> Reduction | None:
    """The sum of products that is most of the work, of those that stand in no other reduction."""
    dots = [one for one in kernel.reductions if one.how == "dot" and one.axes <= set(kernel.axes)]
    return max(dots, key=lambda one: volume(kernel, one.axes | set(one.over), known), default=None)


def rows_and_columns(kernel: Kernel, dot: Reduction) -> tuple[list[str], list[str]]:
    """The parallel axes that only the first argument of a product depends on, and those that only the second does."""
    left, right = (body.axes for body in dot.bodies)
    rows = [axis for axis in kernel.axes if axis in left and axis not in right]
    return rows, [axis for axis in kernel.axes if axis in right and axis not in left]


def _of_products(kernel: Kernel, known: Mapping[str, int], machine: Machine) -> Iterator[Schedule]:
    dot = main_product(kernel, known)
    if dot is None:
        return
    (over,) = dot.over
    rows, columns = rows_and_columns(kernel, dot)
    last = kernel.axes[-1] if kernel.axes else ""
    along = {axis: _evenly(kernel, axis) for axis in (over, *kernel.axes)}
    nested = [one.over[0] for one in kernel.reductions if over in one.axes and len(one.over) == 1]
    if nested and columns and columns[-1] == last and size(kernel, last, known) <= MOST_VECTORS * machine.width:
        # Attention: with all columns in registers a row of scores is computed once, for a few query heads at a time.
        whole = -(-size(kernel, last, known) // machine.width)
        lanes = frozenset({last, *(axis for axis in nested if _evenly(kernel, axis))})
        for heads in (2, 1, 4):
            held = {axis: min(heads, size(kernel, axis, known)) for axis in rows[-1:]}
            yield Schedule({**held, last: whole, **dict.fromkeys(lanes - {last}, 4)}, lanes)
    # Several query heads, or rows of a batch, share what is read of the other side.
    tile = {axis: min(MOST_ROWS, size(kernel, axis, known)) for axis in rows[-1:]}
    few = {axis: min(4, size(kernel, axis, known)) for axis in rows[-1:]}
    if columns and columns[-1] == last and along[last]:
        for terms in (8, 4):
            yield Schedule({**tile, over: terms}, frozenset({last}), spread=last)
        for vectors in (2, 4):
            yield Schedule({**few, last: vectors, over: 4}, frozenset({last}))
    inner = [
        one.over[0]
        for one in kernel.reductions
        if len(one.over) == 1 and along.get(one.over[0], _evenly(kernel, one.over[0]))
    ]
    if columns and along[over]:
        yield Schedule({**few, columns[-1]: 4, over: 1}, frozenset({over}))
        yield Schedule({**few, columns[-1]: 2, over: 2}, frozenset({over}))
    if inner:
        yield Schedule({**few}, frozenset({last, *inner}) - {over})
        yield Schedule({}, frozenset({last, *inner}) - {over})


def _of_rows(kernel: Kernel, known: Mapping[str, int], machine: Machine) -> Iterator[Schedule]:
    if not kernel.axes:
        return
    reduced = [axis for axis in kernel.extents if axis not in kernel.axes and _evenly(kernel, axis)]
    last = kernel.axes[-1]
    for vectors in ({last, *reduced}, set(reduced), {last}):
        for count in (4, 1):
            yield Schedule(dict.fromkeys(vectors, count), frozenset(vectors))


def _evenly(kernel: Kernel, axis: str) -> bool:
    """Whether all loads take neighbouring elements, or the same one, along this axis."""
    steps = [one.index.step(axis) for one in loads(kernel) if one.index is not None]
    steps += [store.index.step(axis) for store in kernel.stores]
    return all(step in (0, 1) for step in steps)


def _with_chunks(
    kernel: Kernel, one: Schedule, known: Mapping[str, int], machine: Machine, each: int = 8, cached: int = CACHED
) -> Schedule:
    """The same with work items: enough for all threads, each worth its while, and sums in memory that stay cached."""
    if not kernel.axes:
        return one
    total = volume(kernel, frozenset(kernel.axes), known)
    work = total + sum(volume(kernel, r.axes | set(r.over), known) for r in kernel.reductions)
    wanted = max(1, min(machine.threads * each, work // LEAST_WORK))
    chunks: dict[str, int] = {}
    items = 1
    for axis in kernel.axes:  # outer axes are divided first: an item then has whole rows
        tile = one.block(axis) * (machine.width if axis in one.vectors else 1)
        tiles = -(-size(kernel, axis, known) // tile)
        parts = min(tiles, -(-wanted // items))
        if axis == one.spread:
            rows = max(1, len([r for r in kernel.reductions if axis in r.axes]))  # every sum has an array of its own
            for other in kernel.axes:
                rows *= one.block(other) if other != axis else 1
            most = max(1, cached // (4 * rows * tile))
            parts = max(parts, -(-tiles // most))
        chunks[axis] = -(-tiles // parts)
        items *= parts
    return replace(one, chunks=chunks)
