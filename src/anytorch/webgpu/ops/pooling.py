"""Max, average and adaptive pooling of one to three dimensions, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.wgsl import pool as wgsl
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import narrowed
from anytorch.webgpu.dtypes import FLOATS, name_of, usable
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.forms import KEY, register_with_out
from anytorch.webgpu.launch import infer
from anytorch.webgpu.oversize import halving
from anytorch.webgpu.per_element import new_words, per_element
from anytorch.webgpu.tensors import aten

Triple = tuple[int, int, int]


def _triple(values: Any, rank: int, missing: int) -> Triple:
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
    if not usable(x.dtype, torch.int64):
        return fallback(op, x, *args)
    y, index = new_words(made), new_words(places)
    body = wgsl.maximum(window, KINDS[name_of(x.dtype)].compute, "i64")
    per_element([("x", x)], [("y", y), ("index", index)], _numbers(x, y, rank), y.numel(), body)
    return narrowed(y, x.dtype), index


def _average(op: Any, x: torch.Tensor, args: Sequence[Any], rank: int, window: wgsl.Window) -> torch.Tensor:
    made = infer(op, x, *args)
    if x.dtype not in FLOATS or not usable(x.dtype):
        there: torch.Tensor = fallback(op, x, *args)
        return there
    y = new_words(made)
    per_element([("x", x)], [("y", y)], _numbers(x, y, rank), y.numel(), wgsl.average(window))
    return narrowed(y, x.dtype)


def _backward(
    op: Any,
    gradient: torch.Tensor,
    x: torch.Tensor,
    args: Sequence[Any],
    rank: int,
    window: wgsl.Window,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    made = infer(op, gradient, x, *args)
    needed = (x.dtype, torch.int64) if index is not None else (x.dtype,)
    if x.dtype not in FLOATS or gradient.dtype is not x.dtype or not usable(*needed):
        there: torch.Tensor = fallback(op, gradient, x, *args)
        return there
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


def _fixed(rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1, **more: Any) -> wgsl.Window:
    return wgsl.Window(
        False,
        _triple(kernel, rank, 1),
        _triple(stride if stride not in (None, [], ()) else kernel, rank, 1),
        _triple(padding, rank, 0),
        _triple(dilation, rank, 1),
        **more,
    )


def _max_pool(rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    op = getattr(aten, f"max_pool{rank}d_with_indices").default
    backward_op = getattr(aten, f"max_pool{rank}d_with_indices_backward").default

    def forward(
        x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        args = (kernel, list(stride), padding, dilation, ceil_mode)
        return _maximum(op, x, args, rank, _fixed(rank, kernel, stride, padding, dilation))

    def backward(
        gradient: torch.Tensor,
        x: torch.Tensor,
        kernel: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        window = _fixed(rank, kernel, stride, padding, dilation)
        args = (kernel, list(stride), padding, dilation, ceil_mode, indices)
        return _backward(backward_op, gradient, x, args, rank, window, indices)

    return forward, backward


def _avg_pool(rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    op = getattr(aten, f"avg_pool{rank}d").default
    backward_op = getattr(aten, f"avg_pool{rank}d_backward").default

    def forward(
        x: torch.Tensor,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> torch.Tensor:
        window = _fixed(rank, kernel, stride, padding, include_padding=count_include_pad, divisor=divisor_override or 0)
        args = (kernel, list(stride), padding, ceil_mode, count_include_pad, divisor_override)
        return _average(op, x, args, rank, window)

    def backward(
        gradient: torch.Tensor,
        x: torch.Tensor,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> torch.Tensor:
        window = _fixed(rank, kernel, stride, padding, include_padding=count_include_pad, divisor=divisor_override or 0)
        args = (kernel, list(stride), padding, ceil_mode, count_include_pad, divisor_override)
        return _backward(backward_op, gradient, x, args, rank, window)

    return forward, backward


ADAPTIVE = wgsl.Window(adaptive=True)


def _adaptive_avg(rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    op = getattr(aten, f"_adaptive_avg_pool{rank}d").default
    backward_op = getattr(aten, f"_adaptive_avg_pool{rank}d_backward").default

    def forward(x: torch.Tensor, output_size: Any) -> torch.Tensor:
        return _average(op, x, (list(output_size),), rank, ADAPTIVE)

    def backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _backward(backward_op, gradient, x, (), rank, ADAPTIVE)

    return forward, backward


def _adaptive_max(rank: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    op = getattr(aten, f"adaptive_max_pool{rank}d").default
    backward_op = getattr(aten, f"adaptive_max_pool{rank}d_backward").default

    def forward(x: torch.Tensor, output_size: Any) -> Any:
        return _maximum(op, x, (list(output_size),), rank, ADAPTIVE)

    def backward(gradient: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return _backward(backward_op, gradient, x, (indices,), rank, ADAPTIVE, indices)

    return forward, backward


def register(library: torch.library.Library) -> None:
    for rank in (2, 3):
        for name, kernels in (
            (f"max_pool{rank}d_with_indices", _max_pool(rank)),
            (f"avg_pool{rank}d", _avg_pool(rank)),
            (f"_adaptive_avg_pool{rank}d", _adaptive_avg(rank)),
            (f"adaptive_max_pool{rank}d", _adaptive_max(rank)),
        ):
            for each, kernel in zip((name, f"{name}_backward"), kernels, strict=True):
                op = getattr(aten, each).default
                if name.startswith("_"):
                    library.impl(op, halving(op, kernel), KEY)
                else:
                    register_with_out(library, op, halving(op, kernel))
