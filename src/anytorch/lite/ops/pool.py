"""Pooling: one number for each window of an image."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, record
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import on_gpu
from anytorch.lite.ops.windows import Pair, Windows, pair

T = TypeVar("T", bound=Base)


def pooling(x: Base, kernel: Pair, stride: Pair | None, padding: Pair) -> Windows:
    if x.data.ndim not in (3, 4):
        raise UsageError(f"pooling needs (N, C, H, W) or (C, H, W), got {x.data.shape}")
    size, pad = pair(kernel), pair(padding)
    if pad[0] * 2 > size[0] or pad[1] * 2 > size[1]:
        raise UsageError(f"pooling: padding {pad} is more than half of the kernel {size}")
    return Windows(size, pair(stride) if stride is not None else size, pad, (1, 1), x.data.shape[-2:])


@on_gpu
def max_pooled(x: Array, windows: Windows) -> tuple[Array, Any]:
    """(…, H, W) → (…, oh, ow), and what the gradient needs."""
    padded = windows.padded(x, -np.inf)
    out = np.full((*x.shape[:-2], *windows.out), -np.inf, x.dtype)
    for _, _, rows, cols in windows.places():
        np.maximum(out, padded[..., rows, cols], out=out)
    return out, (padded, out)


@on_gpu
def of_max_pooled(g: Array, kept: Any, shape: tuple[int, ...], windows: Windows) -> Array:
    padded, out = kept
    image = np.zeros_like(padded)
    open_ = np.ones(out.shape, bool)  # windows whose winner has not been met yet: the first one takes all
    for _, _, rows, cols in windows.places():
        won = open_ & (padded[..., rows, cols] == out)
        open_ &= ~won
        image[..., rows, cols] += g * won
    return windows.unpadded(image)


def max_pool2d(x: T, kernel: Pair, stride: Pair | None = None, padding: Pair = 0) -> T:
    windows = pooling(x, kernel, stride, padding)
    out, kept = max_pooled(x.data, windows)
    shape = x.data.shape
    return record("max_pool2d", out, (x,), lambda g: (of_max_pooled(g, kept, shape, windows),), (x,), saves_output=True)


@on_gpu
def mean_pooled(x: Array, windows: Windows) -> Array:
    """(…, H, W) → (…, oh, ow)"""
    padded = windows.padded(x)
    out = np.zeros((*x.shape[:-2], *windows.out), x.dtype)
    for _, _, rows, cols in windows.places():
        out += padded[..., rows, cols]
    out *= 1 / (windows.kernel[0] * windows.kernel[1])
    return out


@on_gpu
def of_mean_pooled(g: Array, shape: tuple[int, ...], windows: Windows) -> Array:
    (up, left), (height, width) = windows.padding, windows.image
    image = np.zeros((*shape[:-2], height + 2 * up, width + 2 * left), g.dtype)
    part = g * (1 / (windows.kernel[0] * windows.kernel[1]))
    for _, _, rows, cols in windows.places():
        image[..., rows, cols] += part
    return windows.unpadded(image)


def avg_pool2d(x: T, kernel: Pair, stride: Pair | None = None, padding: Pair = 0) -> T:
    """The padding counts as zeros."""
    windows = pooling(x, kernel, stride, padding)
    shape = x.data.shape
    out = mean_pooled(x.data, windows)
    return record("avg_pool2d", out, (x,), lambda g: (of_mean_pooled(g, shape, windows),))
