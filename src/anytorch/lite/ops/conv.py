"""Convolution, as matrix multiplication, and pooling.

`patches` lays every window of the image out as a column. The convolution is then one product of the weights, as a matrix,
with these columns; its gradient is the same product turned round, and `unpatch` adds the columns up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, record
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import on_gpu
from anytorch.lite.ops.windows import Pair, Windows, pair

T = TypeVar("T", bound=Base)

AT_ONCE = 1 << 18  # numbers in the columns of one step: what stays in the cache is multiplied before it is forgotten


def patches(x: Array, windows: Windows) -> Array:
    """(N, C, H, W) → (N, C·kh·kw, oh·ow)"""
    n, c = x.shape[:2]
    if windows.trivial:
        return x.reshape(n, c, -1)
    (kh, kw), (oh, ow) = windows.kernel, windows.out
    padded = windows.padded(x)
    columns = np.empty((n, c, kh, kw, oh, ow), x.dtype)
    for i, j, rows, cols in windows.places():
        columns[:, :, i, j] = padded[:, :, rows, cols]
    return columns.reshape(n, c * kh * kw, oh * ow)


def stretches(x: Array, windows: Windows) -> tuple[Array, int]:
    """The same for a stride of 1, as a view that nothing was copied for: (N, C, kh, kw, oh·width), and the width.

    A row of windows is taken as wide as the padded image, so that all rows that a place of the kernel meets are one stretch
    of memory, which is quick to copy. The last few columns of each row reach into the next and mean nothing.
    """
    (n, c, h, w), (kh, kw), (up, left), (dh, dw) = x.shape, windows.kernel, windows.padding, windows.dilation
    height, width = h + 2 * up, w + 2 * left
    memory = np.zeros(n * c * height * width + dw * (kw - 1), x.dtype)
    image = memory[: n * c * height * width].reshape(n, c, height, width)
    image[:, :, up : up + h, left : left + w] = x
    one, row = x.itemsize, width * x.itemsize
    shape = (n, c, kh, kw, windows.out[0] * width)
    return np.ndarray(shape, x.dtype, memory, 0, (c * height * row, height * row, dh * row, dw * one, one)), width


def unpatch(columns: Array, channels: int, windows: Windows) -> Array:
    """(N, C·kh·kw, oh·ow) → (N, C, H, W): every number goes back to where it came from, and those that meet are added."""
    n = columns.shape[0]
    (kh, kw), (oh, ow), (ph, pw), (h, w) = windows.kernel, windows.out, windows.padding, windows.image
    columns = columns.reshape(n, channels, kh, kw, oh, ow)
    image = np.zeros((n, channels, h + 2 * ph, w + 2 * pw), columns.dtype)
    for i, j, rows, cols in windows.places():
        image[:, :, rows, cols] += columns[:, :, i, j]
    return windows.unpadded(image)


def batches(n: int, column_numbers: int) -> Iterator[slice]:
    """A few images at a time."""
    step = max(1, AT_ONCE // max(1, column_numbers))
    return (slice(start, start + step) for start in range(0, n, step))


@on_gpu
def correlated(x: Array, weight: Array, bias: Array | None, windows: Windows, groups: int) -> Array:
    """(N, C, H, W), (O, C/G, kh, kw) → (N, O, oh, ow)"""
    n, o, (oh, ow) = x.shape[0], weight.shape[0], windows.out
    matrix = weight.reshape(groups, o // groups, -1)  # (G, O/G, C/G·k·k)
    out = np.empty((n, o, oh, ow), x.dtype)
    if windows.stride == (1, 1) and not windows.trivial:
        multiply_stretches(matrix, *stretches(x, windows), out)
    else:
        places, depth = oh * ow, matrix.shape[2]
        for some in batches(n, groups * depth * places):
            columns = patches(x[some], windows).reshape(-1, groups, depth, places)
            np.matmul(matrix, columns, out=out[some].reshape(-1, groups, o // groups, places))
    if bias is not None:
        out += bias.reshape(1, o, 1, 1)
    return out


def multiply_stretches(matrix: Array, view: Array, width: int, out: Array) -> None:
    """The weights as (G, O/G, C/G·k·k), the windows as `stretches` gives them → out (N, O, oh, ow)."""
    n, o, oh, ow = out.shape
    groups, rows, depth = matrix.shape
    steps = list(batches(n, groups * depth * oh * width))
    most = steps[0].stop if steps else 0
    # One piece of memory for all steps: asking the system for it again each time costs more than the copying.
    columns = np.empty((min(most, n), *view.shape[1:]), out.dtype)
    product = np.empty((min(most, n), groups, rows, oh * width), out.dtype)
    for some in steps:
        count = min(some.stop, n) - some.start
        columns[:count] = view[some]
        np.matmul(matrix, columns[:count].reshape(count, groups, depth, oh * width), out=product[:count])
        out[some] = product[:count].reshape(count, o, oh, width)[..., :ow]


@on_gpu
def of_image(g: Array, weight: Array, windows: Windows, groups: int) -> Array:
    """The gradient of the result (N, O, oh, ow) → that of the image (N, C, H, W)."""
    n, o, oh, ow = g.shape
    matrix = weight.reshape(groups, o // groups, -1).transpose(0, 2, 1)  # (G, C/G·k·k, O/G)
    depth, channels = matrix.shape[1], weight.shape[1] * groups
    g = g.reshape(n, groups, o // groups, oh * ow)
    out = np.empty((n, channels, *windows.image), g.dtype)
    for some in batches(n, groups * depth * oh * ow):
        columns = np.matmul(matrix, g[some])  # (n, G, C/G·k·k, oh·ow)
        out[some] = unpatch(columns.reshape(-1, groups * depth, oh * ow), channels, windows)
    return out


@on_gpu
def of_weight(g: Array, x: Array, weight_shape: tuple[int, ...], windows: Windows, groups: int) -> Array:
    """The gradient of the result (N, O, oh, ow) and the image (N, C, H, W) → that of the weight (O, C/G, kh, kw)."""
    n, o, oh, ow = g.shape
    g = g.reshape(n, groups, o // groups, oh * ow)
    out = np.zeros(weight_shape, g.dtype).reshape(groups, o // groups, -1)
    depth = out.shape[2]
    for some in batches(n, groups * depth * oh * ow):
        columns = patches(x[some], windows).reshape(-1, groups, depth, oh * ow)
        out += np.matmul(g[some], columns.transpose(0, 1, 3, 2)).sum(axis=0)
    return out.reshape(weight_shape)


def conv2d(
    x: T,
    weight: T,
    bias: T | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> T:
    """(N, C, H, W) with weights (O, C/groups, kh, kw) → (N, O, oh, ow)"""
    if x.data.ndim != 4 or x.data.shape[1] != weight.data.shape[1] * groups or weight.data.shape[0] % groups:
        raise UsageError(
            f"conv2d: an input of shape {x.data.shape} does not fit weights of shape {weight.data.shape} and {groups} groups"
        )
    if x.data.dtype != weight.data.dtype:
        raise UsageError(f"conv2d: the input is {x.data.dtype}, the weights are {weight.data.dtype}")
    windows = Windows(weight.data.shape[2:], pair(stride), pair(padding), pair(dilation), x.data.shape[2:])

    def backward(g: Array) -> list[Array | None]:
        gradients: list[Array | None] = [
            of_image(g, weight.data, windows, groups) if x.requires_grad else None,
            of_weight(g, x.data, weight.data.shape, windows, groups) if weight.requires_grad else None,
        ]
        if bias is not None:
            gradients.append(np.sum(g, axis=(0, 2, 3)))
        return gradients

    out = correlated(x.data, weight.data, None if bias is None else bias.data, windows, groups)
    parents = (x, weight) if bias is None else (x, weight, bias)
    return record("conv2d", out, parents, backward, (x, weight))


# --- pooling: one number for each window ------------------------------------------------------------------------------


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
