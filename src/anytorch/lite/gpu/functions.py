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


__all__ = [
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
