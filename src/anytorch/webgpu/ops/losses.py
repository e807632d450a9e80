"""Losses taken element by element: the element's loss and its gradient are expressions, the reduction is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import check_devices
from anytorch.webgpu.pointwise import Rule, run
from anytorch.webgpu.tensors import aten

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for `reduction`

# {0} the input, {1} the target, {2} beta or delta.
LOSSES = {
    "mse_loss": Rule("({0} - {1}) * ({0} - {1})"),
    "smooth_l1_loss": Rule("smooth_l1({0} - {1}, {2})"),
    "huber_loss": Rule("huber({0} - {1}, {2})"),
}
# {0} the gradient, {1} the input, {2} the target, {3} the weight of an element (1/n for a mean), {4} beta or delta.
LOSS_GRADIENTS = {
    "mse_loss_backward": Rule("{3} * 2.0 * ({1} - {2}) * {0}"),
    "smooth_l1_loss_backward": Rule("{3} * {0} * smooth_l1_slope({1} - {2}, {4})"),
    "huber_loss_backward": Rule("{3} * {0} * minimum_{T}(maximum_{T}({1} - {2}, -{4}), {4})"),
}

CROSS_ENTROPY = "binary_cross_entropy({0}, {1})"
CROSS_ENTROPY_SLOPE = "{3} * {0} * ({1} - {2}) / maximum_{T}((1.0 - {1}) * {1}, 1e-12)"
BINARY = Rule(CROSS_ENTROPY)
BINARY_WEIGHTED = Rule(f"{{2}} * {CROSS_ENTROPY}")
BINARY_GRADIENT = Rule(CROSS_ENTROPY_SLOPE)
BINARY_GRADIENT_WEIGHTED = Rule(f"{{4}} * {CROSS_ENTROPY_SLOPE}")


def _result_like(*tensors: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The geometry of an elementwise result: the first tensor's strides if it has the result's shape."""

    def make() -> torch.Tensor:
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        first = tensors[0]
        if first.shape == shape:
            return torch.empty_like(torch.empty_strided(shape, first.stride(), dtype=dtype, device="meta"))
        return torch.empty(shape, dtype=dtype, device="meta")

    return make


def _reduced(values: torch.Tensor, reduction: int) -> torch.Tensor:
    return values.mean() if reduction == MEAN else values.sum() if reduction == SUM else values


def _deliver(value: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return value
    torch._prims_common.wrappers._maybe_resize_out(out, value.shape)
    return out.copy_(value)


def _loss(op: Any, rule: Rule) -> Callable[..., Any]:
    def loss(
        self: torch.Tensor,
        target: torch.Tensor,
        reduction: int = MEAN,
        width: float = 1.0,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        check_devices(str(op), self, target)
        operands = (self, target) if rule is LOSSES["mse_loss"] else (self, target, float(width))
        values = run(rule, op, operands, (), None, _result_like(self, target))
        if values is None:
            rest = () if rule is LOSSES["mse_loss"] else (width,)
            return fallback(op, self, target, reduction, *rest, **({} if out is None else {"out": out}))
        return _deliver(_reduced(values, reduction), out)

    return loss


def _gradient(op: Any, rule: Rule) -> Callable[..., Any]:
    mse = rule is LOSS_GRADIENTS["mse_loss_backward"]

    def gradient(
        grad: torch.Tensor,
        self: torch.Tensor,
        target: torch.Tensor,
        reduction: int,
        width: float = 1.0,
        *,
        out: torch.Tensor | None = None,
        grad_input: torch.Tensor | None = None,
    ) -> Any:
        check_devices(str(op), grad, self, target)
        weight = 1.0 / max(self.numel(), 1) if reduction == MEAN else 1.0
        operands = (grad, self, target, weight) if mse else (grad, self, target, weight, float(width))
        values = run(rule, op, operands, (), None, _result_like(self, target))
        given = {name: t for name, t in (("out", out), ("grad_input", grad_input)) if t is not None}
        if values is None:
            return fallback(op, grad, self, target, reduction, *(() if mse else (width,)), **given)
        return _deliver(values, next(iter(given.values()), None))

    return gradient


def _binary(op: Any) -> Callable[..., Any]:
    def loss(
        self: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = MEAN,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        check_devices(str(op), self, target, weight)
        operands = (self, target) if weight is None else (self, target, weight)
        rule = BINARY if weight is None else BINARY_WEIGHTED
        values = run(rule, op, operands, (), None, _result_like(*operands))
        if values is None:
            return fallback(op, self, target, weight, reduction, **({} if out is None else {"out": out}))
        return _deliver(_reduced(values, reduction), out)

    return loss


def _binary_gradient(op: Any) -> Callable[..., Any]:
    def gradient(
        grad: torch.Tensor,
        self: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = MEAN,
        *,
        grad_input: torch.Tensor | None = None,
    ) -> Any:
        check_devices(str(op), grad, self, target, weight)
        scale = 1.0 / max(self.numel(), 1) if reduction == MEAN else 1.0
        operands = (grad, self, target, scale) if weight is None else (grad, self, target, scale, weight)
        rule = BINARY_GRADIENT if weight is None else BINARY_GRADIENT_WEIGHTED
        values = run(rule, op, operands, (), None, _result_like(self, target))
        if values is None:
            given = {} if grad_input is None else {"grad_input": grad_input}
            return fallback(op, grad, self, target, weight, reduction, **given)
        return _deliver(values, grad_input)

    return gradient


def register(library: torch.library.Library) -> None:
    for name, rule in LOSSES.items():
        for overload in ("default", "out"):
            op = getattr(getattr(aten, name), overload)
            library.impl(op, _loss(op, rule), "PrivateUse1")
    for name, rule in LOSS_GRADIENTS.items():
        for overload in getattr(aten, name).overloads():
            op = getattr(getattr(aten, name), overload)
            library.impl(op, _gradient(op, rule), "PrivateUse1")
    for overload in ("default", "out"):
        op = getattr(aten.binary_cross_entropy, overload)
        library.impl(op, _binary(op), "PrivateUse1")
    for overload in ("default", "grad_input"):
        op = getattr(aten.binary_cross_entropy_backward, overload)
        library.impl(op, _binary_gradient(op), "PrivateUse1")
