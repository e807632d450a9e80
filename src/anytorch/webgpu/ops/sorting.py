"""Sort, top-k, medians, search in sorted rows, unique elements, histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import sort as wgsl
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import name_of, usable, word_dtype
from anytorch.webgpu.folds import reduce_dims
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices, infer, launch
from anytorch.webgpu.ops.reductions import scan
from anytorch.webgpu.tensors import aten, new_contiguous

Pair = tuple[torch.Tensor, torch.Tensor]


def _workgroups(threads: int) -> int:
    return -(-threads // wgsl.THREADS)


# --- sorting ----------------------------------------------------------------------------------------------------------


def sorted_positions(x: torch.Tensor, descending: bool, keep: int) -> torch.Tensor:
    """Positions, as int32, of the first `keep` elements of each sorted row of a dense (rows, length) tensor.

    The result's rows may be longer than `keep`. Equal elements keep their order.
    """
    runtime = open_runtime()
    rows, length = x.shape
    if runtime.adapter.software:
        keys, at = _make_keys(wgsl.Keys(name_of(x.dtype), descending), [x], rows, length, length)
        return _merged(keys, at, 1)
    cut = keep if keep <= wgsl.BLOCK // 2 else length  # each pass must shrink the rows, or there is no end to them
    keys, at = _make_keys(wgsl.Keys(name_of(x.dtype), descending, block=True), [x], rows, length, cut)
    if cut == length:
        return _merged(keys, at, wgsl.BLOCK)
    while length > wgsl.BLOCK:
        length = at.size(1)
        keys, at = _make_keys(wgsl.Keys(name_of(x.dtype), descending, True, True), [keys, at], rows, length, cut)
    return at


def _make_keys(kernel: wgsl.Keys, sources: Sequence[torch.Tensor], rows: int, length: int, keep: int) -> Pair:
    blocks = -(-length // wgsl.BLOCK)
    share = min(keep, wgsl.BLOCK)
    width = (blocks - 1) * share + min(length - (blocks - 1) * wgsl.BLOCK, share) if kernel.block else length
    keys = new_contiguous((rows, width), torch.int64 if kernel.wide else torch.int32)
    at = new_contiguous((rows, width), torch.int32)
    groups = rows * blocks if kernel.block else _workgroups(rows * length)
    numbers: dict[str, Any] = {"head": (rows, length), "tail": (blocks, keep), "writable": kernel.writable}
    launch(kernel, wgsl.render_keys, [*sources, keys, at], groups, **numbers)
    return keys, at


def _merged(keys: torch.Tensor, at: torch.Tensor, run: int) -> torch.Tensor:
    rows, length = keys.shape
    wide = keys.dtype is torch.int64
    if run >= length:
        return at
    spare_keys, spare_at = new_contiguous(keys.shape, keys.dtype), new_contiguous(at.shape, at.dtype)
    while run < length:
        numbers: dict[str, Any] = {"head": (rows, length, run), "placed": 0, "writable": 0b1100}
        bound, groups = [keys, at, spare_keys, spare_at], _workgroups(rows * length)
        launch(("merge", wide), lambda kernel: wgsl.render_merge(kernel[1]), bound, groups, **numbers)
        keys, at, spare_keys, spare_at = spare_keys, spare_at, keys, at
        run *= 2
    return at


def fetch(x: torch.Tensor, at: torch.Tensor, keep: int, positions: bool = True) -> list[torch.Tensor]:
    """Values of the dense (rows, length) tensor at the first `keep` positions of each row, and these as int64."""
    rows, length = x.shape
    values = new_contiguous((rows, keep), word_dtype(x.dtype))
    kernel = wgsl.Fetch(name_of(x.dtype), name_of(values.dtype), positions)
    made = [values, new_contiguous((rows, keep), torch.int64)] if positions else [values]
    if rows and keep:
        numbers: dict[str, Any] = {"head": (rows, keep, at.size(1), length), "writable": 0b1100 if positions else 0b100}
        launch(kernel, wgsl.render_fetch, [x, at, *made], _workgroups(rows * keep), **numbers)
    return [narrowed(values, x.dtype), *made[1:]]


def _rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor as dense rows along `dim`."""
    if x.dim() == 0:
        return x.view(1, 1)
    length = x.size(dim)
    dense = contiguous(x.movedim(dim, -1))
    return dense.view(x.numel() // length if length else 0, length)


def _back(rows: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Undo _rows, for rows of another length."""
    if like.dim() == 0:
        return rows.view(())
    dim %= like.dim()
    shape = [*like.shape[:dim], *like.shape[dim + 1 :], rows.size(1)]
    return contiguous(rows.view(shape).movedim(-1, dim))


def ordered(x: torch.Tensor, dim: int, descending: bool, keep: int | None = None) -> Pair:
    """The first `keep` values (all, if None) of `x` sorted along `dim`, and their positions. Stable; NaN is largest."""
    if x.numel() == 0:
        shape = list(x.shape)
        if keep is not None and shape:
            shape[dim] = keep
        return new_contiguous(shape, x.dtype), new_contiguous(shape, torch.int64)
    rows = _rows(x, dim)
    count = rows.size(1) if keep is None else keep
    if count == 0:
        made = [new_contiguous((rows.size(0), 0), x.dtype), new_contiguous((rows.size(0), 0), torch.int64)]
    else:
        made = fetch(rows, sorted_positions(rows, descending, count), count)
    return _back(made[0], x, dim), _back(made[1], x, dim)


def _check_sortable(x: torch.Tensor) -> None:
    if not usable(x.dtype, torch.int64):
        raise NoKernel


def sort(self: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    infer(aten.sort.stable, self, stable=stable, dim=dim, descending=descending)
    _check_sortable(self)
    return ordered(self, dim, descending)


def topk(self: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    infer(aten.topk.default, self, k, dim, largest, sorted)
    _check_sortable(self)
    return ordered(self, dim, largest, k)


def kthvalue(self: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    length = self.size(dim) if self.dim() else 1
    if length == 0:
        raise IndexError(f"kthvalue(): Expected reduction dim {dim % self.dim()} to have non-zero size.")
    if not 1 <= k <= length:
        raise RuntimeError(f"kthvalue(): selected number k out of range for dimension {dim}")
    _check_sortable(self)
    return _pick(ordered(self, dim, False, k), dim, k - 1, keepdim)


def _pick(pair: Pair, dim: int, at: int | torch.Tensor, keepdim: bool) -> Pair:
    """Of values and positions, what is at one place of each row: a number, or an index."""
    if pair[0].dim() == 0:
        return pair
    chosen = [x.narrow(dim, at, 1) if isinstance(at, int) else x.gather(dim, at) for x in pair]
    first, second = [contiguous(x if keepdim else x.squeeze(dim)) for x in chosen]
    return first, second


def median_dim(self: torch.Tensor, dim: int, keepdim: bool = False, *, ignore_nan: bool = False) -> Pair:
    length = self.size(dim) if self.dim() else 1
    if length == 0:
        raise IndexError(f"median(): Expected reduction dim {dim} to have non-zero size.")
    _check_sortable(self)
    both = ordered(self, dim, False)
    if not self.is_floating_point() or self.numel() == 0 or self.dim() == 0:
        return _pick(both, dim, (length - 1) // 2, keepdim)
    dim %= self.dim()
    size = [1 if d == dim else n for d, n in enumerate(self.shape)]
    # The numbers of a sorted row come first: one NaN decides a plain median, and is at place `numbers`.
    (numbers,) = reduce_dims("count_numbers", (self,), (dim,), [torch.int64], size)
    if ignore_nan:
        place = torch.div(numbers - 1, 2, rounding_mode="floor").clamp(min=0)
    else:
        place = torch.where(numbers < length, numbers, (length - 1) // 2)
    return _pick(both, dim, place, keepdim)


def median(self: torch.Tensor, *, ignore_nan: bool = False) -> torch.Tensor:
    _check_sortable(self)
    if self.numel():
        return median_dim(contiguous(self).view(-1), 0, ignore_nan=ignore_nan)[0]
    if not self.is_floating_point():
        raise NoKernel
    return new_contiguous((), self.dtype).fill_(math.nan)


def mode(self: torch.Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """The smallest of the most frequent values, as on the CPU, and where it is last (the CPU names any)."""
    _check_sortable(self)
    if self.numel() == 0:
        raise NoKernel
    if self.dim() == 0:
        return ordered(self, dim, False)
    dim %= self.dim()
    length = self.size(dim)
    values, positions = ordered(self, dim, False)
    # Each element's place in its run of equals: the first longest run ends where this is first largest.
    shape = [length if d == dim else 1 for d in range(self.dim())]
    place = torch.arange(length, dtype=torch.int32, device=self.device).view(shape).expand(self.shape)
    starts = torch.zeros(self.shape, dtype=torch.int32, device=self.device)
    later = starts.narrow(dim, 1, length - 1)
    differs = values.narrow(dim, 1, length - 1) != values.narrow(dim, 0, length - 1)
    later.copy_(torch.where(differs, place.narrow(dim, 1, length - 1), later))
    begun = scan("cummax", starts, dim, [torch.int32, torch.int64])[0]
    return _pick((values, positions), dim, (place - begun).argmax(dim, keepdim=True), keepdim)


# --- searching --------------------------------------------------------------------------------------------------------


def _as_tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value if value.dim() else value.to(like.device)
    dtype = like.dtype if like.is_floating_point() or isinstance(value, int) else torch.float32
    return torch.full((), value, dtype=dtype, device=like.device)


def searchsorted(
    sorted_sequence: torch.Tensor,
    self: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> Any:
    values = _as_tensor(self, sorted_sequence)
    op = aten.searchsorted.Tensor
    infer(op, sorted_sequence, values, out_int32=out_int32, right=right, side=side, sorter=sorter)
    check_devices(op, sorted_sequence, values, sorter)
    if not usable(sorted_sequence.dtype, values.dtype, torch.int64):
        raise NoKernel
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    out = new_contiguous(values.shape, torch.int32 if out_int32 else torch.int64)
    count = values.numel()
    if count == 0 or sorted_sequence.numel() == 0:
        return out.fill_(0)
    sequence, values = contiguous(sorted_sequence), contiguous(values)
    length = sequence.size(-1)
    common = KINDS[name_of(torch.promote_types(sequence.dtype, values.dtype))].compute
    kinds = name_of(sequence.dtype), name_of(values.dtype), name_of(out.dtype)
    head = (count, count if sequence.dim() == 1 else values.size(-1), length)
    tensors, kernel = [sequence, values, out], wgsl.Search(*kinds, right or side == "right", common)
    launch(kernel, wgsl.render_search, tensors, _workgroups(count), placed=2, head=head, tail=(length,))
    return out


def bucketize(self: Any, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    if boundaries.dim() != 1:
        raise RuntimeError(f"bucketize(): boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")
    return searchsorted(boundaries, self, out_int32=out_int32, right=right)


# --- runs of equal elements -------------------------------------------------------------------------------------------


def _groups(x: torch.Tensor, return_counts: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a flat tensor: the first of each run of equal elements, every element's run (from 1, int32), runs' lengths."""
    length = x.numel()
    starts = torch.ones(length, dtype=torch.int32, device=x.device)
    starts[1:] = x[1:] != x[:-1]
    (counts,) = scan("count", starts, 0, [torch.int32])
    total = int(counts[-1].item())  # the one number the host must wait for
    at = new_contiguous((1, total), torch.int32)  # where the running count rises
    launch("compact", lambda _: wgsl.render_compact(), [counts, at], _workgroups(length), head=(length,))
    values = fetch(x.view(1, -1), at, total, positions=False)[0].view(-1)
    lengths = new_contiguous((0,), torch.int64)
    if return_counts:
        ends = torch.full((total,), length, dtype=torch.int64, device=x.device)
        ends[:-1] = at.view(-1)[1:]
        lengths = ends - at.view(-1)
    return values, counts, lengths


def unique2(self: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    _check_sortable(self)
    none = new_contiguous((0,), torch.int64)
    if self.numel() == 0:
        inverse = new_contiguous(self.shape, torch.int64) if return_inverse else none
        return new_contiguous((0,), self.dtype), inverse, none
    flat = contiguous(self).view(1, -1)
    at = sorted_positions(flat, False, flat.size(1))
    in_order = fetch(flat, at, flat.size(1), positions=False)[0].view(-1)
    values, counts, lengths = _groups(in_order, return_counts)
    inverse = none
    if return_inverse:
        inverse = new_contiguous(self.shape, torch.int64)
        count = counts.numel()
        tensors = [counts, at, inverse]
        launch("place", lambda _: wgsl.render_place(), tensors, _workgroups(count), head=(count,), writable=0b100)
    return values, inverse, lengths


def unique_consecutive(
    self: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    _check_sortable(self)
    if (dim is not None and self.dim() != 1) or self.numel() == 0:
        raise NoKernel
    values, counts, lengths = _groups(contiguous(self).view(-1), return_counts)
    inverse = (counts.to(torch.int64) - 1).view(self.shape) if return_inverse else new_contiguous((0,), torch.int64)
    return values, inverse, lengths


# --- counting ---------------------------------------------------------------------------------------------------------


def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    low, high = float(min), float(max)
    # The CPU places halves in their own arithmetic; only float32 falls in the same bins here.
    # It takes no whole numbers; CUDA does, and mixtures of experts count with them on any other device.
    whole = self.dtype in (torch.int32, torch.int64)
    plain = (self.dtype is torch.float32 or whole) and self.numel() > 0 and bins > 0
    if not plain or low > high or not (math.isfinite(low) and math.isfinite(high)):
        raise NoKernel
    if low == high:
        low, high = (float(v) for v in torch.stack(torch.aminmax(self)).tolist())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NoKernel
    if low == high:
        low, high = low - 1, high + 1
    made = new_contiguous((bins,), torch.int32).fill_(0)
    count = self.numel()
    if not whole:
        head, kernel = (count, bins), wgsl.Count(name_of(self.dtype))
        launch(kernel, wgsl.render_count, [contiguous(self), made], _workgroups(count), head=head, tail=(low, high))
    else:  # in whole numbers
        first, last = int(low), int(high)
        places = torch.div((self.reshape(-1).to(torch.int64) - first) * bins, last - first, rounding_mode="floor")
        inside = ((self >= first) & (self <= last)).reshape(-1)
        made.scatter_add_(0, places.clamp(0, bins - 1), inside.to(torch.int32))
    return narrowed(made, self.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "sort.stable": sort,
    "topk": topk,
    "kthvalue": kthvalue,
    "median.dim": median_dim,
    "nanmedian.dim": partial(median_dim, ignore_nan=True),
    "median": median,
    "nanmedian": partial(median, ignore_nan=True),
    "mode": mode,
    "searchsorted.Tensor": searchsorted,
    "searchsorted.Scalar": searchsorted,
    "bucketize.Tensor": bucketize,
    "bucketize.Scalar": bucketize,
    "_unique2": unique2,
    "_unique": lambda *args: unique2(*args)[:2],
    "unique_consecutive": unique_consecutive,
    "histc": histc,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
