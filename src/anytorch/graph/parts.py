"""What tracing knows beyond the rules of `tracing`: ops by parts that have rules, and ops of which a part is known.

torch.compile leaves these to ATen, where they are one call; a traced graph has no ATen to leave them to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx import Node as FxNode

from anytorch.graph.compiler import decompositions
from anytorch.graph.tracer import Tracer
from anytorch.graph.tracing import EVERY

aten = torch.ops.aten
# torch's own decompositions of these are made of ops with rules.
TORCHS = (
    *(aten._log_softmax, aten.leaky_relu, aten.elu, aten.logsumexp, aten.addcmul, aten.addcdiv, aten.lerp, aten.stack),
    *(aten.hardsigmoid, aten.hardswish, aten.softplus, aten.mish, aten.log_sigmoid_forward, aten.native_batch_norm),
    *(aten._native_batch_norm_legit_no_training,),
)


@cache
def parts() -> dict[Any, Any]:
    """Decompositions for make_fx: ours, then torch's, but for ops that have a rule."""
    every = {**get_decompositions(TORCHS), **decompositions(), **OURS}
    return {op: rule for op, rule in every.items() if op not in RULES}


def _variance(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> torch.Tensor:
    return torch.var_mean(x, dim, correction=1 if correction is None else correction, keepdim=keepdim)[0]


def _deviation(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> torch.Tensor:
    return _variance(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _norm(x: torch.Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if ord != 2:
        return NotImplemented  # stays one op, which has no rule
    wide = x.to(dtype or x.dtype)
    over = list(range(x.dim())) if dim is None else dim
    return wide.square().sum(over, keepdim=keepdim).sqrt()


def _repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    shape = [1] * (len(repeats) - x.dim()) + list(x.shape)
    apart = x.reshape([size for one in shape for size in (1, one)])
    wide = apart.expand([size for times, one in zip(repeats, shape, strict=True) for size in (times, one)])
    return wide.reshape([times * one for times, one in zip(repeats, shape, strict=True)])


def _full_like(x: torch.Tensor, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return torch.full(x.shape, value, dtype=dtype or x.dtype, device=device or x.device)


OURS: dict[Any, Any] = {
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.linalg_vector_norm.default: _norm,
    aten.repeat.default: _repeat,
    aten.full_like.default: _full_like,
    aten.zeros_like.default: lambda x, **options: _full_like(x, 0, **options),
    aten.ones_like.default: lambda x, **options: _full_like(x, 1, **options),
    aten.max.default: lambda x: x.amax(),
    aten.min.default: lambda x: x.amin(),
}


def _largest(how: str) -> Any:
    """max and min along a dimension: the values only; their indices must not be used."""

    def rule(one: Tracer, node: FxNode, x: Any, dim: int, keepdim: bool = False) -> tuple[int, ...]:
        return (one.b.add("reduce", one.operand(x), how=how, dims=(dim,), keepdim=True if keepdim else None),)

    return rule


RULES: dict[Any, Any] = {**EVERY, aten.max.dim: _largest("max"), aten.min.dim: _largest("min")}
