"""Functions of arrays that NumPy has no word for, on the GPU. `lite.moving.on_gpu` finds them here by name."""

from __future__ import annotations

from collections.abc import Callable

from anytorch.lite.gpu.array import GpuArray, compute
from anytorch.lite.gpu.conv import (
    correlated,
    max_pooled,
    mean_pooled,
    of_image,
    of_max_pooled,
    of_mean_pooled,
    of_weight,
)
from anytorch.lite.gpu.kernels import threads
from anytorch.lite.gpu.recurrent import gru_backward, gru_forward, lstm_backward, lstm_forward
from anytorch.lite.gpu.rows import (
    class_losses,
    log_soft,
    normed,
    of_class_losses,
    of_log_soft,
    of_normed,
    of_soft,
    soft,
)


def gelu_of(x: GpuArray) -> tuple[GpuArray, Callable[[], GpuArray]]:
    slope = "normal_cdf(x0) + x0 * 0.3989422804014327 * exp_f32(-0.5 * x0 * x0)"
    return compute("x0 * normal_cdf(x0)", (x,)), lambda: compute(slope, (x,))


ADAM = """  let g = load_g(i);
  let m = p.b1 * buffer_m[p.at_m + i] + (1.0 - p.b1) * g;
  let v = p.b2 * buffer_v[p.at_v + i] + (1.0 - p.b2) * g * g;
  store_m(i, m); store_v(i, v);
  store_weight(i, buffer_weight[p.at_weight + i] - p.step * m / (p.scale * sqrt(v) + p.eps));"""


def adam_step(
    weight: GpuArray, g: GpuArray, m: GpuArray, v: GpuArray, b1: float, b2: float, step: float, scale: float, eps: float
) -> None:
    """All of a parameter's step in one launch; `weight`, `m` and `v` are dense and changed in place."""
    numbers: dict[str, int | float] = {"b1": b1, "b2": b2, "step": step, "scale": scale, "eps": eps}
    written = {"weight": weight.layout, "m": m.layout, "v": v.layout}
    threads(ADAM, {"g": g.dense().layout}, written, {name: float(each) for name, each in numbers.items()}, weight.size)


def channels_normed(
    x: GpuArray, mean: GpuArray, inverse: GpuArray, weight: GpuArray | None, bias: GpuArray | None
) -> tuple[GpuArray, GpuArray]:
    hat = compute("(x0 - x1) * x2", (x, mean, inverse))
    scaled = compute("x0 * x1 + x2", (hat, 1.0 if weight is None else weight, 0.0 if bias is None else bias))
    return scaled, hat


__all__ = [
    "adam_step",
    "channels_normed",
    "class_losses",
    "correlated",
    "gelu_of",
    "gru_backward",
    "gru_forward",
    "log_soft",
    "lstm_backward",
    "lstm_forward",
    "max_pooled",
    "mean_pooled",
    "normed",
    "of_class_losses",
    "of_image",
    "of_log_soft",
    "of_max_pooled",
    "of_mean_pooled",
    "of_normed",
    "of_soft",
    "of_weight",
    "soft",
]
