"""Upsampling, reflection and replication padding, im2col and col2im, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.wgsl import resample as wgsl
from anytorch.webgpu.copies import on_layout
from anytorch.webgpu.dtypes import FLOATS, computable
from anytorch.webgpu.kernels import op_of, register_kernels
from anytorch.webgpu.launch import NoKernel, infer
from anytorch.webgpu.per_element import Named, computed
from anytorch.webgpu.tensors import aten

# aten's name without rank or direction, the generator's mode, whether align_corners is an argument, ranks
MODES = (
    ("upsample_nearest{}d", "nearest", False, (1, 2, 3)),
    ("_upsample_nearest_exact{}d", "exact", False, (1, 2, 3)),
    ("upsample_linear{}d", "linear", True, (1,)),
    ("upsample_bilinear{}d", "linear", True, (2,)),
    ("upsample_trilinear{}d", "linear", True, (3,)),
    ("upsample_bicubic{}d", "cubic", True, (2,)),
)


def _computed(
    inputs: Named, result: str, like: torch.Tensor, names: Sequence[str], values: Sequence[Any], *texts: str
) -> torch.Tensor:
    """`per_element.computed` with the strides torch says the result has. Names come with their WGSL types."""
    numbers = [(*name.split(": "), value) for name, value in zip(names, values, strict=True)]
    (made,) = computed(inputs, {result: like.size()}, inputs[0][1].dtype, numbers, *texts)
    return made if made.stride() == like.stride() else on_layout(made, like.stride())


def _check_float(tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOATS or not computable(tensor.dtype):
        raise NoKernel


def _scales(x: Sequence[int], y: Sequence[int], align_corners: bool, given: Sequence[float | None]) -> list[float]:
    """How far the source moves per place of the result, on each axis."""
    found = []
    for length, wanted, scale in zip(x, y, given, strict=True):
        if align_corners:
            found.append((length - 1) / (wanted - 1) if wanted > 1 else 0.0)
        else:
            found.append(1.0 / scale if scale is not None and scale > 0 else length / wanted)
    return found


def _upsample(op: Any, mode: str, rank: int, aligning: bool) -> Callable[..., torch.Tensor]:
    """The kernel of an op or of its gradient, which has the input's size before the scales."""
    backward = op._schema.name.endswith("_backward")

    def kernel(given: torch.Tensor, output_size: Any, *rest: Any, **named: Any) -> torch.Tensor:
        sizes = [list(output_size), *[list(size) for size in rest[:backward]]]
        # What follows the sizes: align_corners where there is one, then a scale per axis.
        values = list(rest[backward:])
        values += [named.get(argument.name) for argument in op._schema.arguments[1 + len(sizes) + len(values) :]]
        align = bool(values[0]) if aligning else False
        made = infer(op, given, *sizes, *values)
        _check_float(given)
        x, y = (made.shape[2:], given.shape[2:]) if backward else (given.shape[2:], made.shape[2:])
        numbers = (*x, *y, *_scales(x, y, align, values[1:] if aligning else values))
        body, names = (wgsl.backward(mode, rank), "gx") if backward else (wgsl.forward(mode, rank), "xy")
        texts = body, wgsl.interpolation(mode, align)
        return _computed([(names[0], given)], names[1], made, wgsl.sizes(rank), numbers, *texts)

    return kernel


# --- padding -------------------------------------------------------------------------------------------------------


def _pad(op: Any, mode: str, rank: int) -> Callable[..., torch.Tensor]:
    """The kernel of an op, or of its gradient, which is given the input as well."""
    backward = op._schema.name.endswith("_backward")

    def kernel(given: torch.Tensor, *rest: Any) -> torch.Tensor:
        made = infer(op, given, *rest[:-1], list(rest[-1]))
        x, y = (made, given) if backward else (given, made)
        lefts = [rest[-1][2 * (rank - 1 - axis)] for axis in range(rank)]  # torch counts axes from the last
        values = (*x.shape[-rank:], *y.shape[-rank:], *lefts)
        names = wgsl.padding_parameters(rank)
        if backward:
            _check_float(given)
            return _computed([("g", given)], "x", made, names, values, wgsl.padding_backward(mode, rank))
        if not computable(given.dtype):
            raise NoKernel
        texts = wgsl.padding_forward(rank), wgsl.padding_source(mode)
        return _computed([("x", given)], "y", made, names, values, *texts)

    return kernel


# --- unfolding -----------------------------------------------------------------------------------------------------


def _unfold(
    op: Any, given: torch.Tensor, sizes: Sequence[Any], size: Sequence[int], names: str, make: Callable[..., str]
) -> torch.Tensor:
    """im2col and col2im; `sizes` are the op's arguments, the last four the windows', `size` is the image's."""
    made = infer(op, given, *[list(each) for each in sizes])
    _check_float(given)
    geometry = [(values[0], values[-1]) for values in sizes[-4:]]
    kernel, dilation, padding, stride = geometry
    places = [
        (length + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i, length in enumerate(size)
    ]
    return _computed([(names[0], given)], names[1], made, wgsl.UNFOLD_PARAMETERS, (*size, *places), make(*geometry))


def im2col(x: torch.Tensor, *sizes: Any) -> torch.Tensor:
    return _unfold(aten.im2col.default, x, sizes, x.shape[-2:], "xy", wgsl.unfold)


def col2im(y: torch.Tensor, output_size: Any, *sizes: Any) -> torch.Tensor:
    size = (output_size[0], output_size[-1])
    return _unfold(aten.col2im.default, y, (output_size, *sizes), size, "yx", wgsl.fold)


def register(library: torch.library.Library) -> None:
    for pattern, mode, aligning, ranks in MODES:
        for rank in ranks:
            for name in (pattern.format(rank), pattern.format(rank) + "_backward"):
                register_kernels(library, {name: _upsample(op_of(name), mode, rank, aligning)})
    for mode in ("reflection", "replication"):
        for rank in (1, 2, 3):
            for name in (f"{mode}_pad{rank}d", f"{mode}_pad{rank}d_backward"):
                register_kernels(library, {name: _pad(op_of(name), mode, rank)})
    register_kernels(library, {"im2col": im2col, "col2im": col2im})
