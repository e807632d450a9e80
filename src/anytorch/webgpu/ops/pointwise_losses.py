"""Losses taken element by element: the element's loss and its gradient are expressions, then one reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.forms import into
from anytorch.webgpu.launch import check_devices
from anytorch.webgpu.pointwise import Rule, run
from anytorch.webgpu.tensors import aten

MEAN, SUM = 1, 2  # torch's numbers for `reduction`; 0 is none

# {0} the input, {1} the target, {2} beta or delta.
LOSSES = {
    "mse_loss": Rule("({0} - {1}) * ({0} - {1})"),
    "smooth_l1_loss": Rule("smooth_l1({0} - {1}, {2})"),
    "huber_loss": Rule("huber({0} - {1}, {2})"),
}
# {0} the gradient, {1} the input, {2} the target, {3} the weight of an element (1/n for a mean), {4} beta or delta.
GRADIENTS = {
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
        first = tensors[0]
        dtype = first.dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        if first.shape == shape:
            return torch.empty_like(torch.empty_strided(shape, first.stride(), dtype=dtype, device="meta"))
        return torch.empty(shape, dtype=dtype, device="meta")

    return make


def _reduced(values: torch.Tensor, reduction: int) -> torch.Tensor:
    return values.mean() if reduction == MEAN else values.sum() if reduction == SUM else values


def _loss(op: Any, rule: Rule) -> Callable[..., Any]:
    def loss(
        self: torch.Tensor,
        target: torch.Tensor,
        reduction: int = MEAN,
        *width: float,
        beta: float = 1.0,
        delta: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> Any:
        check_devices(op, self, target)
        if rule is LOSSES["mse_loss"]:
            numbers: tuple[float, ...] = ()
        else:
            numbers = width or (beta if rule is LOSSES["smooth_l1_loss"] else delta,)
        values = run(rule, op, (self, target, *map(float, numbers)), (), None, _result_like(self, target))
        if values is None:
            return fallback(op, self, target, reduction, *numbers, **({} if out is None else {"out": out}))
        return into(out, _reduced(values, reduction))

    return loss


def _gradient(op: Any, rule: Rule) -> Callable[..., Any]:
    def gradient(
        grad: torch.Tensor,
        self: torch.Tensor,
        target: torch.Tensor,
        reduction: int,
        *width: float,
        grad_input: torch.Tensor | None = None,
    ) -> Any:
        check_devices(op, grad, self, target)
        weight = 1.0 / max(self.numel(), 1) if reduction == MEAN else 1.0
        operands = (grad, self, target, weight, *map(float, width))
        values = run(rule, op, operands, (), None, _result_like(self, target))
        if values is None:
            given = {} if grad_input is None else {"grad_input": grad_input}
            return fallback(op, grad, self, target, reduction, *width, **given)
        return into(grad_input, values)

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
        check_devices(op, self, target, weight)
        operands = (self, target) if weight is None else (self, target, weight)
        rule = BINARY if weight is None else BINARY_WEIGHTED
        values = run(rule, op, operands, (), None, _result_like(*operands))
        if values is None:
            return fallback(op, self, target, weight, reduction, **({} if out is None else {"out": out}))
        return into(out, _reduced(values, reduction))

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
        check_devices(op, grad, self, target, weight)
        scale = 1.0 / max(self.numel(), 1) if reduction == MEAN else 1.0
        operands = (grad, self, target, scale) if weight is None else (grad, self, target, scale, weight)
        rule = BINARY_GRADIENT if weight is None else BINARY_GRADIENT_WEIGHTED
        values = run(rule, op, operands, (), None, _result_like(self, target))
        if values is None:
            given = {} if grad_input is None else {"grad_input": grad_input}
            return fallback(op, grad, self, target, weight, reduction, **given)
        return into(grad_input, values)

    return gradient


def register(library: torch.library.Library) -> None:
    for names, make in ((LOSSES, _loss), (GRADIENTS, _gradient)):
        for name, rule in names.items():
            packet = getattr(aten, name)
            for overload in packet.overloads():
                op = getattr(packet, overload)
                library.impl(op, make(op, rule), "PrivateUse1")
    for packet, maker in (
        (aten.binary_cross_entropy, _binary),
        (aten.binary_cross_entropy_backward, _binary_gradient),
    ):
        for overload in packet.overloads():
            op = getattr(packet, overload)
            library.impl(op, maker(op), "PrivateUse1")
