"""Layer, RMS, group and batch norm, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._decomp import decomposition_table

from anytorch.gpu.buffers import OFFSET_MASK, TAG
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.plans import plans
from anytorch.gpu.wgsl import norm as wgsl
from anytorch.webgpu.copies import contiguous, narrowed, on_layout
from anytorch.webgpu.dtypes import name_of, usable
from anytorch.webgpu.folds import reduce_dims
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices, infer, launch, made_by, unwatched
from anytorch.webgpu.pointwise import Rule, number, run
from anytorch.webgpu.rows import Geometry, Inputs, row_plan, run_rows
from anytorch.webgpu.tensors import KEY, aten, new_contiguous, new_tensor

Maybe = torch.Tensor | None

_FORMS = 4  # of a rule: with and without a weight, with and without a bias
_forward_rule = lru_cache(maxsize=_FORMS)(wgsl.normalise)
_backward_rule = lru_cache(maxsize=_FORMS)(wgsl.normalise_backward)
_rms_rule = lru_cache(maxsize=_FORMS)(wgsl.root_mean_square)
_rms_backward_rule = lru_cache(maxsize=_FORMS)(wgsl.root_mean_square_backward)
# A rule goes with its row outputs: those that write no statistics are others.
_lean_forward_rule = lru_cache(maxsize=_FORMS)(wgsl.normalise)
_lean_rms_rule = lru_cache(maxsize=_FORMS)(wgsl.root_mean_square)


def check_floats(*tensors: Maybe) -> None:
    """NoKernel unless all of these are floats that the kernels know."""
    present = [t.dtype for t in tensors if t is not None]
    if not all(dtype.is_floating_point for dtype in present) or not usable(*present):
        raise NoKernel


def _with_affine(inputs: list[tuple[torch.Tensor, str]], weight: Maybe, bias: Maybe, per: str) -> Inputs:
    return [*inputs, *[(contiguous(t), per) for t in (weight, bias) if t is not None]]


def _normalised(
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    eps: float,
    geometry: Geometry,
    size: Sequence[int],
    per: str = "column",
    extras: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows less their mean, by their deviation, and both statistics, of `size`."""
    mean, rstd = new_contiguous(size, torch.float32), new_contiguous(size, torch.float32)
    if geometry[0] and not geometry[1]:
        mean.fill_(0.0)
        rstd.fill_(math.nan)
    rule = _forward_rule(weight is not None, bias is not None)
    inputs = _with_affine([(contiguous(input), "element")], weight, bias, per)
    statistics = (("mean", mean), ("rstd", rstd))
    out = run_rows(rule, inputs, geometry, input.size(), input.dtype, statistics, extras, (eps,))
    return out, mean, rstd


class Backward(NamedTuple):
    """The gradients of a norm over `shape`, whose first `rows` dimensions count the rows. Those of its weight and bias, of
    `size`, are folds over `dims`; both fold the same elements, so one launch gives both."""

    shape: tuple[int, ...]
    rows: int
    dims: tuple[int, ...]
    size: Sequence[int]
    per: str = "column"
    extras: tuple[int, ...] = ()

    def __call__(
        self,
        grad_out: torch.Tensor,
        input: torch.Tensor,
        statistics: Sequence[torch.Tensor],
        weight: Maybe,
        dtypes: Sequence[torch.dtype],
        mask: Sequence[bool],
    ) -> tuple[Maybe, ...]:
        """`statistics` are mean and rstd, or rstd alone; `dtypes` are of the gradients of weight and bias, or of weight."""
        grad, x, *rowwise = map(contiguous, (grad_out, input, *statistics))
        grad_input: Maybe = None
        alone = len(rowwise) == 1
        if mask[0]:
            geometry = (math.prod(self.shape[: self.rows]), math.prod(self.shape[self.rows :]), 1)
            rule = (_rms_backward_rule if alone else _backward_rule)(weight is not None)
            inputs = [(grad, "element"), (x, "element"), *[(t, "row") for t in rowwise]]
            affine = _with_affine(inputs, weight, None, self.per)
            grad_input = run_rows(rule, affine, geometry, input.shape, input.dtype, extras=self.extras)
        if not any(mask[1:]):
            return (grad_input, *[None] * len(dtypes))
        of_rows = (*self.shape[: self.rows], *[1] * (len(self.shape) - self.rows))
        views = [grad.view(self.shape), x.view(self.shape), *[t.view(of_rows).expand(self.shape) for t in rowwise]]
        name, reducer = ("scale_only", wgsl.SCALE_ONLY) if alone else ("weight_and_bias", wgsl.WEIGHT_AND_BIAS)
        made = reduce_dims(name, views, self.dims, dtypes, self.size, compute="f32", reducer=reducer)
        return (grad_input, *[t if wanted else None for t, wanted in zip(made, mask[1:], strict=True)])


def _of_layer(input: torch.Tensor, normalized_shape: Sequence[int]) -> Backward:
    rows = math.prod(input.shape[: input.dim() - len(normalized_shape)])
    return Backward((rows, math.prod(normalized_shape)), 1, (0,), normalized_shape)


# --- layer norm -------------------------------------------------------------------------------------------------------


def _layer(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe
) -> tuple[Geometry, list[int]]:
    """The rows, and the statistics' size. Shapes that do not fit raise."""
    present = [t for t in (input, weight, bias) if t is not None]
    key = ("layer", tuple(normalized_shape), bias is None, *[(t.dtype, t.size(), t.device) for t in present])
    found = plans[key]
    if found is None:
        op = aten.native_layer_norm.default
        check_devices(op, *present)
        check_floats(*present)
        infer(op, input, list(normalized_shape), weight, bias, 0.0)
        size = [*input.shape[: input.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
        found = plans[key] = (math.prod(size), math.prod(normalized_shape), 1), size
    return found  # type: ignore[no-any-return]


def layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _normalised(input, weight, bias, eps, *_layer(input, normalized_shape, weight, bias))


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
    try:
        if plan is None:
            present = [
                (t, per) for t, per in ((input, "element"), (weight, "column"), (bias, "column")) if t is not None
            ]
            geometry, _ = _layer(input, normalized_shape, weight, bias)
            if not all(t.is_contiguous() for t, _ in present):
                return None
            has = (weight is not None,) if rule is _lean_rms_rule else (weight is not None, bias is not None)
            aligned = not low & 15
            plan = row_plan(rule(*has), present, geometry, input.size(), input.dtype, aligned, scalars=(eps,))
            plans[identity] = plan
        return narrowed(made_by(plan, addresses), input.dtype)
    except (BindingTooLarge, NoKernel):
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
) -> tuple[Maybe, ...]:
    check_devices(aten.native_layer_norm_backward.default, grad_out, input, mean, rstd, weight, bias)
    check_floats(grad_out, input, weight, mean)
    of_weight = weight.dtype if weight is not None else grad_out.dtype
    dtypes = [of_weight, bias.dtype if bias is not None else of_weight]
    return _of_layer(input, normalized_shape)(grad_out, input, (mean, rstd), weight, dtypes, output_mask)


# --- RMS norm ---------------------------------------------------------------------------------------------------------


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    geometry, size = _layer(input, normalized_shape, weight, None)
    rstd = new_contiguous(size, torch.float32)
    inputs = _with_affine([(contiguous(input), "element")], weight, None, "column")
    scalars = (torch.finfo(input.dtype).eps if eps is None else eps,)
    rule = _rms_rule(weight is not None)
    out = run_rows(rule, inputs, geometry, input.size(), input.dtype, (("rstd", rstd),), scalars=scalars)
    return out, rstd


def rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: Maybe,
    output_mask: Sequence[bool],
) -> tuple[Maybe, ...]:
    check_devices("_fused_rms_norm_backward", grad_out, input, rstd, weight)
    try:
        check_floats(grad_out, input, rstd, weight)
    except NoKernel:  # the CPU has no kernel of this op to fall back on
        decomposed: tuple[Maybe, Maybe] = decomposition_table[aten._fused_rms_norm_backward.default](
            grad_out, input, normalized_shape, rstd, weight, output_mask
        )
        return decomposed
    dtype = weight.dtype if weight is not None else input.dtype
    mask = (output_mask[0], output_mask[1] and weight is not None)
    return _of_layer(input, normalized_shape)(grad_out, input, (rstd,), weight, [dtype], mask)


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
    check_floats(input, weight, bias)
    infer(op, input, weight, bias, N, C, HxW, group, eps)
    extras = (group, C // group, HxW)
    geometry = (N * group, C // group * HxW, 1)
    out, mean, rstd = _normalised(input, weight, bias, eps, geometry, (N, group), _GROUP_CHANNEL, extras)
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
) -> tuple[Maybe, ...]:
    check_devices(aten.native_group_norm_backward.default, grad_out, input, mean, rstd, weight)
    check_floats(grad_out, input, weight, mean)
    extras = (group, C // group, HxW)
    backward = Backward((N, *extras), 2, (0, 3), (C,), _GROUP_CHANNEL, extras)
    dtypes = [weight.dtype if weight is not None else grad_out.dtype] * 2
    return backward(grad_out, input, (mean, rstd), weight, dtypes, output_mask)


# --- batch norm: statistics per channel, then an elementwise kernel with the channels' values ---------------------------

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
    fours = inner % 4 == 0 and all(
        t.dtype.itemsize <= 4 and (t.data_ptr() & OFFSET_MASK) // t.dtype.itemsize % 4 == 0 for t in (*dense, out)
    )
    names = tuple(name_of(t.dtype) for t in dense)
    kernel = wgsl.Channelwise(expression, names, len(values), name_of(dtype), fours)
    read = [*dense, *[narrowed(contiguous(t), torch.float32) for t in values]]
    lanes = 4 if fours else max(1, 4 // dtype.itemsize) if name_of(dtype) == "bfloat16" else 1
    groups = -(-out.numel() // (wgsl.CHANNEL_THREADS * lanes))
    head = (out.numel(), inner, first.size(1))
    launch(kernel, wgsl.render_channelwise, [*read, out], groups, placed=len(read), head=head)
    return out


def _running(op: Any, mean: Maybe, variance: Maybe, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and reciprocal deviation of every channel by its running statistics."""
    assert mean is not None and variance is not None
    return mean, run(_RSTD, op, (variance, eps), out=new_contiguous(variance.shape, torch.float32))


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
    check_floats(input, weight, bias, running_mean, running_var)
    channels = input.size(1)
    if training:
        dims = [d for d in range(input.dim()) if d != 1]
        dtypes = [torch.float32] * 3
        mean, rstd, variance = reduce_dims(
            "channel_moments", (input,), dims, dtypes, (channels,), (eps,), "f32", wgsl.CHANNEL_MOMENTS
        )
        for running, fresh in ((running_mean, mean), (running_var, variance)):
            if running is not None:
                run(_TOWARDS, op, (running, fresh, momentum), out=running)
        saved = (mean, rstd)
    else:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, running_var
        saved = (new_contiguous((0,), torch.float32), new_contiguous((0,), torch.float32))
    # In the kernel: a launch of its own for the deviations of a few channels takes as long as many an activation's.
    expression = "(x0 - c0) * c1" if training else f"(x0 - c0) * inverseSqrt(c1 + {number(eps)})"
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
) -> tuple[Maybe, Maybe, Maybe]:
    op = aten.native_batch_norm_backward.default
    check_devices(op, grad_out, input, weight, running_mean, running_var)
    check_floats(grad_out, input, weight, running_mean, running_var)
    channels = input.size(1)
    if train:
        assert save_mean is not None and save_invstd is not None
        mean, rstd = save_mean, save_invstd
    else:
        mean, rstd = _running(op, running_mean, running_var, eps)
    shape = [1, channels, *[1] * (input.dim() - 2)]
    dims = [d for d in range(input.dim()) if d != 1]
    sums: list[torch.Tensor] = []
    if train or output_mask[1] or output_mask[2]:
        tensors = (grad_out, input, mean.view(shape).expand(input.shape), rstd.view(shape).expand(input.shape))
        sums = reduce_dims(
            "weight_and_bias", tensors, dims, [torch.float32] * 2, (channels,), (), "f32", wgsl.WEIGHT_AND_BIAS
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
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
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
    for name, kernel in (("layer_norm", layer_norm_whole), ("rms_norm", rms_norm_whole)):
        library.impl(name, kernel, "AutogradPrivateUse1")
        library.impl(name, kernel, KEY)
