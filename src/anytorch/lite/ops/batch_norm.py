"""Batch normalisation: every channel gets mean 0 and variance 1 over the batch, then a scale and a shift."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from anytorch.lite.autograd import Base, record
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import on_gpu

T = TypeVar("T", bound=Base)


@on_gpu
def channels_normed(
    x: Array, mean: Array, inverse: Array, weight: Array | None, bias: Array | None
) -> tuple[Array, Array]:
    """(x − mean) · inverse, with a scale and a shift and without; all but `x` are (1, C, 1, …)."""
    hat = (x - mean) * inverse
    out = hat if weight is None else hat * weight
    return (out if bias is None else out + bias), hat


def batch_norm(
    x: T, weight: T | None, bias: T | None, mean: Array, var: Array, batch_statistics: bool, eps: float
) -> T:
    """(N, C, …) with the statistics given: (C,). Those of the batch itself also carry gradients."""
    over = (0, *range(2, x.data.ndim))
    per_channel = (1, -1, *(1,) * (x.data.ndim - 2))  # (1, C, 1, 1)
    inverse = (1 / np.sqrt(var + eps)).astype(x.data.dtype).reshape(per_channel)
    middle = mean.astype(x.data.dtype, copy=False).reshape(per_channel)
    scale, shift = (None if p is None else p.data.reshape(per_channel) for p in (weight, bias))
    out, hat = channels_normed(x.data, middle, inverse, scale, shift)
    n = x.data.size // max(x.data.shape[1], 1)

    def backward(g: Array) -> list[Array | None]:
        sum_g = np.sum(g, axis=over)  # (C,)
        sum_g_hat = np.sum(g * hat, axis=over)  # (C,)
        slope = inverse if scale is None else inverse * scale
        of_x: Array | None = None
        if x.requires_grad and batch_statistics:
            of_x = slope * (g - sum_g.reshape(per_channel) / n - hat * sum_g_hat.reshape(per_channel) / n)
        elif x.requires_grad:
            of_x = slope * g
        gradients = [of_x]
        if weight is not None:
            gradients.append(sum_g_hat)
        if bias is not None:
            gradients.append(sum_g)
        return gradients

    parents = tuple(p for p in (x, weight, bias) if p is not None)
    return record("batch_norm", out, parents, backward, (x, *(() if weight is None else (weight,))))
