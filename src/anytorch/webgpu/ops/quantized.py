"""Linear layers whose weights stay 8- or 4-bit integers on the device and are unpacked as they are read."""

from __future__ import annotations

import torch

from anytorch.gpu.buffers import OFFSET_MASK
from anytorch.gpu.launch import Plan
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.matmul import render
from anytorch.gpu.wgsl.quantized import Quantized, quantized
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import FLOATS, computable, name_of, word_dtype
from anytorch.webgpu.launch import check_devices
from anytorch.webgpu.products import schedule_grid
from anytorch.webgpu.tensors import KEY, NAME, buffer_of, new_contiguous
from anytorch.webgpu.tuning import Shape, offered


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bits: int,
    n: int,
    group: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product, in `out` if that is given; what it is then must have whole words, as float32 has."""
    check_devices("a quantized linear layer", x, weight, scales)
    m, k = x.shape
    if x.dtype not in FLOATS or not computable(x.dtype, scales.dtype):
        raise RuntimeError(f"webgpu: quantized weights multiply float32, float16 or bfloat16, not {x.dtype}")
    if k % (8 if bits == 4 else 4):
        raise RuntimeError(
            f"webgpu: quantized weights need an input size that is a multiple of 8 (4 for int8), not {k}"
        )
    result = new_contiguous((m, n), word_dtype(x.dtype)) if out is None else out
    if result.numel() == 0:
        return narrowed(result, x.dtype)
    bound = (contiguous(x), contiguous(weight), contiguous(scales), result)
    address = bound[0].data_ptr()
    key = ("quantized", bits, m, n, k, group, x.dtype, scales.dtype, address & 15)
    plan = plans[key]
    if plan is None:
        aligned = (address & OFFSET_MASK) // x.dtype.itemsize % 4 == 0
        spec = Quantized(bits, name_of(x.dtype), name_of(scales.dtype), name_of(result.dtype), group, aligned)
        schedule = offered(open_runtime(), Shape(1, m, n, k, "k"))[0].schedule
        numbers, groups = schedule_grid(schedule, 1, m, n, k, 1)
        places = [tensor.dtype.itemsize for tensor in bound]
        plan = plans[key] = Plan(
            (spec, schedule),
            lambda kernel: render(quantized(kernel[0]), kernel[1]),
            groups,
            places,
            0b1000,
            tail=(*numbers, k, n),
        )
    plan([tensor.data_ptr() for tensor in bound])
    return narrowed(result, x.dtype)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """aten::_weight_int8pack_mm: x [m, k] times int8 weight [n, k] transposed, times scales [n]."""
    if weight.dim() != 2 or weight.dtype is not torch.int8 or weight.shape[1] != x.shape[1]:
        raise RuntimeError(f"expected an int8 weight of [n, {x.shape[1]}], got {weight.dtype} {tuple(weight.shape)}")
    if buffer_of(weight)[1] % 4:
        weight = weight.clone()
    return _product(x, weight, scales, 8, weight.shape[0], 0, out)


def pack_int4(weight: torch.Tensor, inner_k_tiles: int) -> torch.Tensor:
    """aten::_convert_weight_to_int4pack: uint8 [n, k / 2], the even k in the high nibble, to words in this device's order.

    The result has the shape torch gives it; its words run along k, row by row.
    """
    n, half = weight.shape
    host = weight.cpu()
    nibbles = torch.stack((host >> 4, host & 15), 2).reshape(n, half // 4, 8).to(torch.int64)
    words = (nibbles << torch.arange(0, 32, 4)).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    shape = (n // 8, half * 2 // (inner_k_tiles * 16), 32, inner_k_tiles // 2)
    return words.reshape(shape).to(NAME)


def int4_linear(x: torch.Tensor, weight: torch.Tensor, group: int, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    """aten::_weight_int4pack_mm: x [m, k] times the weight `pack_int4` made; scales and zeros are [k / group, n, 2]."""
    n = scales_and_zeros.shape[1]
    if weight.numel() * 8 != n * x.shape[1]:
        raise RuntimeError(f"a packed weight of {weight.numel()} words does not hold {n} x {x.shape[1]} nibbles")
    return _product(x, weight, scales_and_zeros, 4, n, group)


def register(library: torch.library.Library) -> None:
    library.impl("_weight_int8pack_mm", lambda x, weight, scales: int8_linear(x, weight, scales), KEY)
    library.impl("_weight_int4pack_mm", int4_linear, KEY)
    library.impl("_convert_weight_to_int4pack", pack_int4, KEY)
