"""Layer, RMS, group and batch norm, forward and backward."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import decomposition_table

from anytorch.gpu.buffers import TAG
from anytorch.gpu.runtime import device_memory, open_runtime
from anytorch.gpu.wgsl.norm import (
    CHANNEL_MOMENTS,
    CHANNEL_THREADS,
    SCALE_ONLY,
    WEIGHT_AND_BIAS,
    Channelwise,
    normalise,
    normalise_backward,
    render_channelwise,
    root_mean_square,
    root_mean_square_backward,
)
from anytorch.webgpu.copies import contiguous
from anytorch.webgpu.direct import unwatched
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.ops.reductions import (
    buffers,
    element_offset,
    grid,
    guarded,
    infer,
    narrowed,
    on_webgpu,
    reduce_dims,
    usable,
)
from anytorch.webgpu.ops.softmax import Rowwise, run_rows
from anytorch.webgpu.pieces import TooLarge
from anytorch.webgpu.pointwise import Rule, name_of, run
from anytorch.webgpu.tensors import aten, new_contiguous, new_tensor

Maybe = torch.Tensor | None
Gradients = tuple[Maybe, Maybe, Maybe]

_forward_rule = lru_cache(maxsize=None)(normalise)
_backward_rule = lru_cache(maxsize=None)(normalise_backward)
_rms_rule = lru_cache(maxsize=None)(root_mean_square)
_rms_backward_rule = lru_cache(maxsize=None)(root_mean_square_backward)
# A rule goes with its row outputs: those that write no statistics are others.
_lean_forward_rule = lru_cache(maxsize=None)(normalise)
_lean_rms_rule = lru_cache(maxsize=None)(root_mean_square)


def _floats(*tensors: Maybe) -> bool:
    present = [t.dtype for t in tensors if t is not None]
    return all(dtype.is_floating_point for dtype in present) and usable(open_runtime(), *present)


def _filled(size: Sequence[int], dtype: torch.dtype, value: float = 0.0) -> torch.Tensor:
    return new_contiguous(size, dtype).fill_(value)


def _with_affine(
    first: list[tuple[torch.Tensor, str]], weight: Maybe, bias: Maybe, per: str
) -> list[tuple[torch.Tensor, str]]:
    return [*first, *[(contiguous(t), per) for t in (weight, bias) if t is not None]]


# --- layer norm -------------------------------------------------------------------------------------------------------


_layers: dict[Any, tuple[int, int, list[int]] | None] = {}


def _layer(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe
) -> tuple[int, int, list[int]] | None:
    """Rows, their length, and the statistics' size; None for dtypes the CPU must do. Shapes that do not fit raise."""
    key = (input.dtype, input.size(), tuple(normalized_shape), _mark(weight), _mark(bias))
    known = _layers.get(key, ())
    if known != ():
        return known  # type: ignore[return-value]
    op = aten.native_layer_norm.default
    on_webgpu(op, input, weight, bias)
    geometry = None
    if _floats(input, weight, bias):
        infer(op, input, list(normalized_shape), weight, bias, 0.0)
        kept = input.dim() - len(normalized_shape)
        size = [*input.shape[:kept], *[1] * len(normalized_shape)]
        geometry = (math.prod(size), math.prod(normalized_shape), size)
    _layers[key] = geometry
    return geometry


def _mark(tensor: Maybe) -> Any:
    return None if tensor is None else (tensor.dtype, tensor.size(), tensor.device.type)


def layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    geometry = _layer(input, normalized_shape, weight, bias)
    if geometry is None:
        op = aten.native_layer_norm.default
        return fallback(op, input, normalized_shape, weight, bias, eps)  # type: ignore[no-any-return]
    rows, length, size = geometry
    mean, rstd = new_contiguous(size, torch.float32), new_contiguous(size, torch.float32)
    if rows and not length:
        mean.fill_(0.0)
        rstd.fill_(math.nan)
    out = run_rows(
        _forward_rule(weight is not None, bias is not None),
        _with_affine([(contiguous(input), "element")], weight, bias, "column"),
        rows,
        length,
        1,
        input.size(),
        input.dtype,
        (("mean", mean), ("rstd", rstd)),
        scalars=(eps,),
    )
    return out, mean, rstd


_direct: dict[Any, Rowwise] = device_memory()


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
    known = _direct.get(identity)
    if not tagged & TAG:
        return None
    if known is None:
        present = [(t, per) for t, per in ((input, "element"), (weight, "column"), (bias, "column")) if t is not None]
        geometry = _layer(input, normalized_shape, weight, bias)
        if geometry is None or not all(t.is_contiguous() for t, _ in present):
            return None
        has = (weight is not None,) if rule is _lean_rms_rule else (weight is not None, bias is not None)
        rows = (geometry[0], geometry[1], 1)
        known = _direct[identity] = Rowwise(rule(*has), present, rows, input.size(), input.dtype, (eps,))
    try:
        return known(*addresses)
    except TooLarge:
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
    on_webgpu(op, grad_out, input, mean, rstd, weight, bias)
    if not _floats(grad_out, input, weight, mean):
        return fallback(op, grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)  # type: ignore[no-any-return]
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
            rows,
            length,
            1,
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
    geometry = _layer(input, normalized_shape, weight, None)
    if geometry is None:
        return fallback(aten._fused_rms_norm.default, input, normalized_shape, weight, eps)  # type: ignore[no-any-return]
    rows, length, size = geometry
    rstd = new_contiguous(size, torch.float32)
    out = run_rows(
        _rms_rule(weight is not None),
        _with_affine([(contiguous(input), "element")], weight, None, "column"),
        rows,
        length,
        1,
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
    on_webgpu("_fused_rms_norm_backward", grad_out, input, rstd, weight)
    if not _floats(grad_out, input, rstd, weight):  # the CPU has no kernel of this op to fall back on
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
            rows,
            length,
            1,
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
    on_webgpu(op, input, weight, bias)
    if not _floats(input, weight, bias):
        return fallback(op, input, weight, bias, N, C, HxW, group, eps)  # type: ignore[no-any-return]
    infer(op, input, weight, bias, N, C, HxW, group, eps)
    mean, rstd = new_contiguous((N, group), torch.float32), new_contiguous((N, group), torch.float32)
    if N and not HxW:
        mean.fill_(0.0)
        rstd.fill_(math.nan)
    channels = C // group
    out = run_rows(
        _forward_rule(weight is not None, bias is not None),
        _with_affine([(contiguous(input), "element")], weight, bias, _GROUP_CHANNEL),
        N * group,
        channels * HxW,
        1,
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
    on_webgpu(op, grad_out, input, mean, rstd, weight)
    if not _floats(grad_out, input, weight, mean):
        return fallback(op, grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)  # type: ignore[no-any-return]
    channels = C // group
    grad, x = contiguous(grad_out), contiguous(input)
    mean, rstd = contiguous(mean), contiguous(rstd)
    grad_input: Maybe = None
    if output_mask[0]:
        inputs = [(grad, "element"), (x, "element"), (mean, "row"), (rstd, "row")]
        grad_input = run_rows(
            _backward_rule(weight is not None),
            _with_affine(inputs, weight, None, _GROUP_CHANNEL),
            N * group,
            channels * HxW,
            1,
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


# --- batch norm -------------------------------------------------------------------------------------------------------

_TOWARDS = Rule("{0} + ({1} - {0}) * {2}")  # a running statistic moves by the momentum
_RSTD = Rule("inverseSqrt({0} + {1})", compute="float")


def channelwise(
    expression: str, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Elements of `tensors` (one shape, channels in dimension 1) with their channels' values; keeps channels-last."""
    first = tensors[0]
    runtime = open_runtime()
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
    program = runtime.programs.make(
        kernel,
        lambda: render_channelwise(kernel),
        buffers=kernel.buffers,
        writable=1 << (kernel.buffers - 1),
        immediates=4 * kernel.words,
    )
    channels = [narrowed(contiguous(t), torch.float32) for t in values]
    offsets = [element_offset(t) for t in (*dense, *channels)]
    immediates = struct.pack(f"<{3 + len(offsets)}I", out.numel(), inner, first.size(1), *offsets)
    lanes = max(1, 4 // dtype.itemsize) if name_of(dtype) == "bfloat16" else 1
    x, y = grid(-(-out.numel() // (CHANNEL_THREADS * lanes)))
    runtime.dispatch(program, buffers(runtime, [*dense, *channels, out]), immediates, x, y)
    return out


def on_layout(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    made = new_tensor(tensor.shape, stride, tensor.dtype)
    made.copy_(tensor)
    return made


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
    on_webgpu(op, input, weight, bias, running_mean, running_var)
    if not _floats(input, weight, bias, running_mean, running_var):
        return fallback(op, input, weight, bias, running_mean, running_var, training, momentum, eps)  # type: ignore[no-any-return]
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
    on_webgpu(op, grad_out, input, weight, running_mean, running_var)
    if not _floats(grad_out, input, weight, running_mean, running_var):
        return fallback(  # type: ignore[no-any-return]
            op, grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
        )
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


def _no_stats(
    input: torch.Tensor, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch_norm(input, weight, bias, None, None, training, momentum, eps)


def _no_training(
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)


def _with_update(
    input: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The newer form: a fourth result is room a vendor's library may want for backward; we want none."""
    reserve = new_contiguous((0,), torch.uint8)
    return *batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps), reserve


def _with_update_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_var: Maybe,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: torch.Tensor,
) -> Gradients:
    return batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


def register(library: torch.library.Library) -> None:
    kernels: dict[str, Any] = {
        "native_layer_norm": layer_norm,
        "native_layer_norm_backward": layer_norm_backward,
        "_fused_rms_norm": rms_norm,
        "_fused_rms_norm_backward": rms_norm_backward,
        "native_group_norm": group_norm,
        "native_group_norm_backward": group_norm_backward,
        "native_batch_norm": batch_norm,
        "native_batch_norm_backward": batch_norm_backward,
        "_native_batch_norm_legit": batch_norm,
        "_native_batch_norm_legit.no_stats": _no_stats,
        "_native_batch_norm_legit_no_training": _no_training,
        "_batch_norm_with_update": _with_update,
        "batch_norm_backward": _with_update_backward,
    }
    for name, kernel in kernels.items():
        base, _, overload = name.partition(".")
        op = getattr(getattr(aten, base), overload or "default")
        library.impl(op, guarded(op, kernel), "PrivateUse1")
    for name, kernel in (("layer_norm", layer_norm_whole), ("rms_norm", rms_norm_whole)):
        library.impl(name, kernel, "AutogradPrivateUse1")
        library.impl(name, kernel, "PrivateUse1")
