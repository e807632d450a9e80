"""The windows of an image that a kernel sees: sizes, padding, and which rows and columns each place of the kernel meets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.dtypes import Array

Pair = int | tuple[int, int]


def pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


@dataclass(frozen=True)
class Windows:
    """The windows of an image of (height, width)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    image: tuple[int, int]

    @property
    def geometry(self) -> tuple[tuple[int, int], ...]:
        return self.kernel, self.stride, self.padding, self.dilation

    @cached_property
    def out(self) -> tuple[int, int]:
        if min(*self.kernel, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            kernel, stride, padding, dilation = self.geometry
            raise UsageError(
                f"invalid window: kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation}"
            )
        sizes = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(self.image, *self.geometry, strict=True)
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
