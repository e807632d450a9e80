"""Layer, RMS and group norm, forward and backward. Batch norm is in `batch_norm`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import decomposition_table

from anytorch.gpu.buffers import TAG
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.plans import plans
from anytorch.gpu.wgsl.norm import (
    SCALE_ONLY,
    WEIGHT_AND_BIAS,
    normalise,
    normalise_backward,
    root_mean_square,
    root_mean_square_backward,
)
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.direct import unwatched
from anytorch.webgpu.dtypes import usable
from anytorch.webgpu.folds import reduce_dims
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices, infer, made_by
from anytorch.webgpu.rows import Inputs, row_plan, run_rows
from anytorch.webgpu.tensors import KEY, aten, new_contiguous

Maybe = torch.Tensor | None
Gradients = tuple[Maybe, Maybe, Maybe]

_FORMS = 4  # of a rule: with and without a weight, with and without a bias
_forward_rule = lru_cache(maxsize=_FORMS)(normalise)
_backward_rule = lru_cache(maxsize=_FORMS)(normalise_backward)
_rms_rule = lru_cache(maxsize=_FORMS)(root_mean_square)
_rms_backward_rule = lru_cache(maxsize=_FORMS)(root_mean_square_backward)
# A rule goes with its row outputs: those that write no statistics are others.
_lean_forward_rule = lru_cache(maxsize=_FORMS)(normalise)
_lean_rms_rule = lru_cache(maxsize=_FORMS)(root_mean_square)


def floats(*tensors: Maybe) -> bool:
    """Are all of these floats that the kernels know?"""
    present = [t.dtype for t in tensors if t is not None]
    return all(dtype.is_floating_point for dtype in present) and usable(*present)


def _with_affine(inputs: list[tuple[torch.Tensor, str]], weight: Maybe, bias: Maybe, per: str) -> Inputs:
    return [*inputs, *[(contiguous(t), per) for t in (weight, bias) if t is not None]]


# --- layer norm -------------------------------------------------------------------------------------------------------


def _layer(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe
) -> tuple[tuple[int, int, int], list[int]] | None:
    """The rows, and the statistics' size; None for dtypes the CPU must do. Shapes that do not fit raise."""
    present = [t for t in (input, weight, bias) if t is not None]
    key = ("layer", tuple(normalized_shape), bias is None, *[(t.dtype, t.size(), t.device) for t in present])
    found = plans[key]
    if found is None:
        op = aten.native_layer_norm.default
        check_devices(op, *present)
        if not floats(*present):
            return None
        infer(op, input, list(normalized_shape), weight, bias, 0.0)
        size = [*input.shape[: input.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
        found = plans[key] = (math.prod(size), math.prod(normalized_shape), 1), size
    return found  # type: ignore[no-any-return]


def layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = _layer(input, normalized_shape, weight, bias)
    if found is None:
        raise NoKernel
    geometry, size = found
    mean, rstd = new_contiguous(size, torch.float32), new_contiguous(size, torch.float32)
    if geometry[0] and not geometry[1]:
        mean.fill_(0.0)
        rstd.fill_(math.nan)
    out = run_rows(
        _forward_rule(weight is not None, bias is not None),
        _with_affine([(contiguous(input), "element")], weight, bias, "column"),
        geometry,
        input.size(),
        input.dtype,
        (("mean", mean), ("rstd", rstd)),
        scalars=(eps,),
    )
    return out, mean, rstd


def layer_norm_whole(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Maybe = None,
    bias: Maybe = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """aten::layer_norm. Where no gradient is wanted the rows' statistics are not written."""
    if unwatched(input, weight, bias):
        made = _without_statistics(_lean_forward_rule, input, normalized_shape, weight, bias, eps)
        if made is not None:
            return made
    out: torch.Tensor = _decomposed_layer_norm(input, normalized_shape, weight, bias, eps, cudnn_enable)
    return out


_decomposed_layer_norm = aten.layer_norm.default.decompose


def _without_statistics(
    rule: Any, input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> torch.Tensor | None:
    """None: something must be copied first, or the op is the CPU's."""
    at = input.data_ptr()
    addresses = [at]
    tagged, low = at, at
    key = [rule, input.dtype, input.size(), input.stride(), eps, *normalized_shape]
    for tensor in (weight, bias):
        key.append(None)
        if tensor is not None:
            address = tensor.data_ptr()
            addresses.append(address)
            tagged &= address
            low |= address
            key += (tensor.dtype, tensor.size(), tensor.stride())
    key.append(low & 15)
    identity = tuple(key)
    plan = plans[identity]
    if not tagged & TAG:
        return None
    if plan is None:
        present = [(t, per) for t, per in ((input, "element"), (weight, "column"), (bias, "column")) if t is not None]
        found = _layer(input, normalized_shape, weight, bias)
        if found is None or not all(t.is_contiguous() for t, _ in present):
            return None
        has = (weight is not None,) if rule is _lean_rms_rule else (weight is not None, bias is not None)
        aligned = not low & 15
        plan = row_plan(rule(*has), present, found[0], input.size(), input.dtype, aligned, scalars=(eps,))
        plans[identity] = plan
    try:
        return narrowed(made_by(plan, addresses), input.dtype)
    except BindingTooLarge:
        return None


def layer_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    output_mask: Sequence[bool],
) -> Gradients:
    op = aten.native_layer_norm_backward.default
    check_devices(op, grad_out, input, mean, rstd, weight, bias)
    if not floats(grad_out, input, weight, mean):
        raise NoKernel
    length = math.prod(normalized_shape)
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    grad, x = contiguous(grad_out), contiguous(input)
    mean, rstd = contiguous(mean), contiguous(rstd)
    grad_input: Maybe = None
    if output_mask[0]:
        inputs = [(grad, "element"), (x, "element"), (mean, "row"), (rstd, "row")]
        grad_input = run_rows(
            _backward_rule(weight is not None),
            _with_affine(inputs, weight, None, "column"),
            (rows, length, 1),
            input.shape,
            input.dtype,
        )
    grad_weight, grad_bias = _affine_gradients(
        (grad.view(rows, length), x.view(rows, length), mean.view(rows, 1), rstd.view(rows, 1)),
        (rows, length),
        (0,),
        weight,
        bias if bias is not None else weight,
        output_mask,
        normalized_shape,
    )
    return grad_input, grad_weight, grad_bias


def _affine_gradients(
    tensors: Sequence[torch.Tensor],
    shape: Sequence[int],
    dims: Sequence[int],
    weight: Maybe,
    bias: Maybe,
    mask: Sequence[bool],
    size: Sequence[int],
) -> tuple[Maybe, Maybe]:
    """Gradients of weight and bias: both fold the same elements, so one launch gives both."""
    if not (mask[1] or mask[2]):
        return None, None
    dtypes = [
        weight.dtype if weight is not None else tensors[0].dtype,
        bias.dtype if bias is not None else tensors[0].dtype,
    ]
    made = reduce_dims(
        "weight_and_bias",
        [t.expand(*shape) for t in tensors],
        dims,
        dtypes,
        size,
        compute="f32",
        reducer=WEIGHT_AND_BIAS,
    )
    return made[0] if mask[1] else None, made[1] if mask[2] else None


# --- RMS norm ---------------------------------------------------------------------------------------------------------


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = _layer(input, normalized_shape, weight, None)
    if found is None:
        raise NoKernel
    geometry, size = found
    rstd = new_contiguous(size, torch.float32)
    out = run_rows(
        _rms_rule(weight is not None),
        _with_affine([(contiguous(input), "element")], weight, None, "column"),
        geometry,
        input.size(),
        input.dtype,
        (("rstd", rstd),),
        scalars=(torch.finfo(input.dtype).eps if eps is None else eps,),
    )
    return out, rstd


def rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: Maybe,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe]:
    check_devices("_fused_rms_norm_backward", grad_out, input, rstd, weight)
    if not floats(grad_out, input, rstd, weight):  # the CPU has no kernel of this op to fall back on
        decomposed: tuple[Maybe, Maybe] = decomposition_table[aten._fused_rms_norm_backward.default](
            grad_out, input, normalized_shape, rstd, weight, output_mask
        )
        return decomposed
    length = math.prod(normalized_shape)
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    grad, x, rstd = contiguous(grad_out), contiguous(input), contiguous(rstd)
    grad_input: Maybe = None
    if output_mask[0]:
        inputs = [(grad, "element"), (x, "element"), (rstd, "row")]
        grad_input = run_rows(
            _rms_backward_rule(weight is not None),
            _with_affine(inputs, weight, None, "column"),
            (rows, length, 1),
            input.shape,
            input.dtype,
        )
    grad_weight: Maybe = None
    if output_mask[1] and weight is not None:
        views = (grad.view(rows, length), x.view(rows, length), rstd.view(rows, 1).expand(rows, length))
        (grad_weight,) = reduce_dims(
            "scale_only", views, (0,), [weight.dtype], normalized_shape, compute="f32", reducer=SCALE_ONLY
        )
    return grad_input, grad_weight


def rms_norm_whole(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe = None, eps: float | None = None
) -> torch.Tensor:
    """aten::rms_norm. Its composite would run as five kernels; the fused op has its own derivative."""
    if unwatched(input, weight):
        epsilon = torch.finfo(input.dtype).eps if eps is None and input.is_floating_point() else eps
        if epsilon is not None:
            made = _without_statistics(_lean_rms_rule, input, normalized_shape, weight, None, epsilon)
            if made is not None:
                return made
    out: torch.Tensor = aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]
    return out


# --- group norm -------------------------------------------------------------------------------------------------------

# A row is a sample's group: e0 groups of e1 channels of e2 elements.
_GROUP_CHANNEL = "(row % p.e0) * p.e1 + $k / p.e2"


def group_norm(
    input: torch.Tensor, weight: Maybe, bias: Maybe, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    op = aten.native_group_norm.default
    check_devices(op, input, weight, bias)
    if not floats(input, weight, bias):
        raise NoKernel
    infer(op, input, weight, bias, N, C, HxW, group, eps)
    mean, rstd = new_contiguous((N, group), torch.float32), new_contiguous((N, group), torch.float32)
    if N and not HxW:
        mean.fill_(0.0)
        rstd.fill_(math.nan)
    channels = C // group
    out = run_rows(
        _forward_rule(weight is not None, bias is not None),
        _with_affine([(contiguous(input), "element")], weight, bias, _GROUP_CHANNEL),
        (N * group, channels * HxW, 1),
        input.shape,
        input.dtype,
        (("mean", mean), ("rstd", rstd)),
        extras=(group, channels, HxW),
        scalars=(eps,),
    )
    return out, narrowed(mean, input.dtype), narrowed(rstd, input.dtype)


def group_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Gradients:
    op = aten.native_group_norm_backward.default
    check_devices(op, grad_out, input, mean, rstd, weight)
    if not floats(grad_out, input, weight, mean):
        raise NoKernel
    channels = C // group
    grad, x = contiguous(grad_out), contiguous(input)
    mean, rstd = contiguous(mean), contiguous(rstd)
    grad_input: Maybe = None
    if output_mask[0]:
        inputs = [(grad, "element"), (x, "element"), (mean, "row"), (rstd, "row")]
        grad_input = run_rows(
            _backward_rule(weight is not None),
            _with_affine(inputs, weight, None, _GROUP_CHANNEL),
            (N * group, channels * HxW, 1),
            input.shape,
            input.dtype,
            extras=(group, channels, HxW),
        )
    shape = (N, group, channels, HxW)
    stats = (mean.view(N, group, 1, 1), rstd.view(N, group, 1, 1))
    grad_weight, grad_bias = _affine_gradients(
        (grad.view(shape), x.view(shape), *stats), shape, (0, 3), weight, weight, output_mask, (C,)
    )
    return grad_input, grad_weight, grad_bias


KERNELS: dict[str, Any] = {
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
    for name, kernel in (("layer_norm", layer_norm_whole), ("rms_norm", rms_norm_whole)):
        library.impl(name, kernel, "AutogradPrivateUse1")
        library.impl(name, kernel, KEY)
