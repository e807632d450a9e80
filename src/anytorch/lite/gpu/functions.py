"""Functions of arrays that NumPy has no word for, on the GPU. `lite.moving.on_gpu` finds them here by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.wgsl import multi
from anytorch.gpu.wgsl.norm import normalise, normalise_backward
from anytorch.gpu.wgsl.softmax import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD, RowRule
from anytorch.lite.dtypes import Array
from anytorch.lite.gpu import conv, recurrent
from anytorch.lite.gpu.array import GpuArray, check_devices, compute
from anytorch.lite.gpu.folds import by_rows, folded
from anytorch.lite.gpu.kernels import F32, Layout, new, threads, write


def ruled(rule: RowRule) -> Callable[..., GpuArray]:
    """A function of arrays, and of the dimension along which their rows lie."""

    def run(*given: Any) -> GpuArray:
        arrays, dim, x = given[:-1], given[-1], given[0]
        return GpuArray(by_rows(rule, [(each.dense().layout, "element") for each in arrays], x.shape, dim % x.ndim)[0])

    return run


soft, of_soft = ruled(SOFTMAX), ruled(SOFTMAX_BACKWARD)
log_soft, of_log_soft = ruled(LOG_SOFTMAX), ruled(LOG_SOFTMAX_BACKWARD)


# --- layer norm ------------------------------------------------------------------------------------------------------

NORMALISE = lru_cache(normalise)  # a rule is known again by its identity
NORMALISE_BACKWARD = lru_cache(normalise_backward)
Kept = tuple[GpuArray, Layout, Layout]  # the rows, and the mean and 1 / deviation of each


def normed(rows: GpuArray, weight: GpuArray | None, bias: GpuArray | None, eps: float) -> tuple[GpuArray, Kept]:
    """(R, n) → (R, n)"""
    scale = [(each.dense().layout, "column") for each in (weight, bias) if each is not None]
    check_devices("layer_norm", [each for each in (weight, bias) if each is not None])
    rows = rows.dense()
    rule = NORMALISE(weight is not None, bias is not None)
    inputs = [(rows.layout, "element"), *scale]
    out, mean, inverse = by_rows(rule, inputs, rows.shape, 1, ("mean", "rstd"), (eps,))
    return GpuArray(out), (rows, mean, inverse)


def of_normed(g: GpuArray, kept: Kept, weight: GpuArray | None) -> tuple[GpuArray, GpuArray, GpuArray]:
    """The gradients of the rows (R, n), of the weight and of the bias (n,)."""
    rows, mean, inverse = kept
    g = g.dense()
    inputs = [(g.layout, "element"), (rows.layout, "element"), (mean, "row"), (inverse, "row")]
    if weight is not None:
        inputs.append((weight.dense().layout, "column"))
    (of_x,) = by_rows(NORMALISE_BACKWARD(weight is not None), inputs, rows.shape, 1)
    column = (rows.shape[0], 1)
    statistics = [GpuArray(Layout(each.memory, column, (1, 1))) for each in (mean, inverse)]
    hat = compute("x0 * (x1 - x2) * x3", (g, rows, *statistics))  # g times the normalised rows
    return GpuArray(of_x), hat.sum(0), g.sum(0)


# --- the loss of picking one class per row ---------------------------------------------------------------------------

LOSS = """  let t = load_target(i);
  if (t < 0) { store_loss(i, 0.0); return; }
  store_loss(i, -(1.0 - p.smoothing) * load_y(i * p.classes + u32(t)) - p.smoothing * load_mean(i));"""
SLOPE = """  let row = i / p.classes; let t = load_target(row);
  if (t < 0) { store_slope(i, 0.0); return; }
  let right = select(0.0, 1.0 - p.smoothing, u32(t) == i % p.classes);
  store_slope(i, (exp(load_y(i)) - right - p.smoothing / f32(p.classes)) * load_g(row));"""

Picked = tuple[GpuArray, Layout]  # the log-probabilities (R, C), and the class of each row or -1


def class_losses(logits: GpuArray, named: Array, kept: Array, smoothing: float) -> tuple[GpuArray, Picked]:
    """Logits (R, C) and classes (R,) → losses (R,); rows that are not kept cost nothing."""
    rows, classes = logits.shape
    y = log_soft(logits, 1)
    target = write(np.where(kept, named, -1), np.int32)
    (mean,) = folded("mean", y.layout, (1,))
    out = new((rows,))
    numbers = {"classes": classes, "smoothing": float(smoothing)}
    threads(LOSS, {"y": y.layout, "target": target, "mean": mean}, {"loss": out}, numbers, rows, whole=("target",))
    return GpuArray(out), (y, target)


def of_class_losses(g: GpuArray, picked: Picked, named: Array, kept: Array, smoothing: float) -> GpuArray:
    """The gradients of the losses (R,) → those of the logits (R, C)."""
    y, target = picked
    out = new(y.shape)
    numbers = {"classes": y.shape[1], "smoothing": float(smoothing)}
    inputs = {"y": y.layout, "target": target, "g": g.dense().layout}
    threads(SLOPE, inputs, {"slope": out}, numbers, out.size, whole=("target",))
    return GpuArray(out)


# --- others ----------------------------------------------------------------------------------------------------------


def gelu_of(x: GpuArray) -> tuple[GpuArray, Callable[[], GpuArray]]:
    slope = "normal_cdf(x0) + x0 * 0.3989422804014327 * exp_f32(-0.5 * x0 * x0)"
    return compute("x0 * normal_cdf(x0)", (x,)), lambda: compute(slope, (x,))


ADAM = multi.Multi(
    "v2 = b1 * v2 + (1.0 - b1) * v1; v3 = b2 * v3 + (1.0 - b2) * v1 * v1;\n"
    "    v0 = v0 - step * v2 / (scale * sqrt(v3) + eps);\n",
    (F32,) * 4,
    written=(True, False, True, True),
    numbers=("b1", "b2", "step", "scale", "eps"),
)


def adam_step(
    weight: GpuArray, g: GpuArray, m: GpuArray, v: GpuArray, b1: float, b2: float, step: float, scale: float, eps: float
) -> None:
    """All of a parameter's step in one launch; `weight`, `m` and `v` are dense and changed in place."""
    size = weight.size
    if not size:
        return
    plan = plans[key := ("lite adam", size)]
    if plan is None:
        x, y = grid(-(-size // multi.WORKGROUP))
        head = (size, x * multi.WORKGROUP)
        plan = plans[key] = Plan(ADAM, multi.render, (x, y), [4] * 4, ADAM.writable, head=head, numbers="5f")
    plan([each.layout.address for each in (weight, g.dense(), m, v)], b1, b2, step, scale, eps)


def channels_normed(
    x: GpuArray, mean: GpuArray, inverse: GpuArray, weight: GpuArray | None, bias: GpuArray | None
) -> tuple[GpuArray, GpuArray]:
    hat = compute("(x0 - x1) * x2", (x, mean, inverse))
    scaled = compute("x0 * x1 + x2", (hat, 1.0 if weight is None else weight, 0.0 if bias is None else bias))
    return scaled, hat


# What `on_gpu` looks for: everything here, and what these modules define.
NAMESAKES: dict[str, Any] = {**vars(conv), **vars(recurrent), **globals()}
