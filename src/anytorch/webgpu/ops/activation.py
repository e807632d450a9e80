"""Activation functions and their gradients. Each is one expression; gradients have {0} = the gradient of the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anytorch.webgpu.kernels import (
    RULES,
    op_of,
    pointwise_kernel,
    register_forms,
    register_kernels,
    register_pointwise,
)
from anytorch.webgpu.launch import to_meta
from anytorch.webgpu.pointwise import Rule, run
from anytorch.webgpu.tensors import aten

TANH_INNER = "0.7978845608028654 * ({x} + 0.044715 * {x} * {x} * {x})"


def _gelu(approximate: str) -> str:
    if approximate == "none":
        return "{0} * normal_cdf_plain({0})"
    return "0.5 * {0} * (1.0 + tanh_{T}(" + TANH_INNER.replace("{x}", "{0}") + "))"


def _gelu_backward(approximate: str) -> str:
    if approximate == "none":
        return "{0} * (normal_cdf_plain({1}) + {1} * 0.3989422804014327 * exp_{T}(-0.5 * {1} * {1}))"
    return "{0} * gelu_tanh_slope({1})"


ACTIVATIONS = {
    # A NaN is neither below nor above anything: it stays.
    "relu": Rule("select({0}, {T}(0), {0} < {T}(0))"),
    "silu": Rule("{0} * sigmoid_{T}({0})"),
    "gelu": Rule(_gelu),
    "mish": Rule("{0} * tanh_{T}(softplus_{T}({0}))"),
    "softplus": Rule("softplus_scaled({0}, {1}, {2})"),
    "elu": Rule("{2} * elu_unit({0}, {1}, {3})"),
    "leaky_relu": Rule("select({0} * {1}, {0}, {0} > {T}(0))"),
    "hardtanh": Rule("minimum_{T}(maximum_{T}({0}, {1}), {2})", compute="output"),
    "hardswish": Rule("{0} * minimum_{T}(maximum_{T}({0} + 3.0, 0.0), 6.0) / 6.0"),
    "hardsigmoid": Rule("minimum_{T}(maximum_{T}({0} + 3.0, 0.0), 6.0) / 6.0"),
    "softshrink": Rule("select(select(select(0.0, {0}, is_nan({0})), {0} + {1}, {0} < -{1}), {0} - {1}, {0} > {1})"),
    "hardshrink": Rule("select({0}, {T}(0), at_most_{T}(-{1}, {0}) && at_most_{T}({0}, {1}))", rounded=True),
    "_prelu_kernel": Rule("select({0} * {1}, {0}, {0} > {T}(0))"),
}


def _logit(eps: float | None) -> str:
    if eps is None or eps < 0:
        return "log_{T}(divide_{T}({0}, 1.0 - {0}))"
    low, high = f"f32({eps!r})", f"f32({1.0 - eps!r})"
    clamped = f"minimum_{{T}}(maximum_{{T}}({{0}}, {low}), {high})"
    return f"log_{{T}}(divide_{{T}}({clamped}, 1.0 - {clamped}))"


def _logit_backward(eps: float | None) -> str:
    slope = "divide_{T}({0}, {1} * (1.0 - {1}))"
    if eps is None or eps < 0:
        return f"select({slope}, quiet_nan(), {{1}} < 0.0 || {{1}} > 1.0)"
    return f"select({slope}, 0.0, {{1}} < f32({eps!r}) || {{1}} > f32({1.0 - eps!r}))"


def _elu_backward(is_result: bool) -> str:
    if is_result:
        return "{0} * select({2}, {3} * ({4} + {1} * {2}), at_most_{T}({4}, 0.0))"
    return "{0} * select({2}, {3} * {1} * {2} * exp_{T}({4} * {3}), at_most_{T}({4}, 0.0))"


GRADIENTS = {
    "threshold_backward": Rule("select({0}, {T}(0), at_most_{T}({1}, {2}))", compute="output"),
    "sigmoid_backward": Rule("{0} * (1.0 - {1}) * {1}"),
    "tanh_backward": Rule("{0} * (1.0 - {1} * {1})"),
    "gelu_backward": Rule(_gelu_backward),
    "silu_backward": Rule("{0} * silu_slope({1})"),
    "mish_backward": Rule("{0} * mish_slope({1})"),
    "softplus_backward": Rule("{0} * select(sigmoid_{T}({1} * {2}), 1.0, {1} * {2} > {3})"),
    "elu_backward": Rule(_elu_backward),
    "leaky_relu_backward": Rule(lambda is_result: "select({0} * {2}, {0}, {1} > {T}(0))"),
    "hardtanh_backward": Rule("select({0}, {T}(0), at_most_{T}({1}, {2}) || at_most_{T}({3}, {1}))", compute="output"),
    "hardswish_backward": Rule("{0} * hardswish_slope({1})"),
    "hardsigmoid_backward": Rule("select(0.0, {0} / 6.0, {1} > -3.0 && {1} < 3.0)"),
    "softshrink_backward": Rule("select({0}, {T}(0), at_most_{T}(-{2}, {1}) && at_most_{T}({1}, {2}))", rounded=True),
    "hardshrink_backward": Rule("select({0}, {T}(0), at_most_{T}(-{2}, {1}) && at_most_{T}({1}, {2}))", rounded=True),
}

# Gradients that may be functions of the result: the place of the slope among the arguments, and torch's name for the op.
OF_RESULTS = {"elu_backward": (1, "elu"), "leaky_relu_backward": (2, "leakyReLu")}

LOG_SIGMOID = Rule("minimum_{T}({0}, 0.0) - log1p_{T}(exp_{T}(-abs({0})))")
LOG_SIGMOID_BACKWARD = Rule("{0} * sigmoid_{T}(-{1})")
PRELU_INPUT = Rule("select({2} * {0}, {0}, {1} > {T}(0))", compute="output")
PRELU_WEIGHT = Rule("select({1} * {0}, {T}(0), {1} > {T}(0))", compute="output")
GLU = Rule("{0} * sigmoid_{T}({1})")
GLU_FIRST = Rule("{0} * sigmoid_{T}({2})")
GLU_SECOND = Rule("{0} * {1} * sigmoid_{T}({2}) * (1.0 - sigmoid_{T}({2}))")


def _of_result(op: Any, rule: Rule, which: int, name: str) -> Callable[..., Any]:
    """The gradient of an activation that was computed in place is a function of its result, which a negative slope
    (argument `which`) makes two-valued: torch refuses it, and so does this kernel."""
    kernel = pointwise_kernel(op, rule)
    names = [argument.name for argument in op._schema.arguments]
    result_at = names.index("self_is_result" if "self_is_result" in names else "is_result")

    def gradient(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        if values[names[result_at]] and values[names[which]] < 0.0:
            raise RuntimeError(
                f"In-place {name} backward calculation is triggered with a negative slope which is not supported. "
                "This is caused by calling in-place forward function with a negative slope, "
                "please call out-of-place version instead."
            )
        return kernel(*args, **kwargs)

    return gradient


def _like(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.empty_like(to_meta(tensor))


def _log_sigmoid_forward(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    result = run(LOG_SIGMOID, aten.log_sigmoid_forward.default, (self,), call=_like(self))
    return result, self.new_empty(0)  # the CPU keeps exp(-|x|) here for its gradient; ours is cheaper to recompute


def _log_sigmoid_backward(grad: torch.Tensor, self: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return run(LOG_SIGMOID_BACKWARD, aten.log_sigmoid_backward.default, (grad, self), call=_like(self))


def _prelu_backward(grad: torch.Tensor, self: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    op = aten._prelu_kernel_backward.default
    return tuple(run(rule, op, (grad, self, weight), call=_like(self)) for rule in (PRELU_INPUT, PRELU_WEIGHT))


def _glu(self: torch.Tensor, dim: int = -1, *, out: torch.Tensor) -> torch.Tensor:
    return run(GLU, aten.glu.out, self.chunk(2, dim), out=out)


def _glu_backward(grad: torch.Tensor, self: torch.Tensor, dim: int) -> torch.Tensor:
    result = torch.empty_like(self)
    for half, rule in zip(result.chunk(2, dim), (GLU_FIRST, GLU_SECOND), strict=True):
        run(rule, aten.glu_backward.default, (grad, *self.chunk(2, dim)), out=half)
    return result


KERNELS: dict[str, Callable[..., Any]] = {
    "log_sigmoid_forward": _log_sigmoid_forward,
    "log_sigmoid_backward": _log_sigmoid_backward,
    "_prelu_kernel_backward": _prelu_backward,
    "glu.out": _glu,
    "glu_backward": _glu_backward,
}


def register(library: torch.library.Library) -> None:
    for name, rule in (*ACTIVATIONS.items(), *GRADIENTS.items()):
        if name not in OF_RESULTS:
            register_pointwise(library, op_of(name), rule)
    for name, (which, said) in OF_RESULTS.items():
        RULES[op_of(name)] = GRADIENTS[name]
        register_forms(library, op_of(name), partial(_of_result, rule=GRADIENTS[name], which=which, name=said))
    for name, expression in (("logit", _logit), ("logit_backward", _logit_backward)):
        register_forms(library, op_of(name), partial(pointwise_kernel, rule=Rule(expression, compute="float")))
    register_kernels(library, KERNELS)
