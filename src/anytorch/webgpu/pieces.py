"""Tensors beyond what the adapter binds at once (128 MiB at least, 2 GiB on most GPUs): the op runs on halves of them.

Elementwise kernels move a window over their buffers. The others bind whole buffers, so a tensor that is too large is halved
along a dimension whose slices do not know of each other, each half copied into a buffer of its own, and the results joined.
All of it stays on the device. Which dimension that is, `RULES` says; an op without a rule runs on the CPU or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from anytorch.gpu.buffers import SHIFT
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.runtime import open_runtime
from anytorch.webgpu.tensors import is_ours


class TooLarge(Exception):
    """A kernel was given a buffer beyond what the adapter binds."""


class Split(NamedTuple):
    """Which arguments are halved along which dimension, and where the results are joined (None: they are added up)."""

    dim: int
    tensors: tuple[int, ...]
    joined: int | None
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add


Rule = Callable[[Sequence[Any]], "Split | None"]


def attempt(op: Any, kernel: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any | None:
    """The op on halves of its arguments; None if there is no rule for it, or one slice alone is too large."""
    rule = RULES.get(op._schema.name.removeprefix("aten::") + ("." + op._overloadname).replace(".default", ""))
    split = rule(args) if rule is not None else None
    if split is None:
        return None
    try:
        return halved(kernel, list(args), kwargs, split)
    except TooLarge:
        return None


def splitting(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, on halves where the adapter cannot bind its arguments; raises BindingTooLarge where that is no help."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except (TooLarge, BindingTooLarge):
            made = attempt(op, kernel, args, kwargs)
            if made is None:
                raise
            return made

    return call


def halved(kernel: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], split: Split) -> Any:
    """Halve until the kernel no longer objects. It objects before it launches, so a vain attempt costs no work."""
    try:
        near = [bindable_copy(value) if isinstance(value, torch.Tensor) else value for value in args]
        return kernel(*near, **kwargs)
    except (TooLarge, BindingTooLarge) as exc:
        size = args[split.tensors[0]].shape[split.dim]
        if size < 2:
            raise TooLarge from exc
    parts = []
    for start, length in ((0, size // 2), (size // 2, size - size // 2)):
        part = list(args)
        for position in split.tensors:
            part[position] = args[position].narrow(split.dim, start, length)
        parts.append(halved(kernel, part, kwargs, split))
    if isinstance(parts[0], tuple):
        return tuple(_join(pair, split) for pair in zip(*parts, strict=True))
    return _join(parts, split)


def _join(parts: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
    return torch.cat(list(parts), split.joined) if split.joined is not None else split.add(*parts)


def bindable_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if it is a small part of a buffer that is too large to bind."""
    runtime = open_runtime()
    if not is_ours(tensor) or not tensor.numel():
        return tensor
    if runtime.buffers[tensor.data_ptr() >> SHIFT].nbytes <= runtime.binding_limit:
        return tensor
    if tensor.numel() * tensor.dtype.itemsize > runtime.binding_limit:
        return tensor  # a copy would be too large as well
    return tensor.clone(memory_format=torch.contiguous_format)


# --- rules: the arguments in the order of the op's schema -----------------------------------------------------------------


def _rows(dim_at: int, *tensors: int) -> Rule:
    """Any dimension but the one the op works along."""

    def rule(args: Sequence[Any]) -> Split | None:
        x = args[tensors[0]]
        return _longest(x, {args[dim_at] % max(x.dim(), 1)}, tensors)

    return rule


def _longest(x: torch.Tensor, taken: set[int], tensors: tuple[int, ...]) -> Split | None:
    free = [dim for dim in range(x.dim()) if dim not in taken and x.shape[dim] > 1]
    dim = max(free, key=lambda d: x.shape[d], default=None)
    return None if dim is None else Split(dim, tensors, dim)


def _first(rank: int | None = None) -> Rule:
    """The batch: the first dimension, if there is one."""

    def rule(args: Sequence[Any]) -> Split | None:
        x = args[0]
        return Split(0, (0,), 0) if x.dim() and x.shape[0] > 1 and rank in (None, x.dim()) else None

    return rule


def _layer_norm(args: Sequence[Any]) -> Split | None:
    return Split(0, (0,), 0) if args[0].dim() > len(args[1]) and args[0].shape[0] > 1 else None


def _attention(args: Sequence[Any]) -> Split | None:
    """The batch, or the heads where queries and keys have the same; a mask that has the dimension goes along."""
    q, k, _, *rest = args
    mask = rest[0] if rest else None
    dim = 0 if q.shape[0] > 1 else 1
    if q.dim() != 4 or q.shape[1] != k.shape[1] or q.shape[dim] < 2:
        return None
    with_mask = mask is not None and mask.dim() == 4 and mask.shape[dim] > 1
    return Split(dim, (0, 1, 2, 3) if with_mask else (0, 1, 2), dim)


def _reduction(add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None) -> Rule:
    """A dimension that is kept; one that is reduced, if none is and partial results can be put together with `add`."""

    def rule(args: Sequence[Any]) -> Split | None:
        x, dims, keepdim = (*args, *((), False)[len(args) - 1 :])[:3]
        taken = {dim % x.dim() for dim in dims or range(x.dim())} if x.dim() else set()
        kept = _longest(x, taken, (0,))
        if kept is not None:
            joined = kept.dim if keepdim else kept.dim - sum(dim < kept.dim for dim in taken)
            return kept._replace(joined=joined)
        whole = _longest(x, set(), (0,))
        return None if whole is None or add is None else whole._replace(joined=None, add=add)

    return rule


RULES: dict[str, Rule] = {
    "_softmax": _rows(1, 0),
    "_log_softmax": _rows(1, 0),
    "_softmax_backward_data": _rows(2, 0, 1),
    "_log_softmax_backward_data": _rows(2, 0, 1),
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "sum": _reduction(torch.add),
    "sum.dim_IntList": _reduction(torch.add),
    "mean.dim": _reduction(None),
    "amax": _reduction(torch.maximum),
    "amin": _reduction(torch.minimum),
    "cumsum": _rows(1, 0),
    "convolution_overrideable": _first(),
    "max_pool2d_with_indices": _first(4),
    "max_pool3d_with_indices": _first(5),
    "avg_pool2d": _first(4),
    "avg_pool3d": _first(5),
    "scaled_dot_product_attention": _attention,
}
