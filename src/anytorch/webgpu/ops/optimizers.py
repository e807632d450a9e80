"""Optimizer steps, one launch per parameter, and the two kernels of gradient scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import op_of
from anytorch.webgpu.multiple import launch
from anytorch.webgpu.tensors import KEY, aten, device

Tensors = Sequence[torch.Tensor]


Settings = dict[str, Any]  # an op's arguments after its lists


class Step:
    """What every fused step has in common: the gradient's sign and scale, and not stepping after an overflow."""

    def __init__(self, settings: Settings) -> None:
        self.cells: list[torch.Tensor] = []
        self.numbers: dict[str, float] = {}
        lr, grad_scale, found_inf = settings["lr"], settings.get("grad_scale"), settings.get("found_inf")
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
        lines.append("    var grad = -v1;\n" if settings["maximize"] else "    var grad = v1;\n")
        self.text = "".join(lines)

    def cell(self, tensor: torch.Tensor) -> str:
        self.cells.append(tensor)
        return f"cell{len(self.cells) - 1}"


def _adam(step: Step, settings: Settings, *, decoupled: bool) -> tuple[str, dict[str, float], int]:
    """v0 parameter, v1 gradient, v2 and v3 the moments, v4 the largest second moment; the last cell counts the steps."""
    lines = [step.text]
    amsgrad, steps = settings["amsgrad"], f"cell{len(step.cells)}"
    if settings["weight_decay"] != 0:
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
    beta1, beta2 = settings["beta1"], settings["beta2"]
    numbers = {
        "one_minus_beta1": 1.0 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1.0 - beta2,
        "log_beta1": _log(beta1),
        "log_beta2": _log(beta2),
        "eps": settings["eps"],
        "weight_decay": settings["weight_decay"],
    }
    return "".join(lines), numbers, 3 if amsgrad else 2


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e9


def _sgd(step: Step, settings: Settings) -> tuple[str, dict[str, float], int]:
    """v0 parameter, v1 gradient, v2 the momentum's."""
    lines = [step.text]
    momentum = settings["momentum"]
    if settings["weight_decay"]:
        lines.append("    grad = grad + weight_decay * v0;\n")
    if momentum:
        first = "    v2 = grad;\n"
        lines.append(first if settings["is_first_step"] else "    v2 = momentum * v2 + one_minus_dampening * grad;\n")
        lines.append("    grad = grad + momentum * v2;\n" if settings["nesterov"] else "    grad = v2;\n")
    lines.append(f"    v0 = v0 - {step.lr} * grad;\n")
    numbers = {
        "weight_decay": settings["weight_decay"],
        "momentum": momentum,
        "one_minus_dampening": 1.0 - settings["dampening"],
    }
    return "".join(lines), numbers, 1 if momentum else 0


def _fused(op: Any, make: Callable[[Step, Settings], tuple[str, dict[str, float], int]]) -> Callable[..., None]:
    """The kernel of a fused step. `make` gives its body, its numbers, and how many of the lists of state it changes."""
    counted = any(argument.name == "state_steps" for argument in op._schema.arguments)

    def step(parameters: Tensors, grads: Tensors, *state: Tensors, **settings: Any) -> None:
        common = Step(settings)
        body, numbers, used = make(common, settings)
        numbers = {**common.numbers, **numbers}
        written = (True, common.scaled, *(True,) * used)
        for i, parameter in enumerate(parameters):
            held = [column[i] for column in state[:used]]
            tensors = [parameter, _laid_out(grads[i], parameter, common.scaled), *held]
            cells = [*common.cells, state[-1][i]] if counted else common.cells
            if not launch(body, tensors, written, cells, numbers=numbers):
                whole = state[: len(state) - counted]
                lists = [[column[i]] if k < used else [] for k, column in enumerate(whole)]
                fallback(op, [parameter], [grads[i]], *lists, *([[state[-1][i]]] if counted else []), **settings)

    return step


def _laid_out(grad: torch.Tensor, parameter: torch.Tensor, written: bool) -> torch.Tensor:
    """The gradient in the parameter's layout; a gradient that is written back must be the tensor itself."""
    if written or grad.stride() == parameter.stride() or grad.shape != parameter.shape:
        return grad
    return torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


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
    tensors = (self, growth_tracker, found_inf)
    factors = (scale_growth_factor, scale_backoff_factor, growth_interval)
    numbers = dict(zip(("growth", "backoff", "interval"), map(float, factors), strict=True))
    exact = growth_interval < 1 << 24  # the interval travels as a float
    if not exact or not launch(body, [t.view(1) for t in tensors], (True, True, False), numbers=numbers):
        fallback(aten._amp_update_scale_.default, *tensors, *factors)
    return self


STEPS: dict[str, Callable[[Step, Settings], tuple[str, dict[str, float], int]]] = {
    "_fused_adam_": partial(_adam, decoupled=False),
    "_fused_adamw_": partial(_adam, decoupled=True),
    "_fused_sgd_": _sgd,
}


def register(library: torch.library.Library) -> None:
    for name, make in STEPS.items():
        for op in (op_of(name), op_of(f"{name}.tensor_lr")):
            library.impl(op, _fused(op, make), KEY)
    library.impl("_amp_foreach_non_finite_check_and_unscale_", unscale, KEY)
    library.impl("_amp_update_scale_", update_scale, KEY)
