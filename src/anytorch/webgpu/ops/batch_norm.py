"""Batch norm, forward and backward: statistics per channel, then an elementwise kernel with the channels' values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from anytorch.gpu.wgsl.norm import (
    CHANNEL_MOMENTS,
    CHANNEL_THREADS,
    WEIGHT_AND_BIAS,
    Channelwise,
    render_channelwise,
)
from anytorch.webgpu.copies import contiguous, narrowed, on_layout
from anytorch.webgpu.dtypes import name_of
from anytorch.webgpu.folds import reduce_dims
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices, launch
from anytorch.webgpu.ops.norms import Gradients, Maybe, floats
from anytorch.webgpu.pointwise import Rule, run
from anytorch.webgpu.tensors import aten, new_contiguous, new_tensor

_TOWARDS = Rule("{0} + ({1} - {0}) * {2}")  # a running statistic moves by the momentum
_RSTD = Rule("inverseSqrt({0} + {1})", compute="float")


def channelwise(
    expression: str, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Elements of `tensors` (one shape, channels in dimension 1) with their channels' values; keeps channels-last."""
    first = tensors[0]
    last = first.dim() in (4, 5) and not first.is_contiguous()
    form = torch.channels_last if first.dim() == 4 else torch.channels_last_3d
    if last and first.is_contiguous(memory_format=form):
        out = new_tensor(first.shape, first.stride(), dtype)
        dense = [t if t.stride() == first.stride() else on_layout(t, first.stride()) for t in tensors]
        inner = 1
    else:
        out = new_contiguous(first.shape, dtype)
        dense = [contiguous(t) for t in tensors]
        inner = math.prod(first.shape[2:])
    if out.numel() == 0:
        return out
    kernel = Channelwise(expression, tuple(name_of(t.dtype) for t in dense), len(values), name_of(dtype))
    read = [*dense, *[narrowed(contiguous(t), torch.float32) for t in values]]
    lanes = max(1, 4 // dtype.itemsize) if name_of(dtype) == "bfloat16" else 1
    groups = -(-out.numel() // (CHANNEL_THREADS * lanes))
    head = (out.numel(), inner, first.size(1))
    launch(kernel, render_channelwise, [*read, out], groups, placed=len(read), head=head)
    return out


def batch_norm(
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    op = aten.native_batch_norm.default
    check_devices(op, input, weight, bias, running_mean, running_var)
    if not floats(input, weight, bias, running_mean, running_var):
        raise NoKernel
    channels = input.size(1)
    if training:
        dims = [d for d in range(input.dim()) if d != 1]
        dtypes = [torch.float32] * 3
        mean, rstd, variance = reduce_dims(
            "channel_moments", (input,), dims, dtypes, (channels,), (eps,), "f32", CHANNEL_MOMENTS
        )
        for running, fresh in ((running_mean, mean), (running_var, variance)):
            if running is not None:
                run(_TOWARDS, op, (running, fresh, momentum), out=running)
        saved = (mean, rstd)
    else:
        assert running_mean is not None and running_var is not None
        mean = running_mean
        rstd = new_contiguous((channels,), torch.float32)
        run(_RSTD, op, (running_var, eps), out=rstd)
        saved = (new_contiguous((0,), torch.float32), new_contiguous((0,), torch.float32))
    expression = "(x0 - c0) * c1"
    values = [mean, rstd]
    for tensor, sign in ((weight, "*"), (bias, "+")):
        if tensor is not None:
            expression += f" {sign} c{len(values)}"
            values.append(tensor)
    return channelwise(expression, [input], values, input.dtype), *saved


def batch_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_invstd: Maybe,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Gradients:
    op = aten.native_batch_norm_backward.default
    check_devices(op, grad_out, input, weight, running_mean, running_var)
    if not floats(grad_out, input, weight, running_mean, running_var):
        raise NoKernel
    channels = input.size(1)
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, rstd = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        mean = running_mean
        rstd = new_contiguous((channels,), torch.float32)
        run(_RSTD, op, (running_var, eps), out=rstd)
    shape = [1, channels, *[1] * (input.dim() - 2)]
    dims = [d for d in range(input.dim()) if d != 1]
    sums: list[torch.Tensor] = []
    if train or output_mask[1] or output_mask[2]:
        tensors = (grad_out, input, mean.view(shape).expand(input.shape), rstd.view(shape).expand(input.shape))
        sums = reduce_dims(
            "weight_and_bias", tensors, dims, [torch.float32] * 2, (channels,), compute="f32", reducer=WEIGHT_AND_BIAS
        )
    grad_input: Maybe = None
    if output_mask[0]:
        scale = rstd if weight is None else rstd * weight
        if train:
            count = input.numel() // channels if channels else 1
            values = [mean, scale, sums[1] / max(count, 1), sums[0] * rstd / max(count, 1)]
            grad_input = channelwise("(x0 - c2 - (x1 - c0) * c3) * c1", [grad_out, input], values, input.dtype)
        else:
            grad_input = channelwise("x0 * c0", [grad_out], [scale], input.dtype)
    dtype = weight.dtype if weight is not None else input.dtype
    return (
        grad_input,
        narrowed(sums[0], dtype) if output_mask[1] else None,
        narrowed(sums[1], dtype) if output_mask[2] else None,
    )


def _with_update(
    input: torch.Tensor, weight: Maybe, bias: Maybe, mean: Maybe, variance: Maybe, *rest: float
) -> tuple[torch.Tensor, ...]:
    """The newer form, always in training: a fourth result is room a vendor's library may want for backward; we want none."""
    return *batch_norm(input, weight, bias, mean, variance, True, *rest), new_contiguous((0,), torch.uint8)


KERNELS: dict[str, Any] = {
    "native_batch_norm": batch_norm,
    "native_batch_norm_backward": batch_norm_backward,
    "_native_batch_norm_legit": batch_norm,
    "_native_batch_norm_legit.no_stats": lambda x, w, b, *rest: batch_norm(x, w, b, None, None, *rest),
    "_native_batch_norm_legit_no_training": lambda x, w, b, m, v, *rest: batch_norm(x, w, b, m, v, False, *rest),
    "_batch_norm_with_update": _with_update,
    "batch_norm_backward": lambda *args: batch_norm_backward(*args[:-1]),  # without that room
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
