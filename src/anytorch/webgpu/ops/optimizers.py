"""Optimizer steps, one launch per parameter, and the two kernels of gradient scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.multiple import launch
from anytorch.webgpu.tensors import aten, device

Tensors = Sequence[torch.Tensor]


class Step:
    """What every fused step has in common: the gradient's sign and scale, and not stepping after an overflow."""

    def __init__(
        self, lr: Any, maximize: bool, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        self.cells: list[torch.Tensor] = []
        self.numbers: dict[str, float] = {}
        self.scaled = grad_scale is not None
        lines = []
        if found_inf is not None:
            lines.append(f"    if ({self.cell(found_inf)} != 0.0) {{ return; }}\n")
        if isinstance(lr, torch.Tensor) and lr.device.type == device().type:
            self.lr = self.cell(lr)
        else:
            self.numbers["lr"] = float(lr)
            self.lr = "lr"
        if grad_scale is not None:
            lines.append(f"    v1 = v1 / {self.cell(grad_scale)};\n")
        lines.append("    var grad = -v1;\n" if maximize else "    var grad = v1;\n")
        self.text = "".join(lines)

    def cell(self, tensor: torch.Tensor) -> str:
        self.cells.append(tensor)
        return f"cell{len(self.cells) - 1}"


def _adam_body(step: Step, steps: str, *, decoupled: bool, decay: bool, amsgrad: bool) -> str:
    """v0 parameter, v1 gradient, v2 and v3 the moments, v4 the largest second moment."""
    lines = [step.text]
    if decay:
        lines.append(
            f"    v0 = v0 - {step.lr} * weight_decay * v0;\n" if decoupled else "    grad = grad + weight_decay * v0;\n"
        )
    lines += [
        "    v2 = v2 + one_minus_beta1 * (grad - v2);\n",
        "    v3 = beta2 * v3 + one_minus_beta2 * grad * grad;\n",
        # 1 - beta^t without the cancellation of writing it so.
        f"    let correction1 = -expm1_f32({steps} * log_beta1);\n",
        f"    let correction2 = -expm1_f32({steps} * log_beta2);\n",
    ]
    if amsgrad:
        lines.append("    v4 = maximum_f32(v4, v3);\n")
    lines.append(
        f"    v0 = v0 - ({step.lr} / correction1) * v2 / (sqrt({'v4' if amsgrad else 'v3'}) / sqrt(correction2) + eps);\n"
    )
    return "".join(lines)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e9


def _adam(op: Any, *, decoupled: bool) -> Callable[..., None]:
    def step(
        self: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        state_steps: Tensors,
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        settings = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": weight_decay,
            "eps": eps,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "grad_scale": grad_scale,
            "found_inf": found_inf,
        }
        common = Step(lr, maximize, grad_scale, found_inf)
        steps = f"cell{len(common.cells)}"
        body = _adam_body(common, steps, decoupled=decoupled, decay=weight_decay != 0, amsgrad=amsgrad)
        numbers = {
            **common.numbers,
            "one_minus_beta1": 1.0 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1.0 - beta2,
            "log_beta1": _log(beta1),
            "log_beta2": _log(beta2),
            "eps": eps,
            "weight_decay": weight_decay,
        }
        written = (True, common.scaled, True, True) + ((True,) if amsgrad else ())
        for i, parameter in enumerate(self):
            tensors = [parameter, _laid_out(grads[i], parameter, common.scaled), exp_avgs[i], exp_avg_sqs[i]]
            if amsgrad:
                tensors.append(max_exp_avg_sqs[i])
            cells = [*common.cells, state_steps[i]]
            if not launch(body, tensors, written, cells, numbers=numbers):
                largest = [max_exp_avg_sqs[i]] if amsgrad else []
                lists = ([parameter], [grads[i]], [exp_avgs[i]], [exp_avg_sqs[i]], largest, [state_steps[i]])
                fallback(op, *lists, **settings)

    return step


def _laid_out(grad: torch.Tensor, parameter: torch.Tensor, written: bool) -> torch.Tensor:
    """The gradient in the parameter's layout; a gradient that is written back must be the tensor itself."""
    if written or grad.stride() == parameter.stride() or grad.shape != parameter.shape:
        return grad
    return torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


def _sgd(op: Any) -> Callable[..., None]:
    def step(
        self: Tensors,
        grads: Tensors,
        momentum_buffer_list: Tensors,
        *,
        weight_decay: float,
        momentum: float,
        lr: Any,
        dampening: float,
        nesterov: bool,
        maximize: bool,
        is_first_step: bool,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        common = Step(lr, maximize, grad_scale, found_inf)
        lines = [common.text]
        if weight_decay:
            lines.append("    grad = grad + weight_decay * v0;\n")
        if momentum:
            lines.append(
                "    v2 = grad;\n" if is_first_step else "    v2 = momentum * v2 + one_minus_dampening * grad;\n"
            )
            lines.append("    grad = grad + momentum * v2;\n" if nesterov else "    grad = v2;\n")
        lines.append(f"    v0 = v0 - {common.lr} * grad;\n")
        body = "".join(lines)
        numbers = {
            **common.numbers,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "one_minus_dampening": 1.0 - dampening,
        }
        written = (True, common.scaled) + ((True,) if momentum else ())
        for i, parameter in enumerate(self):
            tensors = [parameter, _laid_out(grads[i], parameter, common.scaled)]
            if momentum:
                tensors.append(momentum_buffer_list[i])
            if not launch(body, tensors, written, common.cells, numbers=numbers):
                held = [momentum_buffer_list[i]] if momentum else []
                fallback(
                    op,
                    [parameter],
                    [grads[i]],
                    held,
                    weight_decay=weight_decay,
                    momentum=momentum,
                    lr=lr,
                    dampening=dampening,
                    nesterov=nesterov,
                    maximize=maximize,
                    is_first_step=is_first_step,
                    grad_scale=grad_scale,
                    found_inf=found_inf,
                )

    return step


def unscale(self: Tensors, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply gradients by the inverse scale; a value that is not finite sets `found_inf`."""
    body = "    if (!is_finite(v0)) { cell0 = 1.0; }\n    v0 = v0 * cell1;\n"
    for grad in self:
        if not launch(body, [grad], (True,), (found_inf, inv_scale), (True, False)):
            fallback(aten._amp_foreach_non_finite_check_and_unscale_.default, [grad], found_inf, inv_scale)


def update_scale(
    self: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> torch.Tensor:
    body = """    if (v2 != 0.0) { v0 = v0 * backoff; v1 = 0; }
    else if (v1 + 1 == i32(interval)) {
      let grown = v0 * growth;
      if (is_finite(grown)) { v0 = grown; }
      v1 = 0;
    } else { v1 = v1 + 1; }
"""
    tensors = [self.view(1), growth_tracker.view(1), found_inf.view(1)]
    numbers = {
        "growth": scale_growth_factor,
        "backoff": scale_backoff_factor,
        "interval": float(growth_interval),
    }
    exact = growth_interval < 1 << 24  # the interval travels as a float
    if not exact or not launch(body, tensors, (True, True, False), numbers=numbers):
        fallback(
            aten._amp_update_scale_.default,
            self,
            growth_tracker,
            found_inf,
            scale_growth_factor,
            scale_backoff_factor,
            growth_interval,
        )
    return self


def register(library: torch.library.Library) -> None:
    for packet, decoupled in ((aten._fused_adam_, False), (aten._fused_adamw_, True)):
        for overload in ("default", "tensor_lr"):
            op = getattr(packet, overload)
            library.impl(op, _adam(op, decoupled=decoupled), "PrivateUse1")
    for overload in ("default", "tensor_lr"):
        op = getattr(aten._fused_sgd_, overload)
        library.impl(op, _sgd(op), "PrivateUse1")
    library.impl("_amp_foreach_non_finite_check_and_unscale_", unscale, "PrivateUse1")
    library.impl("_amp_update_scale_", update_scale, "PrivateUse1")
