"""Convolution as matrix multiplication, and pooling.

`patches` lays every window of the image out as a column. The convolution is then one product of the weights, as a matrix,
with these columns; its gradient is the same product turned round, and `unpatch` adds the columns up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, record
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import through_host

T = TypeVar("T", bound=Base)
Pair = int | tuple[int, int]

AT_ONCE = 1 << 18  # numbers in the columns of one step: what stays in the cache is multiplied before it is forgotten


def pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


@dataclass(frozen=True)
class Windows:
    """The windows of an image of (height, width) that a kernel sees."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    image: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(self.image, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        ]
        if min(sizes) < 1:
            raise UsageError(f"a {self.kernel} kernel does not fit a {self.image} image padded by {self.padding}")
        return sizes[0], sizes[1]

    @property
    def trivial(self) -> bool:
        return self.kernel == self.stride == (1, 1) and self.padding == (0, 0)

    def padded(self, x: Array, value: float = 0) -> Array:
        (up, left) = self.padding
        if up == left == 0:
            return x
        out = np.full((*x.shape[:-2], x.shape[-2] + 2 * up, x.shape[-1] + 2 * left), value, x.dtype)
        out[..., up : up + x.shape[-2], left : left + x.shape[-1]] = x
        return out

    def unpadded(self, x: Array) -> Array:
        (up, left), (height, width) = self.padding, self.image
        return x[..., up : up + height, left : left + width]

    def places(self) -> Iterator[tuple[int, int, slice, slice]]:
        """For each place in the kernel, the rows and columns of the padded image that it meets."""
        (oh, ow), (sh, sw), (dh, dw) = self.out, self.stride, self.dilation
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield (
                    i,
                    j,
                    slice(i * dh, i * dh + sh * (oh - 1) + 1, sh),
                    slice(j * dw, j * dw + sw * (ow - 1) + 1, sw),
                )


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


def unpatch(columns: Array, channels: int, windows: Windows) -> Array:
    """(N, C·kh·kw, oh·ow) → (N, C, H, W): every number goes back to where it came from, and those that meet are added."""
    n = columns.shape[0]
    (kh, kw), (oh, ow), (ph, pw), (h, w) = windows.kernel, windows.out, windows.padding, windows.image
    columns = columns.reshape(n, channels, kh, kw, oh, ow)
    image = np.zeros((n, channels, h + 2 * ph, w + 2 * pw), columns.dtype)
    for i, j, rows, cols in windows.places():
        image[:, :, rows, cols] += columns[:, :, i, j]
    return windows.unpadded(image)


@through_host
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
    n, c, h, w = x.data.shape
    o, _, kh, kw = weight.data.shape
    windows = Windows((kh, kw), pair(stride), pair(padding), pair(dilation), (h, w))
    oh, ow = windows.out
    depth = (c // groups) * kh * kw
    matrix = weight.data.reshape(groups, o // groups, depth)  # (G, O/G, C/G·k·k)
    step = max(1, AT_ONCE // max(1, groups * depth * oh * ow))
    out = np.empty((n, groups, o // groups, oh * ow), x.data.dtype)

    def columns(start: int) -> Array:
        piece = patches(x.data[start : start + step], windows)
        return piece.reshape(-1, groups, depth, oh * ow)

    for start in range(0, n, step):
        np.matmul(matrix, columns(start), out=out[start : start + step])
    if bias is not None:
        out += bias.data.reshape(1, groups, o // groups, 1)

    def backward(g: Array) -> list[Array | None]:
        g = np.ascontiguousarray(g).reshape(n, groups, o // groups, oh * ow)
        of_x = np.empty_like(x.data) if x.requires_grad else None
        of_weight = np.zeros_like(matrix) if weight.requires_grad else None
        for start in range(0, n, step):
            part = g[start : start + step]
            if of_weight is not None:
                of_weight += np.matmul(part, columns(start).transpose(0, 1, 3, 2)).sum(axis=0)
            if of_x is not None:
                back = np.matmul(matrix.transpose(0, 2, 1), part).reshape(len(part), groups * depth, oh * ow)
                of_x[start : start + step] = unpatch(back, c, windows)
        gradients = [of_x, None if of_weight is None else of_weight.reshape(weight.data.shape)]
        if bias is not None:
            gradients.append(g.sum(axis=(0, 3)).reshape(-1))
        return gradients

    parents = (x, weight) if bias is None else (x, weight, bias)
    return record("conv2d", out.reshape(n, o, oh, ow), parents, backward, (x, weight))


def pooling(x: Base, kernel: Pair, stride: Pair | None, padding: Pair) -> Windows:
    if x.data.ndim not in (3, 4):
        raise UsageError(f"pooling wants (N, C, H, W) or (C, H, W), got {x.data.shape}")
    size, pad = pair(kernel), pair(padding)
    if pad[0] * 2 > size[0] or pad[1] * 2 > size[1]:
        raise UsageError(f"pooling: padding {pad} is more than half of the kernel {size}")
    return Windows(size, pair(stride) if stride is not None else size, pad, (1, 1), x.data.shape[-2:])


@through_host
def max_pool2d(x: T, kernel: Pair, stride: Pair | None = None, padding: Pair = 0) -> T:
    windows = pooling(x, kernel, stride, padding)
    padded = windows.padded(x.data, -np.inf)
    out = np.full((*x.data.shape[:-2], *windows.out), -np.inf, x.data.dtype)
    for _, _, rows, cols in windows.places():
        np.maximum(out, padded[..., rows, cols], out=out)

    def backward(g: Array) -> tuple[Array]:
        image = np.zeros_like(padded)
        open_ = np.ones(out.shape, bool)  # windows whose winner has not been met yet: the first one takes all
        for _, _, rows, cols in windows.places():
            won = open_ & (padded[..., rows, cols] == out)
            open_ &= ~won
            image[..., rows, cols] += g * won
        return (windows.unpadded(image),)

    return record("max_pool2d", out, (x,), backward, (x,), saves_output=True)


@through_host
def avg_pool2d(x: T, kernel: Pair, stride: Pair | None = None, padding: Pair = 0) -> T:
    """The padding counts as zeros."""
    windows = pooling(x, kernel, stride, padding)
    share = 1 / (windows.kernel[0] * windows.kernel[1])
    padded = windows.padded(x.data)
    out = np.zeros((*x.data.shape[:-2], *windows.out), x.data.dtype)
    for _, _, rows, cols in windows.places():
        out += padded[..., rows, cols]
    out *= share
    shape = padded.shape

    def backward(g: Array) -> tuple[Array]:
        image = np.zeros(shape, g.dtype)
        for _, _, rows, cols in windows.places():
            image[..., rows, cols] += g * share
        return (windows.unpadded(image),)

    return record("avg_pool2d", out, (x,), backward)
