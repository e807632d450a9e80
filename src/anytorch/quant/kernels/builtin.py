"""torch's own kernels for packed weights. They are private, differ between releases and devices, and round inputs to
bfloat16: so each is tried, checked and timed like any other."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from anytorch.quant.kernels.base import Kernel, Prepared, nbytes_of
from anytorch.quant.rounding import scale_values
from anytorch.quant.tensor import QuantTensor, to_groups


def _operator(name: str) -> Any:
    return getattr(torch, name, None)


def _with_bias(out: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    out = out.to(dtype)
    return out if bias is None else out.add_(bias)


def _whole_row_int8(weight: QuantTensor) -> str:
    format = weight.format
    return "" if format.bits == 8 and format.group_size == 0 else "for int8 with one scale per row"


class Int8Pack(Kernel):
    """`torch._weight_int8pack_mm`: int8 weights as they are, inputs in bfloat16, or left in their dtype for devices whose
    operator takes float32 and loses nothing."""

    def __init__(self, name: str, *, rounds_inputs: bool) -> None:
        self.name, self.rounds_inputs = name, rounds_inputs

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        if not self.rounds_inputs and weight.device.type == "cpu":
            return "the CPU's operator is scalar for float32"
        if _operator("_weight_int8pack_mm") is None:
            return "this torch has no _weight_int8pack_mm"
        if weight.columns % 64 or weight.rows % 16:
            return "crashes the process on sizes that are no multiples (torch 2.13, AVX-512, 200 columns)"
        return _whole_row_int8(weight)

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        call, inside = _operator("_weight_int8pack_mm"), torch.bfloat16 if self.rounds_inputs else dtype
        codes, scale = weight.parts["codes"], weight.parts["scale"].flatten().to(inside)
        return Prepared(lambda x: _with_bias(call(x.to(inside), codes, scale), bias, x.dtype), nbytes_of(scale))


class Int4Pack(Kernel):
    """`torch._weight_int4pack_mm…`: the weight in a layout of torch's own, a second copy of it."""

    name = "torch int4pack"
    rounds_inputs = True

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        suffix = "_for_cpu" if weight.device.type == "cpu" else ""
        if _operator(f"_weight_int4pack_mm{suffix}") is None:
            return "this torch has no _weight_int4pack_mm"
        format = weight.format
        if format.family != "int4" or format.group_size not in (32, 64, 128, 256):
            return "for int4 in groups of 32 to 256"
        if weight.rows % 16 or weight.columns % format.group_size or weight.columns % 16:
            return "needs rows in sixteens and whole groups"
        return ""

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        codes = to_groups(weight).codes.reshape(weight.rows, weight.columns)
        both = _scale_and_zero(weight).bfloat16()
        size = weight.format.group_size
        if weight.device.type == "cpu":
            packed = _operator("_convert_weight_to_int4pack_for_cpu")(codes.to(torch.int32), 1)
            call = _operator("_weight_int4pack_mm_for_cpu")
        else:
            tiles = 8 if weight.columns % 128 == 0 else 4 if weight.columns % 64 == 0 else 2
            high_first = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
            packed = _operator("_convert_weight_to_int4pack")(high_first, tiles)
            call = _operator("_weight_int4pack_mm")
        return Prepared(
            lambda x: _with_bias(call(x.bfloat16().contiguous(), packed, size, both), bias, x.dtype),
            nbytes_of(packed, both),
        )


class Int4Words(Kernel):
    """`torch._weight_int4pack_mm` on devices whose packed words run along a row, lowest bits first (the webgpu device's
    do): our codes are those words already, so nothing is copied. Elsewhere the operator refuses or the check does."""

    name = "device int4"

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        if weight.device.type == "cpu":
            return "for accelerators"
        format = weight.format
        if format.family != "int4":
            return "for int4"
        if weight.columns % format.group_size or weight.columns % 32 or weight.rows % 8:
            return "needs rows in eights and whole groups"
        return ""

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        both = _scale_and_zero(weight).to(dtype)
        words = weight.parts["codes"].view(torch.int32).reshape(weight.rows // 8, weight.columns // 32, 32, 1)
        call, size = _operator("_weight_int4pack_mm"), weight.format.group_size
        return Prepared(lambda x: _with_bias(call(x.contiguous(), words, size, both), bias, x.dtype), nbytes_of(both))


def _scale_and_zero(weight: QuantTensor) -> torch.Tensor:
    """Groups × rows × 2, for torch's formula (code − 8)·scale + zero."""
    unit = weight.parts["tensor_scale"]
    scale = scale_values(weight.parts["scale"], weight.format) * unit
    offset = weight.parts.get("offset")
    zero = torch.zeros_like(scale) if offset is None else scale * 8 + offset.float() * unit
    return torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous()


class Int8Columns(Kernel):
    """The integers cast to the inputs' dtype and multiplied, the row's scale applied to the result. Needs no unpacking
    arithmetic, and one cast weight at a time."""

    name = "torch cast int8"

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        return _whole_row_int8(weight)

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        codes, scale = weight.parts["codes"], weight.parts["scale"].flatten().to(dtype)
        return Prepared(
            lambda x: _with_bias(functional.linear(x, codes.to(x.dtype)) * scale, bias, x.dtype), nbytes_of(scale)
        )


class Int8Dynamic(Kernel):
    """`torch._int_mm` (oneDNN on the CPU, cuBLASLt on NVIDIA): inputs rounded to int8 too, with one scale per row, so
    that a row's result does not depend on its neighbours."""

    name = "torch int8 × int8"
    batch_invariant = True

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        if weight.format.activations != "int8":
            return "rounds inputs to int8, which the format does not ask for"
        if _operator("_int_mm") is None:
            return "this torch has no _int_mm"
        if m <= 16 and weight.device.type != "cpu":
            return "needs more than 16 input rows"
        return _whole_row_int8(weight)

    def prepare(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        call = _operator("_int_mm")
        turned = weight.parts["codes"].t()
        scale = weight.parts["scale"].flatten()
        cast = None if bias is None else bias.detach().float()

        def run(x: torch.Tensor) -> torch.Tensor:
            x32 = x.float()
            step = x32.abs().amax(dim=1, keepdim=True).div_(127).clamp_(min=1e-30)
            products = call((x32 / step).round_().to(torch.int8), turned)
            out: torch.Tensor = products.float().mul_(scale).mul_(step)
            return (out if cast is None else out.add_(cast)).to(x.dtype)

        return Prepared(run)


KERNELS = (
    Int8Pack("torch int8pack", rounds_inputs=True),
    Int8Pack("device int8", rounds_inputs=False),
    Int4Pack(),
    Int4Words(),
    Int8Columns(),
    Int8Dynamic(),
)
