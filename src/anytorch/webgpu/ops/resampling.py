"""Upsampling, reflection and replication padding, im2col and col2im, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.wgsl import resample as wgsl
from anytorch.webgpu.copies import contiguous, narrowed, on_device
from anytorch.webgpu.dtypes import FLOATS, computable, word_dtype
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.forms import KEY, register_with_out
from anytorch.webgpu.launch import NoKernel, check_devices, infer
from anytorch.webgpu.oversize import halving
from anytorch.webgpu.per_element import per_element
from anytorch.webgpu.tensors import aten, new_contiguous, new_tensor

# aten's name without rank or direction, the generator's mode, whether align_corners is an argument, ranks
MODES = (
    ("upsample_nearest{}d", "nearest", False, (1, 2, 3)),
    ("_upsample_nearest_exact{}d", "exact", False, (1, 2, 3)),
    ("upsample_linear{}d", "linear", True, (1,)),
    ("upsample_bilinear{}d", "linear", True, (2,)),
    ("upsample_trilinear{}d", "linear", True, (3,)),
    ("upsample_bicubic{}d", "cubic", True, (2,)),
)


def _laid_out(dense: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A contiguous result in the dtype and the strides torch says it has."""
    if dense.stride() == like.stride():
        return narrowed(dense, like.dtype)
    return on_device(dense, new_tensor(like.size(), like.stride(), like.dtype))


def _scales(x: Sequence[int], y: Sequence[int], align_corners: bool, given: Sequence[float | None]) -> list[float]:
    """How far the source moves per place of the result, on each axis."""
    found = []
    for length, wanted, scale in zip(x, y, given, strict=True):
        if align_corners:
            found.append((length - 1) / (wanted - 1) if wanted > 1 else 0.0)
        else:
            found.append(1.0 / scale if scale is not None and scale > 0 else length / wanted)
    return found


def _numbers(x: Sequence[int], y: Sequence[int], scales: Sequence[float]) -> list[tuple[str, str, Any]]:
    rank = len(scales)
    return [
        (name.split(":")[0], name.split(": ")[1], value)
        for name, value in zip(wgsl.sizes(rank), (*x, *y, *scales), strict=True)
    ]


def _upsample(op: Any, mode: str, rank: int, aligning: bool) -> Callable[..., torch.Tensor]:
    """The kernel of an op or of its gradient, which has the input's size before the scales."""
    backward = op._schema.name.endswith("_backward")

    def kernel(given: torch.Tensor, output_size: Any, *rest: Any, **named: Any) -> torch.Tensor:
        sizes = [list(output_size), *[list(size) for size in rest[:backward]]]
        values = _arguments(op, 1 + len(sizes), rest[backward:], named)
        align = bool(values[0]) if aligning else False
        made = infer(op, given, *sizes, *values)
        if given.dtype not in FLOATS or not computable(given.dtype):
            raise NoKernel
        result = new_contiguous(made.size(), word_dtype(given.dtype))
        x, y = (result, given) if backward else (given, result)
        scales = _scales(x.shape[2:], y.shape[2:], align, values[1:] if aligning else values)
        numbers = _numbers(x.shape[2:], y.shape[2:], scales)
        functions = wgsl.interpolation(mode, align)
        body, names = (wgsl.backward(mode, rank), "gx") if backward else (wgsl.forward(mode, rank), "xy")
        per_element([(names[0], contiguous(given))], [(names[1], result)], numbers, result.numel(), body, functions)
        return _laid_out(result, made)

    return kernel


def _arguments(op: Any, first: int, rest: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """What follows the sizes: align_corners where there is one, then a scale per axis."""
    values = list(rest)
    for argument in op._schema.arguments[first + len(values) :]:
        values.append(named.get(argument.name))
    return values


# --- padding -------------------------------------------------------------------------------------------------------


def _lefts(padding: Sequence[int], rank: int) -> list[int]:
    """torch counts axes from the last."""
    return [padding[2 * (rank - 1 - axis)] for axis in range(rank)]


def _padding_numbers(x: Sequence[int], y: Sequence[int], padding: Sequence[int]) -> list[tuple[str, str, Any]]:
    rank = len(padding) // 2
    names = wgsl.padding_parameters(rank)
    values = (*x[-rank:], *y[-rank:], *_lefts(padding, rank))
    return [(name.split(":")[0], name.split(": ")[1], value) for name, value in zip(names, values, strict=True)]


def _pad(op: Any, mode: str, rank: int) -> Callable[..., torch.Tensor]:
    def kernel(x: torch.Tensor, padding: Any) -> torch.Tensor:
        made = infer(op, x, list(padding))
        if not computable(x.dtype):
            raise NoKernel
        y = new_contiguous(made.size(), word_dtype(x.dtype))
        numbers = _padding_numbers(x.shape, y.shape, padding)
        functions = wgsl.padding_source(mode)
        per_element([("x", contiguous(x))], [("y", y)], numbers, y.numel(), wgsl.padding_forward(rank), functions)
        return _laid_out(y, made)

    return kernel


def _pad_backward(op: Any, mode: str, rank: int) -> Callable[..., torch.Tensor]:
    def kernel(g: torch.Tensor, x: torch.Tensor, padding: Any) -> torch.Tensor:
        made = infer(op, g, x, list(padding))
        if x.dtype not in FLOATS or not computable(x.dtype):
            raise NoKernel
        result = new_contiguous(made.size(), word_dtype(x.dtype))
        numbers = _padding_numbers(x.shape, g.shape, padding)
        body = wgsl.padding_backward(mode, rank)
        per_element([("g", contiguous(g))], [("x", result)], numbers, result.numel(), body)
        return _laid_out(result, made)

    return kernel


# --- unfolding -----------------------------------------------------------------------------------------------------


def _pair(values: Any) -> tuple[int, int]:
    return (values[0], values[-1])


def _places(height: int, width: int, kernel: Any, dilation: Any, padding: Any, stride: Any) -> tuple[int, int]:
    found = [
        (length + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
        for i, length in enumerate((height, width))
    ]
    return found[0], found[1]


def im2col(x: torch.Tensor, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> torch.Tensor:
    op = aten.im2col.default
    made = infer(op, x, list(kernel_size), list(dilation), list(padding), list(stride))
    if x.dtype not in FLOATS or not computable(x.dtype):
        raise NoKernel
    geometry = (_pair(kernel_size), _pair(dilation), _pair(padding), _pair(stride))
    height, width = x.shape[-2:]
    places = _places(height, width, *geometry)
    y = new_contiguous(made.size(), word_dtype(x.dtype))
    numbers = [(n[:2], "u32", v) for n, v in zip(wgsl.UNFOLD_PARAMETERS, (height, width, *places), strict=True)]
    per_element([("x", contiguous(x))], [("y", y)], numbers, y.numel(), wgsl.unfold(*geometry))
    return narrowed(y, x.dtype)


def col2im(
    y: torch.Tensor, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> torch.Tensor:
    op = aten.col2im.default
    made = infer(op, y, list(output_size), list(kernel_size), list(dilation), list(padding), list(stride))
    if y.dtype not in FLOATS or not computable(y.dtype):
        raise NoKernel
    geometry = (_pair(kernel_size), _pair(dilation), _pair(padding), _pair(stride))
    height, width = _pair(output_size)
    places = _places(height, width, *geometry)
    x = new_contiguous(made.size(), word_dtype(y.dtype))
    numbers = [(n[:2], "u32", v) for n, v in zip(wgsl.UNFOLD_PARAMETERS, (height, width, *places), strict=True)]
    per_element([("y", contiguous(y))], [("x", x)], numbers, x.numel(), wgsl.fold(*geometry))
    return narrowed(x, y.dtype)


def grid_sampler(
    x: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    if x.dtype not in FLOATS or grid.dtype is not x.dtype or not computable(x.dtype) or x.numel() == 0:
        raise NoKernel
    check_devices("grid_sampler_2d", x, grid)
    size = (*x.shape[:2], *grid.shape[1:3])
    y = new_contiguous(size, word_dtype(x.dtype))
    values = (x.shape[1], *x.shape[2:], *size[2:])
    numbers = [(n.split(":")[0], "u32", v) for n, v in zip(wgsl.GRID_PARAMETERS, values, strict=True)]
    inputs = [("x", contiguous(x)), ("grid", contiguous(grid))]
    functions = wgsl.grid_functions(padding_mode, align_corners)
    per_element(inputs, [("y", y)], numbers, y.numel(), wgsl.grid_sample(interpolation_mode), functions)
    return narrowed(y, x.dtype)


def register(library: torch.library.Library) -> None:
    library.impl("grid_sampler_2d", halving(aten.grid_sampler_2d.default, grid_sampler, fallback), KEY)

    def add(op: Any, kernel: Callable[..., torch.Tensor]) -> None:
        register_with_out(library, op, halving(op, kernel, fallback))

    for pattern, mode, aligning, ranks in MODES:
        for rank in ranks:
            for name in (pattern.format(rank), pattern.format(rank) + "_backward"):
                op = getattr(aten, name).default
                add(op, _upsample(op, mode, rank, aligning))
    for mode in ("reflection", "replication"):
        for rank in (1, 2, 3):
            for name, pad in ((f"{mode}_pad{rank}d", _pad), (f"{mode}_pad{rank}d_backward", _pad_backward)):
                op = getattr(aten, name).default
                add(op, pad(op, mode, rank))
    add(aten.im2col.default, im2col)
    add(aten.col2im.default, col2im)
