"""bitsandbytes and torchao, where they are installed. Both are optional, and slow to import: only `prefer="speed"` asks."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from anytorch import logs
from anytorch.quant.kernels.base import Kernel, Prepared, nbytes_of
from anytorch.quant.tensor import QuantTensor, linear_of, unpack


@cache
def _import(name: str) -> Any:
    """The module, or the reason (a str) why it cannot be used."""
    if find_spec(name.partition(".")[0]) is None:
        return f"{name.partition('.')[0]} is not installed"
    try:
        with logs.warnings_unheard(), logs.asides_unheard():  # about what else they could do on other machines
            return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as exc:  # built for another torch, or for a driver that is not here
        return f"{name} cannot be imported: {exc}"


@cache
def installed(name: str) -> str:
    """What is installed of a library: "bitsandbytes 0.49.0", "no torchao"; without importing it."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


class BitsAndBytes(Kernel):
    name = "bitsandbytes"

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        format = weight.format
        if format.family not in ("nf4", "bnb-fp4"):
            return "for nf4 and bnb-fp4"
        if weight.columns % format.group_size:
            return "its groups run across rows, and a row has no whole number of them"
        module = _import("bitsandbytes.functional")
        return module if isinstance(module, str) else ""

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        functional, package = _import("bitsandbytes.functional"), _import("bitsandbytes")
        kind = "nf4" if weight.format.family == "nf4" else "fp4"
        codes = weight.parts["codes"]
        swapped = (codes << 4 | codes >> 4).reshape(-1, 1)  # they put the first of two in the high bits
        state = functional.QuantState(
            absmax=weight.parts["scale"].flatten(),
            shape=torch.Size((weight.rows, weight.columns)),
            code=functional.get_4bit_type(kind, device=codes.device),
            blocksize=weight.format.group_size,
            quant_type=kind,
            dtype=dtype,
        )

        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                out: torch.Tensor = package.matmul_4bit(x, swapped.t(), quant_state=state, bias=bias)
            return out

        return Prepared(run, nbytes_of(swapped))


class TorchAo(Kernel):
    """torchao's int8 weight-only layer. It rounds the unpacked weight again; the check against the reference says
    whether that came out the same."""

    name = "torchao"

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        if weight.format.bits != 8 or weight.format.group_size:
            return "for int8 with one scale per row"
        module = _import("torchao.quantization")
        return module if isinstance(module, str) else ""

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        module = _import("torchao.quantization")
        layer = linear_of(unpack(weight, dtype).reshape(weight.rows, weight.columns), bias, trained=False)
        with logs.warnings_unheard():
            module.quantize_(layer, module.Int8WeightOnlyConfig())
        return Prepared(layer.forward, weight.rows * weight.columns + weight.rows * 4)


KERNELS = (BitsAndBytes(), TorchAo())
