"""Fewer and longer axes for a kernel that computes element by element: rows shorter than a vector waste its lanes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from anytorch.graph.indices import Index
from anytorch.graph.loops import Expr, Kernel, Store


def flattened(kernel: Kernel) -> Kernel:
    """The same kernel with neighbouring axes joined to one wherever all that is read and written lies as if they were one.

    [20000, 6] becomes [120000]. What a row shares with the others (a bias) keeps the rows apart. A kernel with reductions is
    left as it is: its schedules want to know rows from columns.
    """
    if kernel.reductions or not kernel.axes:
        return kernel
    *others, inner = kernel.axes
    for outer in reversed(others):
        if all(_as_one(index, outer, inner, kernel) for index in _indices(kernel)):
            kernel = _joined(kernel, outer, inner)
        else:
            inner = outer
    return kernel


def _indices(kernel: Kernel) -> Iterator[Index]:
    for store in kernel.stores:
        yield store.index
        yield from (one.index for one in store.value.walk() if one.index is not None)


def _as_one(index: Index, outer: str, inner: str, kernel: Kernel) -> bool:
    """Whether a step along the outer axis leads to where a whole walk along the inner one does."""
    wide, narrow = index.step(outer), index.step(inner)
    return wide is not None and narrow is not None and wide == narrow * kernel.extents[inner]


def _joined(kernel: Kernel, outer: str, inner: str) -> Kernel:
    """The kernel with the inner axis as long as both."""
    done: dict[Expr, Expr] = {}

    def without(index: Index) -> Index:
        return Index(tuple(term for term in index.terms if term[0] != outer), index.start)

    def changed(expr: Expr) -> Expr:
        if expr not in done:
            index = None if expr.index is None else without(expr.index)
            done[expr] = replace(expr, args=tuple(changed(arg) for arg in expr.args), index=index)
        return done[expr]

    extents = {axis: size for axis, size in kernel.extents.items() if axis != outer}
    extents[inner] = kernel.extents[outer] * kernel.extents[inner]
    stores = tuple(Store(one.buffer, without(one.index), changed(one.value)) for one in kernel.stores)
    return Kernel(tuple(axis for axis in kernel.axes if axis != outer), extents, kernel.buffers, stores)
