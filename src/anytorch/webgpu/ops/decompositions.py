"""Ops made of other ops: torch's own decompositions where it has one, ours where it has none.

Registered last, and only where no kernel is: a family that gains a kernel of its own loses its decomposition here. An op
whose tensors have a dtype no shader computes with (complex) runs on the CPU whole, not piece by piece.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import alert_not_deterministic, suggest_memory_format

from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.types import supported
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import has_kernel, in_place, op_of, out_forms, variants, with_out
from anytorch.webgpu.launch import check_devices, infer, let_the_cpu_refuse
from anytorch.webgpu.ops import transformer
from anytorch.webgpu.tensors import KEY, device

# Torch's own. Left out of its table: what wraps a primitive that calls the op again (the special functions), what belongs
# to one library (cudnn_*, miopen_*), and views, which need nothing.
TORCH = (
    "_add_relu.Tensor", "_weight_norm_interface", "channel_shuffle", "isin.Scalar_Tensor",
    "isin.Tensor_Scalar", "isin.Tensor_Tensor", "linalg_cross", "logspace",
    "mvlgamma", "renorm", "trace", "tril_indices",
    "triu_indices", "unfold_backward", "addmm.dtype", "baddbmm.dtype", "floor_divide_.Tensor", "pixel_shuffle",
    "pixel_unshuffle", "narrow_copy",
)  # fmt: skip


def computable(value: Any, features: frozenset[str]) -> bool:
    if isinstance(value, torch.Tensor):
        return supported(str(value.dtype)[6:], features)
    if isinstance(value, (list, tuple)):
        return all(computable(item, features) for item in value)
    return not isinstance(value, complex)


def functional(op: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that computes `op` by its decomposition."""

    @functools.wraps(decomposition)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        features = open_runtime().features
        if not all(computable(value, features) for value in (*args, *kwargs.values())):
            return fallback(op, *args, **kwargs)
        try:
            result = decomposition(*args, **kwargs)
        except RuntimeError:
            let_the_cpu_refuse(op, args, kwargs)
            raise
        # A decomposition may hand back its argument where nothing is to do; the op promises a tensor of its own.
        if any(result is value for value in args if isinstance(value, torch.Tensor)):
            return result.clone()
        return result

    return kernel


def install(library: torch.library.Library, op: Any, decomposition: Callable[..., Any]) -> list[str]:
    """Register a decomposition for every form of `op` that has no kernel; returns what was registered."""
    writes = op._schema.arguments and op._schema.arguments[0].alias_info is not None
    forms = [] if writes else out_forms(op)
    if has_kernel(op) or any(has_kernel(form) for form, _ in forms):
        return []  # torch makes an op's other forms of its out= form
    kernel = functional(op, decomposition)
    made = [(op, kernel), *[(form, with_out(kernel, outs)) for form, outs in forms]]
    if not writes:
        written = {form for form, _ in forms}
        made += [(form, in_place(kernel)) for form in variants(op) if form not in written]
    installed = []
    for form, function in made:
        if not has_kernel(form) and not composite(form):
            library.impl(form, function, KEY)
            installed.append(form.name())
    return installed


def composite(op: Any) -> bool:
    """Whether torch has a kernel for every device, made of other ops."""
    return has_kernel(op, "CompositeImplicitAutograd") or has_kernel(op, "CompositeExplicitAutograd")


# --- ours --------------------------------------------------------------------------------------------------------------


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and bool((first == second).all().item())


def is_set_to(first: torch.Tensor, second: torch.Tensor) -> bool:
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    geometry = (first.storage_offset(), first.size(), first.stride())
    return same and geometry == (second.storage_offset(), second.size(), second.stride())


def angle(x: torch.Tensor) -> torch.Tensor:
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    turned = torch.where(x < 0, math.pi, 0.0).to(x.dtype)
    return torch.where(x.isnan(), x, turned)


def cdist(first: torch.Tensor, second: torch.Tensor, p: float, mode: int | None) -> torch.Tensor:
    return distance((first.unsqueeze(-2) - second.unsqueeze(-3)).abs(), p)


def distance(difference: torch.Tensor, p: float) -> torch.Tensor:
    if difference.size(-1) == 0:
        return difference.sum(-1)
    if p == 0:
        return (difference != 0).to(difference.dtype).sum(-1)
    if p == 1:
        return difference.sum(-1)
    if p == math.inf:
        return difference.amax(-1)
    if p == 2:
        return (difference * difference).sum(-1).sqrt()
    return difference.pow(p).sum(-1).pow(1 / p)


def slope(difference: torch.Tensor, length: torch.Tensor, p: float) -> torch.Tensor:
    """The derivative of the p-norm of `difference` by it; `length` is the norm, with a last dimension of 1."""
    sign = difference.sign()
    if p == 1:
        return sign
    if p == math.inf:
        return sign * (difference.abs() == length)
    if p == 2:
        return torch.where(length == 0, 0.0, difference / length)
    raised = sign * difference.abs().pow(p - 1) / length.pow(p - 1)
    # Below 2 the derivative is infinite at zero; torch takes zero there.
    flat = (length == 0) | (difference == 0) if p < 2 else length == 0
    return torch.where(flat, 0.0, raised)


def cdist_backward(
    gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    if p == 0 or distances.numel() == 0 or first.size(-1) == 0:
        return torch.zeros_like(first)
    by = slope(first.unsqueeze(-2) - second.unsqueeze(-3), distances.unsqueeze(-1), p)
    return (gradient.unsqueeze(-1) * by).sum(-2)  # of the broadcast batch: autograd sums it to the input's


def pairs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = torch.triu_indices(count, count, 1, device=device())
    return rows, columns


def pdist(x: torch.Tensor, p: float = 2) -> torch.Tensor:
    if x.size(0) <= 1:
        return x.new_empty((0,))
    rows, columns = pairs(x.size(0))
    return distance((x[rows] - x[columns]).abs(), p)


def pdist_backward(gradient: torch.Tensor, x: torch.Tensor, p: float, distances: torch.Tensor) -> torch.Tensor:
    if x.size(0) <= 1 or p == 0 or x.numel() == 0:
        return torch.zeros_like(x)
    rows, columns = pairs(x.size(0))
    difference = x[rows] - x[columns]
    share = gradient.unsqueeze(-1) * slope(difference, distances.unsqueeze(-1), p)
    return torch.zeros_like(x).index_add_(0, rows, share).index_add_(0, columns, -share)


def weight_norm_backward(
    gradient: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    norms = norms.to(v.dtype)
    along = (gradient * v).sum(others, keepdim=True)
    return g / norms * (gradient - v * along / (norms * norms)), along / norms


def assert_async(
    condition: torch.Tensor, message: str = "Expected Tensor with single nonzero value, but got zero"
) -> None:
    if not bool(condition.item()):
        raise RuntimeError(message)


def glu_jvp(result: torch.Tensor, x: torch.Tensor, dx: torch.Tensor, dim: int) -> torch.Tensor:
    gate = x.narrow(dim, x.size(dim) // 2, x.size(dim) // 2).sigmoid()
    first, second = dx.chunk(2, dim)
    return first * gate + result * (1 - gate) * second


def nonzero_static(x: torch.Tensor, *, size: int, fill_value: int = -1) -> torch.Tensor:
    if size < 0:
        raise RuntimeError("nonzero_static: 'size' must be an non-negative integer")
    found = x.nonzero()[:size]
    missing = torch.full((size - found.size(0), found.size(1)), fill_value, dtype=torch.int64, device=device())
    return torch.cat((found, missing))


def max_unpool(op: Any) -> Callable[..., torch.Tensor]:
    """torch's decomposition writes an index outside of its plane into another one; a scatter into planes reports it."""

    def kernel(x: torch.Tensor, indices: torch.Tensor, output_size: Any, *rest: Any) -> torch.Tensor:
        check_devices(op, x, indices)
        made = infer(op, x, indices, list(output_size), *[list(value) for value in rest])
        alert_not_deterministic(f"max_unpooling{len(output_size)}d_forward_out")
        planes = math.prod(made.shape[: -len(output_size)])
        result = torch.zeros((planes, math.prod(output_size)), dtype=x.dtype, device=x.device)
        if x.numel() and result.numel():
            result.scatter_(1, indices.reshape(planes, -1), x.reshape(planes, -1))
        result = result.view(made.shape)
        return result.contiguous(memory_format=suggest_memory_format(x)) if result.dim() == 4 == x.dim() else result

    return kernel


def multi_margin(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    """torch's, whose loss of a vector is one of a batch."""
    loss: torch.Tensor = decomposition_table[torch.ops.aten.multi_margin_loss.default](x, target, *rest)
    return loss.view(()) if not target.dim() else loss


def multilabel_margin(x: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own decomposition takes class 0 for every label that a row does not have (torch 2.13)."""
    if x.shape != target.shape or x.dim() not in (1, 2) or not x.size(-1):
        computed: tuple[torch.Tensor, torch.Tensor] = fallback(MULTILABEL, x, target, reduction)
        return computed
    classes = x.size(-1)
    rows, labels = x.reshape(-1, classes), target.reshape(-1, classes)
    place = torch.arange(classes, device=device())
    end = torch.where(labels == -1, place, classes).amin(1, keepdim=True)
    known = place < end
    chosen = rows.gather(1, torch.where(known, labels, 0))
    is_label = (torch.where(known, labels, -1).unsqueeze(2) == place).any(1)
    distances = (1 - chosen.unsqueeze(2) + rows.unsqueeze(1)).clamp_min(0)  # row, label, class
    counted = known.unsqueeze(2) & ~is_label.unsqueeze(1)
    losses = torch.where(counted, distances, 0.0).sum((1, 2)) / classes
    loss = losses.mean() if reduction == 1 else losses.sum() if reduction == 2 else losses.view(x.shape[:-1])
    return loss, is_label.to(x.dtype).view(target.shape)


MULTILABEL = torch.ops.aten.multilabel_margin_loss_forward.default


def multi_margin_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    p: float,
    margin: float,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    place = target.reshape(-1, 1)
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    above = margin - rows.gather(1, place) + rows
    slopes = torch.where(above > 0, 1.0 if p == 1 else 2 * above, 0.0).to(x.dtype)
    if weight is not None:
        slopes = slopes * weight[place]
    slopes = slopes.scatter(1, place, 0.0) / rows.size(1)
    slopes = slopes.scatter(1, place, -slopes.sum(1, keepdim=True))
    if reduction == 1:
        slopes = slopes / rows.size(0)
    each = gradient.reshape(-1, 1) if reduction == 0 else gradient
    return (slopes * each).reshape(x.shape)


OURS: dict[str, Callable[..., Any]] = {
    "equal": equal,
    "is_set_to": is_set_to,
    "angle": angle,
    "_cdist_forward": cdist,
    "_cdist_backward": cdist_backward,
    "_pdist_forward": pdist,
    "_pdist_backward": pdist_backward,
    "_weight_norm_interface_backward": weight_norm_backward,
    "_assert_async": assert_async,
    "_assert_async.msg": assert_async,
    "glu_jvp": glu_jvp,
    "nonzero_static": nonzero_static,
    "max_unpool2d": max_unpool(torch.ops.aten.max_unpool2d.default),
    "max_unpool3d": max_unpool(torch.ops.aten.max_unpool3d.default),
    "multi_margin_loss": multi_margin,
    "multi_margin_loss_backward": multi_margin_backward,
    "multilabel_margin_loss_forward": multilabel_margin,
    "_grouped_mm": transformer.grouped_mm,
    "_native_multi_head_attention": transformer.multi_head_attention,
    "_transformer_encoder_layer_fwd": transformer.encoder_layer,
    # May the padded batch become a nested tensor? This device has none; nn.TransformerEncoder goes on with the mask.
    "_nested_tensor_from_mask_left_aligned": lambda tensor, mask: False,
}

# What `register` found without a kernel and installed; the table in the documentation is made from it.
installed: list[str] = []


def register(library: torch.library.Library) -> None:
    installed.clear()
    for name, function in OURS.items():
        op = op_of(name, None)
        if op is not None:
            installed.extend(install(library, op, function))
    for name in TORCH:
        op = op_of(name, None)
        if op in decomposition_table:
            installed.extend(install(library, op, decomposition_table[op]))
