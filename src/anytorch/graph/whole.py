"""Functions of torch that tracing keeps whole: attention and RMS norm, which torch takes apart differently on each device.

Under `Whole` a call of either becomes one op of ours, which computes by calling torch's function, and which has a rule in
`tracing`. Attention becomes the form that kernel graphs know: four dimensions, keys and values of one batch. A few other
functions that cannot be traced as torch has them are written here by their parts, or refused with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anytorch.errors import GraphError

_untyped: Any = torch.library
_library = _untyped.Library("anytorch", "FRAGMENT")  # the ops live as long as it does
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask=None, bool causal=False, float? scale=None) -> Tensor"
)
_library.define("rms_norm(Tensor x, SymInt[] shape, Tensor? weight, float eps) -> Tensor")


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return F.rms_norm(x, shape, weight, eps)


for _name, _compute in (("attention", _attention), ("rms_norm", _rms_norm)):
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
    _untyped.register_fake(f"anytorch::{_name}", _compute, lib=_library)

ATTENTION = torch.ops.anytorch.attention.default
RMS_NORM = torch.ops.anytorch.rms_norm.default


class Whole(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = ROUTES.get(func)
        return func(*args, **(kwargs or {})) if made is None else made(*args, **(kwargs or {}))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch's `scaled_dot_product_attention`, by one op of ours where it has that form, else by torch's."""
    if dropout_p:
        raise GraphError("attention with dropout has no kernel graph", hint="call model.eval() before tracing")
    rank = query.dim()
    groups = key.shape[-3] if rank > 2 else 1
    known = rank in (2, 3, 4) and rank == key.dim() == value.dim() and not (is_causal and attn_mask is not None)
    if rank == 4 and known:
        heads = query.shape[1]
        known = groups in (heads, 1) or (enable_gqa and heads % groups == 0)
        known = known and value.shape[1] == groups
    if not known:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v = query, key, value
    if rank == 3:  # [batch, positions, width]
        q, k, v = (tensor[:, None] for tensor in (q, k, v))
        attn_mask = attn_mask[:, None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    elif rank == 2:
        q, k, v = (tensor[None, None] for tensor in (q, k, v))
    batch = next((tensor.shape[0] for tensor in (q, k, v) if tensor.shape[0] != 1), 1)  # those of 1 are repeated
    q, k, v = (tensor.expand(batch, *tensor.shape[1:]) for tensor in (q, k, v))
    made: torch.Tensor = ATTENTION(q, k, v, attn_mask, is_causal, scale)
    return made if rank == 4 else made[:, 0] if rank == 3 else made[0, 0]


def rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """As torch's `rms_norm`, by one op of ours. Without `eps` it is the rounding of the dtype that torch sums in."""
    wide = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
    made: torch.Tensor = RMS_NORM(
        input, list(normalized_shape), weight, torch.finfo(wide).eps if eps is None else float(eps)
    )
    return made


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As torch's `linear`, which fixes named sizes where it has a bias."""
    made = matmul(input, weight.t())
    return made if bias is None else made + bias


def matmul(input: torch.Tensor, other: torch.Tensor, **more: Any) -> torch.Tensor:
    """As torch's `matmul`, which fixes named sizes before torch 2.13: by products of two or three dimensions."""
    fixed = all(isinstance(size, int) for size in (*input.shape, *other.shape))
    if more or fixed or min(input.dim(), other.dim()) == 0 or max(input.dim(), other.dim()) < 3:
        return torch.matmul(input, other, **more)
    if input.dim() == 1:
        return matmul(input[None], other).squeeze(-2)
    if other.dim() == 1:
        return matmul(input, other[:, None]).squeeze(-1)
    if other.dim() == 2:
        rows = torch.mm(input.reshape(math.prod(input.shape[:-1]), input.shape[-1]), other)
        return rows.reshape(*input.shape[:-1], other.shape[-1])
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])  # type: ignore[no-untyped-call]
    count = math.prod(batch)
    x, y = (one.expand(*batch, *one.shape[-2:]).reshape(count, *one.shape[-2:]) for one in (input, other))
    return torch.bmm(x, y).reshape(*batch, input.shape[-2], other.shape[-1])


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if training and p:
        raise GraphError("dropout has no kernel graph", hint="call model.eval() before tracing")
    return input


def _copied(function: Any, **instead: Any) -> Any:
    """A copy of a function of torch's that finds other functions under the names it calls."""
    made = {**function.__globals__, **instead}
    return FunctionType(function.__code__, made, function.__name__, function.__defaults__, function.__closure__)


# `torch.nn.functional` calls attention and linear here itself, where a mode does not see it.
_projections = {
    name: _copied(getattr(F, name), linear=linear)
    for name in ("_in_projection", "_in_projection_packed")
    if hasattr(F, name)
}
_multi_head_whole = _copied(
    F.multi_head_attention_forward,
    scaled_dot_product_attention=attention,
    dropout=dropout,
    linear=linear,
    **_projections,
)

ROUTES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _multi_head_whole,
    F.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    F.dropout: dropout,
    torch.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    torch.ops.aten.scaled_dot_product_attention.default: attention,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    torch.ops.aten.rms_norm.default: rms_norm,
}
