"""Optimizer steps: fused ones, one launch per parameter, with the two kernels of gradient scaling; and foreach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from anytorch.gpu.plans import plans
from anytorch.webgpu.dtypes import FLOATS
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import op_of
from anytorch.webgpu.multiple import launch, most_buffers
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


# --- foreach: lists of tensors, several of one geometry per launch ------------------------------------------------------
#
# Only what an optimizer's step is made of. The others need no kernel: torch loops over the tensors and calls our
# elementwise ones.

MOST_BUFFERS = 16  # with their places and a number each, the parameters fit into 32 words


@dataclass(frozen=True)
class Loop:
    """`expression` makes the first of an item's tensors from {0}, {1}, … and its number {n}; `single` does one item."""

    expression: str
    lists: int  # how many lists of tensors
    single: Callable[..., Any]
    number: bool = True


def _numbered(name: str, *loop: Any) -> dict[str, Loop]:
    """One number for all items, or one each."""
    return dict.fromkeys((f"{name}.Scalar", f"{name}.ScalarList"), Loop(*loop))


LOOPS = {
    **_numbered("_foreach_add_", "{0} + {n}", 1, lambda t, n: t.add_(n)),
    **_numbered("_foreach_mul_", "{0} * {n}", 1, lambda t, n: t.mul_(n)),
    **_numbered("_foreach_div_", "divide_f32({0}, {n})", 1, lambda t, n: t.div_(n)),
    **_numbered("_foreach_addcmul_", "{0} + {n} * {1} * {2}", 3, lambda t, u, v, n: t.addcmul_(u, v, value=n)),
    **_numbered(
        "_foreach_addcdiv_", "{0} + {n} * divide_f32({1}, {2})", 3, lambda t, u, v, n: t.addcdiv_(u, v, value=n)
    ),
    "_foreach_add_.List": Loop("{0} + {n} * {1}", 2, lambda t, u, n: t.add_(u, alpha=n)),
    "_foreach_sub_.List": Loop("{0} - {n} * {1}", 2, lambda t, u, n: t.sub_(u, alpha=n)),
    "_foreach_mul_.List": Loop("{0} * {1}", 2, lambda t, u: t.mul_(u), number=False),
    "_foreach_div_.List": Loop("divide_f32({0}, {1})", 2, lambda t, u: t.div_(u), number=False),
    "_foreach_maximum_.List": Loop("maximum_f32({0}, {1})", 2, lambda t, u: t.copy_(t.maximum(u)), number=False),
    "_foreach_lerp_.Scalar": Loop(
        "select({1} - ({1} - {0}) * (1.0 - {n}), {0} + {n} * ({1} - {0}), abs({n}) < 0.5)",
        2,
        lambda t, u, n: t.lerp_(u, n),
    ),
    "_foreach_sqrt_": Loop("sqrt({0})", 1, lambda t: t.sqrt_(), number=False),
    "_foreach_neg_": Loop("-{0}", 1, lambda t: t.neg_(), number=False),
    "_foreach_zero_": Loop("0.0", 1, lambda t: t.zero_(), number=False),
}
SQUARE_ROOT = Loop("sqrt({1})", 2, lambda t, u: t.copy_(u.sqrt()), number=False)  # into new tensors


def _runs(loop: Loop, lists: Sequence[Tensors]) -> list[list[int]]:
    """Items that one launch can do together: of one geometry, as many as there are bindings for."""
    most = max(1, min(most_buffers(), MOST_BUFFERS) // loop.lists)
    if loop.number:
        most = min(most, (30 - MOST_BUFFERS))
    groups: dict[Any, list[int]] = {}
    runs = []
    for i, tensor in enumerate(lists[0]):
        key = (tensor.size(), tensor.stride(), *[column[i].dtype for column in lists])
        group = groups.get(key)
        if group is None or len(group) == most:
            group = groups[key] = []
            runs.append(group)
        group.append(i)
    return runs


def run(loop: Loop, lists: Sequence[Tensors], numbers: Sequence[Any]) -> None:
    """Do every item of the lists; `numbers` has one each, or is empty."""
    first = lists[0]
    for column in lists[1:]:
        if len(column) != len(first):
            raise RuntimeError(f"Tensor lists must have the same number of tensors, got {len(first)} and {len(column)}")
    if loop.number and len(numbers) != len(first):
        raise RuntimeError(
            "Tensor list must have same number of elements as scalar list. "
            f"Got {len(first)} tensors and {len(numbers)} numbers"
        )
    # A tensor named twice is changed twice, one after the other.
    twice = len({t.data_ptr() for t in first}) < len(first)
    for items in [[i] for i in range(len(first))] if twice else _runs(loop, lists):
        if not _together(loop, lists, numbers, items):
            for i in items:
                loop.single(*[column[i] for column in lists], *([numbers[i]] if loop.number else []))


def _together(loop: Loop, lists: Sequence[Tensors], numbers: Sequence[Any], items: list[int]) -> bool:
    tensors = [column[i] for i in items for column in lists]
    chosen = [numbers[i] for i in items] if loop.number else []
    if any(t.dtype not in FLOATS for t in tensors) or not all(isinstance(n, (int, float)) for n in chosen):
        return False
    width = loop.lists
    body = _body(loop, len(items))
    written = (True, *(False,) * (width - 1)) * len(items)
    return launch(body, tensors, written, numbers={f"n{k}": float(n) for k, n in enumerate(chosen)})


def _body(loop: Loop, items: int) -> str:
    key = ("foreach", id(loop), items)
    text: str | None = plans[key]
    if text is None:
        lines = []
        for k in range(items):
            expression = loop.expression.replace("{n}", f"n{k}")
            for j in range(loop.lists):
                expression = expression.replace(f"{{{j}}}", f"v{k * loop.lists + j}")
            lines.append(f"    v{k * loop.lists} = {expression};\n")
        text = plans[key] = "".join(lines)
    return text


def _kernel(op: Any, loop: Loop) -> Callable[..., None]:
    arguments = op._schema.arguments
    per_item = op._overloadname == "ScalarList"
    default = next((a.default_value for a in arguments if a.has_default_value()), 1)

    def kernel(*args: Any, **kwargs: Any) -> None:
        lists = args[: loop.lists]
        numbers: Sequence[Any] = ()
        if loop.number:
            given: Any = args[loop.lists] if len(args) > loop.lists else next(iter(kwargs.values()), default)
            numbers = given if per_item else [given] * len(lists[0])
        run(loop, lists, numbers)

    return kernel


def square_roots(self: Tensors) -> list[torch.Tensor]:
    """`_foreach_sqrt`: into new tensors."""
    results = [torch.empty_like(t) for t in self]
    for items in _runs(SQUARE_ROOT, (results, self)):
        if not _together(SQUARE_ROOT, (results, self), (), items):
            for i in items:
                results[i] = self[i].sqrt()
    return results


def multiply_by_tensor_(self: Tensors, other: torch.Tensor) -> None:
    """`_foreach_mul_` by one number that is on the device: how gradients are clipped without waiting for the norm."""
    for tensor in self:
        whole = tensor.dtype in FLOATS and other.dim() == 0
        if not whole or not launch("    v0 = v0 * cell0;\n", [tensor], (True,), [other]):
            tensor.mul_(other)


def register(library: torch.library.Library) -> None:
    for name, make in STEPS.items():
        for op in (op_of(name), op_of(f"{name}.tensor_lr")):
            library.impl(op, _fused(op, make), KEY)
    library.impl("_amp_foreach_non_finite_check_and_unscale_", unscale, KEY)
    library.impl("_amp_update_scale_", update_scale, KEY)
    for name, loop in LOOPS.items():
        library.impl(name, _kernel(op_of(name), loop), KEY)
    library.impl("_foreach_sqrt", square_roots, KEY)
    library.impl("_foreach_mul_.Tensor", multiply_by_tensor_, KEY)
