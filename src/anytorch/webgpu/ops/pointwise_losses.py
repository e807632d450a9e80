"""Losses taken element by element: the element's loss and its gradient are expressions, then one reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import into
from anytorch.webgpu.launch import NoKernel, check_devices
from anytorch.webgpu.pointwise import Rule, run
from anytorch.webgpu.tensors import KEY, aten

MEAN, SUM = 1, 2  # torch's numbers for `reduction`; 0 is none

_CROSS_ENTROPY = "binary_cross_entropy({0}, {1})"
_CROSS_ENTROPY_SLOPE = "{3} * {0} * ({1} - {2}) / maximum_{T}((1.0 - {1}) * {1}, 1e-12)"
# {0} the input, {1} the target, {2} beta, delta or the elements' weights; a second rule is for a call that has weights.
# Backward: {0} the gradient, {1} the input, {2} the target, {3} what an element counts (1/n for a mean), {4} as {2} before.
LOSSES = {
    "mse_loss": (Rule("({0} - {1}) * ({0} - {1})"),),
    "mse_loss_backward": (Rule("{3} * 2.0 * ({1} - {2}) * {0}"),),
    "smooth_l1_loss": (Rule("smooth_l1({0} - {1}, {2})"),),
    "smooth_l1_loss_backward": (Rule("{3} * {0} * smooth_l1_slope({1} - {2}, {4})"),),
    "huber_loss": (Rule("huber({0} - {1}, {2})"),),
    "huber_loss_backward": (Rule("{3} * {0} * minimum_{T}(maximum_{T}({1} - {2}, -{4}), {4})"),),
    "binary_cross_entropy": (Rule(_CROSS_ENTROPY), Rule(f"{{2}} * {_CROSS_ENTROPY}")),
    "binary_cross_entropy_backward": (Rule(_CROSS_ENTROPY_SLOPE), Rule(f"{{4}} * {_CROSS_ENTROPY_SLOPE}")),
}


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


def _kernel(op: Any, rules: Sequence[Rule]) -> Callable[..., Any]:
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    backward = names[0] == "grad_output"

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = {**dict.fromkeys(names), **defaults, **dict(zip(names, args, strict=False)), **kwargs}
        out, reduction = values.pop("grad_input" if backward else "out", None), values.pop("reduction")
        operands = [v if isinstance(v, torch.Tensor) else float(v) for v in values.values() if v is not None]
        tensors = [v for v in operands if isinstance(v, torch.Tensor)]
        check_devices(op, *tensors)
        shaped = tensors
        if backward:
            operands.insert(3, 1.0 / max(values["self"].numel(), 1) if reduction == MEAN else 1.0)
            shaped = tensors[1:3]
        rule = rules[-1] if values.get("weight") is not None else rules[0]
        try:
            made = run(rule, op, operands, (), None, _result_like(*shaped))
        except NoKernel:
            return fallback(op, *args, **kwargs)
        if not backward:
            made = made.mean() if reduction == MEAN else made.sum() if reduction == SUM else made
        return into(out, made)

    return kernel


def register(library: torch.library.Library) -> None:
    for name, rules in LOSSES.items():
        packet = getattr(aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            library.impl(op, _kernel(op, rules), KEY)
