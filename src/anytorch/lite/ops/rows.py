"""Softmax and its relatives: ops on whole rows."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from anytorch.lite.autograd import Base, record
from anytorch.lite.dtypes import Array
from anytorch.lite.ops.elementwise import floats

T = TypeVar("T", bound=Base)


def shifted(x: Array, dim: int) -> Array:
    """The largest number becomes 0, so that exp cannot overflow; the softmax does not change."""
    if x.size == 0:
        return x
    return x - x.max(axis=dim, keepdims=True)


def softmax(x: T, dim: int = -1) -> T:
    data = floats(x)
    with np.errstate(invalid="ignore"):  # a row of -inf is nan, as it is in torch
        e = np.exp(shifted(data, dim))
    y = e / e.sum(axis=dim, keepdims=True) if data.ndim else np.ones_like(e)

    def backward(g: Array) -> tuple[Array]:
        return (y * (g - (g * y).sum(axis=dim, keepdims=True)),)

    return record("softmax", y, (x,), backward if data.ndim else lambda g: (g * 0,), saves_output=True)


def log_softmax(x: T, dim: int = -1) -> T:
    z = shifted(floats(x), dim)
    if z.ndim == 0:
        return record("log_softmax", np.zeros_like(z), (x,), lambda g: (g * 0,))
    with np.errstate(divide="ignore"):  # rows of no numbers
        y = z - np.log(np.sum(np.exp(z), axis=dim, keepdims=True))

    def backward(g: Array) -> tuple[Array]:
        return (g - np.exp(y) * np.sum(g, axis=dim, keepdims=True),)

    return record("log_softmax", y, (x,), backward, saves_output=True)


def layer_norm(x: T, weight: T | None, bias: T | None, n: int, eps: float) -> T:
    """(x − mean) / √(variance + eps) · weight + bias, over the last axis of `x` seen as (rows, n)."""
    rows = x.data.reshape(-1, n)  # (R, n)
    mean = np.mean(rows, axis=1, keepdims=True)  # (R, 1)
    centred = rows - mean
    inverse = 1 / np.sqrt(np.mean(centred * centred, axis=1, keepdims=True) + eps)  # (R, 1)
    hat = centred * inverse  # (R, n)
    out = hat
    if weight is not None:
        out = out * weight.data.reshape(1, n)
    if bias is not None:
        out = out + bias.data.reshape(1, n)
    shape = x.data.shape

    def backward(g: Array) -> list[Array | None]:
        g = g.reshape(-1, n)
        gradients: list[Array | None] = []
        gw = g * weight.data.reshape(1, n) if weight is not None else g
        if x.requires_grad:
            inner = gw - np.mean(gw, axis=1, keepdims=True) - hat * np.mean(gw * hat, axis=1, keepdims=True)
            gradients.append((inner * inverse).reshape(shape))
        else:
            gradients.append(None)
        if weight is not None:
            gradients.append(np.sum(g * hat, axis=0).reshape(weight.data.shape))
        if bias is not None:
            gradients.append(np.sum(g, axis=0).reshape(bias.data.shape))
        return gradients

    parents = tuple(p for p in (x, weight, bias) if p is not None)
    return record("layer_norm", out.reshape(shape), parents, backward, (x, *(() if weight is None else (weight,))))
