"""The loss of picking one class per sample, and its gradient.

Scores are dense, (outer, classes, inner); a sample is an (outer, inner) pair. A target outside the classes gives NaN: a
shader cannot raise, and must not read what is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.reduce import Reducer, thread_main
from anytorch.gpu.wgsl.types import HELPERS, KINDS, enables, load, stored

THREADS = 64


@dataclass(frozen=True)
class Pick:
    scores: str  # dtype
    target: str
    weight: str  # dtype, or "" for none


@dataclass(frozen=True)
class PickBackward:
    grad: str
    target: str
    weight: str
    output: str  # a dtype with a word per element
    mean: bool  # divide by the total weight
    each: bool  # the gradient is per sample


# Two inputs, losses and weights; s0 is 1 for a mean.
TOTALS = Reducer(
    (("a", "f32", "0.0"), ("b", "f32", "0.0")),
    "s.a += x0; s.b += x1;",
    "s.a += o.a; s.b += o.b;",
    ("select(s.a, divided(s.a, s.b), p.s0 > 0.0)", "s.b"),
)

_PICKED = (
    "fn weight_of(t: i32) -> f32 {{\n"
    "  if (t == bitcast<i32>(p.ignored)) {{ return 0.0; }}\n"
    "  if (t < 0 || t >= i32(p.classes)) {{ return quiet_nan(); }}\n"
    "  return {weight};\n}}\n"
)


def _common(target: str, weight: str, names: list[str], target_at: int) -> str:
    value = load(weight, f"b{target_at + 1}", "(p.o_weight + u32(t))") if weight else "1.0"
    fields = ", ".join(f"{name}: u32" for name in names)
    bound = f"@group(0) @binding({target_at}) var<storage, read> b{target_at}: array<{KINDS[target].storage}>;\n"
    if weight:
        storage = KINDS[weight].storage
        bound += f"@group(0) @binding({target_at + 1}) var<storage, read> b{target_at + 1}: array<{storage}>;\n"
    return (
        f"struct Parameters {{ {fields} }}\nvar<immediate> p: Parameters;\n{bound}"
        f"{HELPERS['quiet_nan']}{_PICKED.format(weight=value)}"
    )


def render_pick(kernel: Pick) -> str:
    """Bindings: scores, target, weight if any, losses, weights (both f32 per sample)."""
    last = 3 if kernel.weight else 2
    names = ["samples", "classes", "inner", "ignored", "o_scores", "o_target", *(["o_weight"] if kernel.weight else [])]
    score = load(kernel.scores, "b0", "(p.o_scores + ((i / p.inner) * p.classes + u32(t)) * p.inner + i % p.inner)")
    return (
        enables({kernel.scores, kernel.weight})
        + f"@group(0) @binding(0) var<storage, read> b0: array<{KINDS[kernel.scores].storage}>;\n"
        + _common(kernel.target, kernel.weight, names, 1)
        + f"@group(0) @binding({last}) var<storage, read_write> losses: array<f32>;\n"
        + f"@group(0) @binding({last + 1}) var<storage, read_write> weights: array<f32>;\n"
        + thread_main(THREADS)
        + "  let i = thread; if (i >= p.samples) { return; }\n"
        + f"  let t = i32({load(kernel.target, 'b1', '(p.o_target + i)')});\n  let w = weight_of(t);\n  var loss = w;\n"
        + "  if (t == bitcast<i32>(p.ignored)) { loss = 0.0; }\n"
        + f"  else if (t >= 0 && t < i32(p.classes)) {{ loss = -w * {score}; }}\n"
        + "  losses[i] = loss; weights[i] = w;\n}\n"
    )


def render_pick_backward(kernel: PickBackward) -> str:
    """Bindings: gradient, total weight, target, weight if any, the scores' gradient."""
    last = 4 if kernel.weight else 3
    names = ["count", "classes", "inner", "ignored", "o_grad", "o_total", "o_target"]
    names += ["o_weight"] if kernel.weight else []
    grad = load(kernel.grad, "b0", "(p.o_grad + i)" if kernel.each else "p.o_grad")
    share = f" / {load(kernel.grad, 'b1', 'p.o_total')}" if kernel.mean else ""
    return (
        enables({kernel.grad, kernel.weight, kernel.output})
        + f"@group(0) @binding(0) var<storage, read> b0: array<{KINDS[kernel.grad].storage}>;\n"
        + f"@group(0) @binding(1) var<storage, read> b1: array<{KINDS[kernel.grad].storage}>;\n"
        + _common(kernel.target, kernel.weight, names, 2)
        + f"@group(0) @binding({last}) var<storage, read_write> out: array<{KINDS[kernel.output].storage}>;\n"
        + thread_main(THREADS)
        + "  if (thread >= p.count) { return; }\n"
        + "  let column = (thread / p.inner) % p.classes;\n"
        + "  let i = thread / (p.inner * p.classes) * p.inner + thread % p.inner;\n"
        + f"  let t = i32({load(kernel.target, 'b2', '(p.o_target + i)')});\n  var value = 0.0;\n"
        + "  if (t == i32(column) && t != bitcast<i32>(p.ignored)) "
        + f"{{ value = -weight_of(t) * {grad}{share}; }}\n"
        + f"  out[thread] = {stored(kernel.output, 'value')};\n}}\n"
    )
