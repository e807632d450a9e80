"""The loss of picking one class per sample, and its gradient.

Scores are dense, (outer, classes, inner); a sample is an (outer, inner) pair. A target outside the classes gives NaN, since
a shader must not read what is not there, and is reported by the forward kernel (`faults`).
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.faults import reporting
from anytorch.gpu.wgsl.reduce import sums, thread_main
from anytorch.gpu.wgsl.types import HELPERS, head, load, stored

THREADS = 64


@dataclass(frozen=True)
class Pick:
    scores: str  # dtype
    target: str
    weight: str  # dtype, or "" for none
    reports: bool = False  # targets out of range


@dataclass(frozen=True)
class PickBackward:
    grad: str
    target: str
    weight: str
    output: str  # a dtype with a word per element
    mean: bool  # divide by the total weight
    each: bool  # the gradient is per sample


# Two inputs, losses and weights; s0 is 1 for a mean.
TOTALS = sums(("select(s.a, divided(s.a, s.b), p.s0 > 0.0)", "s.b"), a="x0", b="x1")


def _weight_of(weight: str) -> str:
    return (
        f"{HELPERS['quiet_nan']}fn weight_of(t: i32) -> f32 {{\n"
        "  if (t == bitcast<i32>(p.ignored)) { return 0.0; }\n"
        "  if (t < 0 || t >= i32(p.classes)) { return quiet_nan(); }\n"
        f"  return {load(weight, 'weight', '(p.o_weight + u32(t))') if weight else '1.0'};\n}}\n"
    )


def _target(dtype: str, binding: str, index: str) -> str:
    """Statements that set `t`, an i32. One of 64 bits beyond that becomes the least i32, which is no class, nor ignored."""
    if dtype != "int64":
        return f"  let t = {load(dtype, binding, index)};\n"
    return (
        f"  let wide = {load(dtype, binding, index)};\n"
        "  let t = select(bitcast<i32>(0x80000000u), i32(wide), i64(i32(wide)) == wide);\n"
    )


def _report(kernel: Pick) -> str:
    """What happens where `t` is no class."""
    if not kernel.reports:
        return ""
    words = (
        "vec2<u32>(u32(wide), u32(wide >> 32u))"
        if kernel.target == "int64"
        else "bitcast<vec2<u32>>(vec2<i32>(t, t >> 31u))"
    )
    return f"  else {{ report(0u, p.classes, {words}); }}\n"


def render_pick(kernel: Pick) -> str:
    """Bindings: scores, target, weight if any, losses, weights (both f32 per sample); the fault buffer if it reports."""
    weight = {"weight": kernel.weight} if kernel.weight else {}
    names = ("samples", "classes", "inner", "ignored", "o_scores", "o_target", *[f"o_{name}" for name in weight])
    site = ("site",) if kernel.reports else ()
    score = load(kernel.scores, "b0", "(p.o_scores + ((i / p.inner) * p.classes + u32(t)) * p.inner + i % p.inner)")
    return (
        head((*names, *site), {"b0": kernel.scores, "b1": kernel.target, **weight}, {"losses": "f32", "weights": "f32"})
        + (reporting(4 + len(weight)) if kernel.reports else "")
        + _weight_of(kernel.weight)
        + thread_main(THREADS)
        + "  let i = thread; if (i >= p.samples) { return; }\n"
        + _target(kernel.target, "b1", "(p.o_target + i)")
        + "  let w = weight_of(t);\n  var loss = w;\n"
        + "  if (t == bitcast<i32>(p.ignored)) { loss = 0.0; }\n"
        + f"  else if (t >= 0 && t < i32(p.classes)) {{ loss = -w * {score}; }}\n"
        + _report(kernel)
        + "  losses[i] = loss; weights[i] = w;\n}\n"
    )


def render_pick_backward(kernel: PickBackward) -> str:
    """Bindings: gradient, total weight, target, weight if any, the scores' gradient."""
    weight = {"weight": kernel.weight} if kernel.weight else {}
    names = ("count", "classes", "inner", "ignored", "o_grad", "o_total", "o_target", *[f"o_{name}" for name in weight])
    grad = load(kernel.grad, "b0", "(p.o_grad + i)" if kernel.each else "p.o_grad")
    share = f" / {load(kernel.grad, 'b1', 'p.o_total')}" if kernel.mean else ""
    return (
        head(names, {"b0": kernel.grad, "b1": kernel.grad, "b2": kernel.target, **weight}, {"out": kernel.output})
        + _weight_of(kernel.weight)
        + thread_main(THREADS)
        + "  if (thread >= p.count) { return; }\n"
        + "  let column = (thread / p.inner) % p.classes;\n"
        + "  let i = thread / (p.inner * p.classes) * p.inner + thread % p.inner;\n"
        + _target(kernel.target, "b2", "(p.o_target + i)")
        + "  var value = 0.0;\n"
        + "  if (t == i32(column) && t != bitcast<i32>(p.ignored)) "
        + f"{{ value = -weight_of(t) * {grad}{share}; }}\n"
        + f"  out[thread] = {stored(kernel.output, 'value')};\n}}\n"
    )
