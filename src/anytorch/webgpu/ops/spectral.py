"""Fourier transforms by our own kernels: any length whose prime factors are small, of complex64 and float32.

One pass per factor (Stockham's way: no bit reversal, results in order), a thread per element of the result. A pass turns
transforms of `length` points into ones of `length * radix` points; point k of them stands at `k * width + p`, where `p` says
which of the `width` transforms it is. The roots of one come from a table made in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.plans import plans
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel
from anytorch.webgpu.ops.complexes import conjugate, joined
from anytorch.webgpu.per_element import per_element
from anytorch.webgpu.tensors import NAME, new_contiguous

LARGEST_FACTOR = 128  # a pass costs as many products per element
RADICES = (8, 4, 2, 3, 5, 7)
LONGEST = 1 << 24

PASS = """  let place = i % p.size; let k = place / p.width; let from_ = i - place + (k % p.length) * (p.width * p.radix);
  let column = place % p.width;
  var even = vec2<f32>(); var odd = vec2<f32>();  // halves of the sum, whose errors are smaller
  for (var u = 0u; u < p.radix; u++) {
    let s = (from_ + column + u * p.width) * 2u; let t = ((u * k * p.width) % p.size) * 2u;
    let xr = load_x(s); let xi = load_x(s + 1u); let wr = load_w(t); let wi = load_w(t + 1u) * p.sign;
    let term = vec2<f32>(xr * wr - xi * wi, xr * wi + xi * wr);
    if ((u & 1u) == 0u) { even += term; } else { odd += term; }
  }
  let sum = (even + odd) * p.scale;
  store_y(2u * i, sum.x); store_y(2u * i + 1u, sum.y);"""


def factors(n: int) -> list[int]:
    """Radices whose product is n. NoKernel where one would be too large."""
    found = []
    for radix in RADICES:
        while n % radix == 0:
            found.append(radix)
            n //= radix
    divisor = 11
    while n > 1:
        if divisor * divisor > n:
            divisor = n
        if n % divisor:
            divisor += 2
            continue
        if divisor > LARGEST_FACTOR:
            raise NoKernel
        found.append(divisor)
        n //= divisor
    return found


def _roots(n: int) -> torch.Tensor:
    """exp(-2πi k / n) for every k, as pairs of numbers."""
    key = ("roots of one", n)
    known: torch.Tensor | None = plans[key]
    if known is None:
        angles = torch.arange(n, dtype=torch.float64) * (-2 * math.pi / n)
        known = plans[key] = torch.stack((angles.cos(), angles.sin()), 1).float().to(NAME)
    return known


def transformed(x: torch.Tensor, dim: int, forward: bool, scale: float = 1.0) -> torch.Tensor:
    """The transform of a complex64 tensor along one dimension."""
    n = x.size(dim)
    if not 0 < n <= LONGEST or x.dtype is not torch.complex64 or 2 * x.numel() >= 1 << 31:
        raise NoKernel
    radices = factors(n)
    moved = x.movedim(dim, -1).resolve_conj().contiguous()
    if not x.numel():
        return moved.movedim(-1, dim)
    source, length = torch.view_as_real(moved), 1
    for number, radix in enumerate(radices or [1]):
        result = new_contiguous(source.shape, torch.float32)
        last = number >= len(radices) - 1
        numbers = [
            ("size", "u32", n),
            ("length", "u32", length),
            ("radix", "u32", radix),
            ("width", "u32", n // (length * radix)),
            ("sign", "f32", 1.0 if forward else -1.0),
            ("scale", "f32", scale if last else 1.0),
        ]
        per_element([("x", source), ("w", _roots(n))], [("y", result)], numbers, moved.numel(), PASS)
        source, length = result, length * radix
    return torch.view_as_complex(source).movedim(-1, dim)


NONE, BY_ROOT, BY_N = 0, 1, 2  # normalizations


def _scale(normalization: int, sizes: Sequence[int]) -> float:
    whole = math.prod(sizes)
    return 1.0 if normalization == NONE else 1 / math.sqrt(whole) if normalization == BY_ROOT else 1 / whole


def c2c(x: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    if not dim:
        return x.clone()
    for number, d in enumerate(dim):
        scale = _scale(normalization, [x.size(each) for each in dim]) if number == len(dim) - 1 else 1.0
        x = transformed(x, d, forward, scale)
    return x


def r2c(x: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise NoKernel
    scale = _scale(normalization, [x.size(each) for each in dim])
    last = dim[-1]
    made = transformed(joined(x, 0.0), last, True, scale)
    if onesided:
        made = made.narrow(last, 0, x.size(last) // 2 + 1).contiguous()
    for d in dim[:-1]:
        made = transformed(made, d, True)
    return made


def c2r(x: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> torch.Tensor:
    if x.dtype is not torch.complex64 or last_dim_size < 1:
        raise NoKernel
    last = dim[-1]
    if x.size(last) < last_dim_size // 2 + 1:
        raise NoKernel
    sizes = [*[x.size(d) for d in dim[:-1]], last_dim_size]
    for d in dim[:-1]:
        x = transformed(x, d, False)
    half = x.narrow(last, 0, last_dim_size // 2 + 1)
    # The rest is the conjugate of what is there, backwards.
    mirrored = last_dim_size - half.size(last)
    if mirrored:
        pair = torch.view_as_real(conjugate(half.narrow(last, 1, mirrored)))
        back = torch.view_as_complex(pair.flip(last % x.dim()).contiguous())
        half = torch.cat((half, back), last)
    whole = transformed(half, last, False, _scale(normalization, sizes))
    return torch.view_as_real(whole.contiguous())[..., 0].contiguous()


KERNELS: dict[str, Callable[..., Any]] = {"_fft_c2c": c2c, "_fft_r2c": r2c, "_fft_c2r": c2r}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
