"""Softmax and normalisation: ops on whole rows and channels."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from anytorch.lite.autograd import Base, record
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import on_gpu
from anytorch.lite.ops.elementwise import floats

T = TypeVar("T", bound=Base)


def shifted(x: Array, dim: int) -> Array:
    """The largest number becomes 0, so that exp cannot overflow; the softmax does not change."""
    if x.size == 0:
        return x
    return x - np.maximum.reduce(x, dim, keepdims=True)


@on_gpu
def soft(x: Array, dim: int) -> Array:
    """eˣ / Σeˣ along one dimension."""
    with np.errstate(invalid="ignore"):  # a row of -inf is nan, as it is in torch
        e = np.exp(shifted(x, dim))
    return e / np.add.reduce(e, dim, keepdims=True)


@on_gpu
def of_soft(g: Array, y: Array, dim: int) -> Array:
    return y * (g - (g * y).sum(axis=dim, keepdims=True))


@on_gpu
def log_soft(x: Array, dim: int) -> Array:
    z = shifted(x, dim)
    with np.errstate(divide="ignore"):  # rows of no numbers
        return z - np.log(np.sum(np.exp(z), axis=dim, keepdims=True))


@on_gpu
def of_log_soft(g: Array, y: Array, dim: int) -> Array:
    return g - np.exp(y) * np.sum(g, axis=dim, keepdims=True)


def by_row(name: str, x: T, dim: int, alone: Any, forward: Any, backward: Any) -> T:
    """`alone` is what becomes of a number that has no dimension to lie along."""
    data = floats(x)
    if not data.ndim:
        return record(name, alone(data), (x,), lambda g: (g * 0,))
    y = forward(data, dim)
    return record(name, y, (x,), lambda g: (backward(g, y, dim),), saves_output=True)


def softmax(x: T, dim: int = -1) -> T:
    return by_row("softmax", x, dim, np.ones_like, soft, of_soft)


def log_softmax(x: T, dim: int = -1) -> T:
    return by_row("log_softmax", x, dim, np.zeros_like, log_soft, of_log_soft)


@on_gpu
def normed(rows: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Any]:
    """(R, n) → (R, n): every row gets mean 0 and variance 1, then a scale and a shift. And what the gradient needs."""
    centred = rows - np.mean(rows, axis=1, keepdims=True)
    inverse = 1 / np.sqrt(np.mean(centred * centred, axis=1, keepdims=True) + eps)  # (R, 1)
    hat = centred * inverse
    out = hat if weight is None else hat * weight
    return (out if bias is None else out + bias), (hat, inverse)


@on_gpu
def of_normed(g: Array, kept: Any, weight: Array | None) -> tuple[Array, Array, Array]:
    """The gradients of the rows (R, n), of the weight and of the bias (n,)."""
    hat, inverse = kept
    gw = g if weight is None else g * weight
    inner = gw - np.mean(gw, axis=1, keepdims=True) - hat * np.mean(gw * hat, axis=1, keepdims=True)
    return inner * inverse, np.sum(g * hat, axis=0), np.sum(g, axis=0)


def layer_norm(x: T, weight: T | None, bias: T | None, n: int, eps: float) -> T:
    """(x − mean) / √(variance + eps) · weight + bias, over the last axes of `x`, seen as (rows, n)."""
    shape = x.data.shape
    scale, shift = (None if p is None else p.data.reshape(n) for p in (weight, bias))
    out, kept = normed(x.data.reshape(-1, n), scale, shift, eps)

    def backward(g: Array) -> list[Array]:
        of_x, of_weight, of_bias = of_normed(g.reshape(-1, n), kept, scale)
        gradients = [of_x.reshape(shape)]
        if weight is not None:
            gradients.append(of_weight.reshape(weight.data.shape))
        if bias is not None:
            gradients.append(of_bias.reshape(bias.data.shape))
        return gradients

    parents = tuple(p for p in (x, weight, bias) if p is not None)
    return record("layer_norm", out.reshape(shape), parents, backward, (x, *(() if weight is None else (weight,))))


# --- batch normalisation: every channel gets mean 0 and variance 1 over the batch, then a scale and a shift ---


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
