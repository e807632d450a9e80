"""Batch normalisation: every channel gets mean 0 and variance 1 over the batch, then a scale and a shift."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from anytorch.lite.autograd import Base, record
from anytorch.lite.dtypes import Array

T = TypeVar("T", bound=Base)


def batch_norm(
    x: T, weight: T | None, bias: T | None, mean: Array, var: Array, batch_statistics: bool, eps: float
) -> T:
    """(N, C, …) with the statistics given: (C,). Those of the batch itself also carry gradients."""
    over = (0, *range(2, x.data.ndim))
    per_channel = (1, -1, *(1,) * (x.data.ndim - 2))  # (1, C, 1, 1)
    inverse = (1 / np.sqrt(var + eps)).astype(x.data.dtype).reshape(per_channel)
    hat = (x.data - mean.astype(x.data.dtype).reshape(per_channel)) * inverse
    out = hat
    if weight is not None:
        out = out * weight.data.reshape(per_channel)
    if bias is not None:
        out = out + bias.data.reshape(per_channel)
    n = x.data.size // max(x.data.shape[1], 1)

    def backward(g: Array) -> list[Array | None]:
        sum_g = np.sum(g, axis=over)  # (C,)
        sum_g_hat = np.sum(g * hat, axis=over)  # (C,)
        scale = inverse if weight is None else inverse * weight.data.reshape(per_channel)
        of_x: Array | None = None
        if x.requires_grad and batch_statistics:
            of_x = scale * (g - sum_g.reshape(per_channel) / n - hat * sum_g_hat.reshape(per_channel) / n)
        elif x.requires_grad:
            of_x = scale * g
        gradients = [of_x]
        if weight is not None:
            gradients.append(sum_g_hat)
        if bias is not None:
            gradients.append(sum_g)
        return gradients

    parents = tuple(p for p in (x, weight, bias) if p is not None)
    return record("batch_norm", out, parents, backward, (x, *(() if weight is None else (weight,))))
