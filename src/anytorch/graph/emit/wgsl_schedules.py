"""Which schedules are worth trying for a kernel in WGSL, the likeliest first: a function of kernel, sizes and adapter.

Few: every one is a shader to compile, and on a software adapter, where barriers are slow, single threads nearly always win.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from anytorch.graph.emit.cpp_schedules import loads, main_product, rows_and_columns, size, volume
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.wgsl import EVERY, render
from anytorch.graph.loops import Kernel

LANES = 64
LONG = 1024  # terms of a row from which on more lanes share it
TILES = ((32, 8), (64, 1), (64, 4), (16, 16))  # columns of a worker, and groups of lanes that share their terms
MOST_ROWS = 8  # of a product, for which what is read of a column is used
FEW_ON_SOFTWARE = 2


def schedules(
    kernel: Kernel, known: Mapping[str, int], *, software: bool = False, features: Collection[str] = EVERY
) -> list[Schedule]:
    """Schedules that can be written, without repetition. Raises NotImplementedError if there are none."""
    offered = list(_offered(kernel, known))
    if software:
        # Strips of rows have so many barriers that Mesa takes seconds to compile one.
        offered.sort(key=lambda one: (one.lanes > 1, len(one.blocks)))
    found: dict[str, Schedule] = {}
    why = ""
    for one in offered:
        try:
            render(kernel, one, features)
        except NotImplementedError as exc:
            why = str(exc)
        else:
            found.setdefault(one.name, one)
    if not found:
        raise NotImplementedError(why)
    made = list(found.values())
    return made[:FEW_ON_SOFTWARE] if software else made


def _offered(kernel: Kernel, known: Mapping[str, int]) -> Iterator[Schedule]:
    axes, single = kernel.axes, Schedule(lanes=1)
    rows = [one for one in kernel.reductions if one.axes <= set(axes)]
    if not rows:
        yield single
        return
    used = frozenset().union(*(one.axes for one in rows))
    longest = max(volume(kernel, frozenset(one.over), known) for one in rows)
    lanes = 256 if longest > LONG else LANES
    free = len(axes)
    while free and axes[free - 1] not in used:
        free -= 1
    if free < len(axes):  # norms, softmax: whoever has computed a row's sums walks along it
        along = ",".join(axes[free:])
        if longest > LANES // 2:
            yield Schedule(spread=along, lanes=lanes)
        yield Schedule(spread=along, lanes=1)
        yield Schedule(spread=along, lanes=LANES)
        return
    if not axes:
        yield Schedule(lanes=lanes)
        yield single
        return
    last = axes[-1]
    terms = {axis for one in rows for axis in one.over}
    nested = any(one.axes & terms for one in kernel.reductions)
    if nested:  # attention: the weights of a row are computed once for all of its columns
        width = size(kernel, last, known)
        yield Schedule(spread=last, lanes=LANES)
        if width > LANES:
            yield Schedule(spread=last, lanes=2 * LANES)
        yield Schedule(spread=last, lanes=1)
    # How the largest operands lie in memory: those that change with the columns and with what is summed.
    matrices = [one.index for one in loads(kernel) if one.index and last in one.index.axes and one.index.axes & terms]
    along_terms = any(one.step(axis) == 1 for one in matrices for axis in terms)
    along_last = any(one.step(last) == 1 for one in matrices)
    if along_last or not along_terms:
        dot = main_product(kernel, known)
        strips = rows_and_columns(kernel, dot)[0] if dot is not None and not nested else []
        heights = {}
        if strips and size(kernel, strips[-1], known) > 1:
            heights[strips[-1]] = min(MOST_ROWS, 1 << (size(kernel, strips[-1], known) - 1).bit_length())
        for width, slices in TILES if longest > LANES else TILES[-1:]:
            yield Schedule({last: width, **heights}, spread=last, lanes=width * slices, slices=slices)
        if heights:
            yield Schedule({last: LANES}, spread=last, lanes=LANES)
    elif longest > LANES // 2:
        yield Schedule(lanes=lanes)
    yield single
