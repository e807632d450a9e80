"""Max, average and adaptive pooling of one to three dimensions, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from anytorch.gpu.wgsl import pool as wgsl
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import narrowed
from anytorch.webgpu.dtypes import FLOATS, name_of, spoken, usable
from anytorch.webgpu.kernels import op_of, register_kernels
from anytorch.webgpu.launch import NoKernel, infer
from anytorch.webgpu.per_element import new_words, per_element

Triple = tuple[int, int, int]


def triple(values: Any, rank: int, missing: int) -> Triple:
    listed = [values] if isinstance(values, int) else list(values)
    whole = listed * rank if len(listed) == 1 else listed
    padded = [missing] * (3 - rank) + whole
    return (padded[0], padded[1], padded[2])


def _five(tensor: torch.Tensor, rank: int) -> tuple[list[int], list[int]]:
    """Sizes and strides as (n, c, d, h, w)."""
    sizes, strides = list(tensor.shape), list(tensor.stride())
    if len(sizes) == rank + 1:
        sizes, strides = [1, *sizes], [0, *strides]
    missing = 3 - rank
    return [*sizes[:2], *[1] * missing, *sizes[2:]], [*strides[:2], *[0] * missing, *strides[2:]]


def _numbers(x: torch.Tensor, y: torch.Tensor, rank: int) -> list[tuple[str, str, Any]]:
    (x_sizes, x_strides), (y_sizes, y_strides) = _five(x, rank), _five(y, rank)
    values = [x_sizes[1], *x_sizes[2:], *y_sizes[2:], *x_strides, *y_strides]
    return [(name, "u32", value) for name, value in zip(("channels", *wgsl.SIZES, *wgsl.STRIDES), values, strict=True)]


def _maximum(op: Any, x: torch.Tensor, args: Sequence[Any], rank: int, window: wgsl.Window) -> Any:
    made, places = infer(op, x, *args)
    if x.dtype is torch.bool or (window.adaptive and not x.is_floating_point() and not x.is_complex()):
        raise NotImplementedError(f'"{op._opname}" not implemented for {spoken(x.dtype)!r}')
    if not usable(x.dtype, torch.int64):
        raise NoKernel
    if x.dim() == rank + 1 == 4 and x.unsqueeze(0).is_contiguous(memory_format=torch.channels_last_3d):
        # torch's meta kernel forgets the layout of a sample without a batch
        made, places = (t.unsqueeze(0).contiguous(memory_format=torch.channels_last_3d)[0] for t in (made, places))
    y, index = new_words(made), new_words(places)
    body = wgsl.maximum(window, KINDS[name_of(x.dtype)].compute, "i64")
    per_element([("x", x)], [("y", y), ("index", index)], _numbers(x, y, rank), y.numel(), body)
    return narrowed(y, x.dtype), index


def _average(op: Any, x: torch.Tensor, args: Sequence[Any], rank: int, window: wgsl.Window) -> torch.Tensor:
    made = infer(op, x, *args)
    if x.dtype not in FLOATS or not usable(x.dtype):
        raise NoKernel
    y = new_words(made)
    per_element([("x", x)], [("y", y)], _numbers(x, y, rank), y.numel(), wgsl.average(window))
    return narrowed(y, x.dtype)


def _backward(
    op: Any, gradient: torch.Tensor, x: torch.Tensor, args: Sequence[Any], rank: int, window: wgsl.Window
) -> torch.Tensor:
    """The last argument of a maximum's gradient is where each was found."""
    made = infer(op, gradient, x, *args)
    index = args[-1] if args and isinstance(args[-1], torch.Tensor) else None
    needed = (x.dtype, torch.int64) if index is not None else (x.dtype,)
    if x.dtype not in FLOATS or gradient.dtype is not x.dtype or not usable(*needed):
        raise NoKernel
    result = new_words(made)
    if gradient.numel() == 0:
        return narrowed(result.zero_(), x.dtype)
    inputs = [("g", gradient)]
    if index is not None:
        if index.stride() != gradient.stride():
            gradient, index = gradient.contiguous(), index.contiguous()
        inputs = [("g", gradient), ("index", index)]
    body = wgsl.average_backward(window) if index is None else wgsl.maximum_backward(window)
    per_element(inputs, [("x", result)], _numbers(result, gradient, rank), result.numel(), body)
    return narrowed(result, x.dtype)


# A window from the arguments that follow the tensors.


def _max_window(
    rank: int, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, *index: Any
) -> wgsl.Window:
    steps = triple(stride or kernel, rank, 1)
    return wgsl.Window(False, triple(kernel, rank, 1), steps, triple(padding, rank, 0), triple(dilation, rank, 1))


def _avg_window(
    rank: int,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> wgsl.Window:
    window = _max_window(rank, kernel, stride, padding)
    return replace(window, include_padding=count_include_pad, divisor=divisor_override or 0)


def _adaptive_window(rank: int, *args: Any) -> wgsl.Window:
    return wgsl.Window(adaptive=True)


def _kernel(op: Any, compute: Callable[..., Any], rank: int, tensors: int, window: Callable[..., Any]) -> Any:
    """The kernel of an op whose first `tensors` arguments are what it computes from, the others its window's."""

    def kernel(*given: Any) -> Any:
        args = [list(value) if isinstance(value, tuple) else value for value in given[tensors:]]
        return compute(op, *given[:tensors], args, rank, window(rank, *args))

    return kernel


POOLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "max_pool{}d_with_indices": (_maximum, _max_window),
    "avg_pool{}d": (_average, _avg_window),
    "_adaptive_avg_pool{}d": (_average, _adaptive_window),
    "adaptive_max_pool{}d": (_maximum, _adaptive_window),
}


def register(library: torch.library.Library) -> None:
    for pattern, (forward, window) in POOLS.items():
        for rank in (2, 3):
            name = pattern.format(rank)
            for each, compute, tensors in ((name, forward, 1), (f"{name}_backward", _backward, 2)):
                register_kernels(library, {each: _kernel(op_of(each), compute, rank, tensors, window)})
