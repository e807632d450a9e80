"""Our Triton kernels, for devices that have Triton: packed weights are unpacked in registers as they are read."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from anytorch.devices.locate import locate
from anytorch.devices.precision import capabilities
from anytorch.quant.formats import e4m3_values, e8m0_values
from anytorch.quant.kernels.base import Prepared
from anytorch.quant.tensor import QuantTensor


def _source() -> Any:
    from importlib import import_module

    return import_module("anytorch.quant.kernels.triton_source")


def arguments(weight: QuantTensor, bias: torch.Tensor | None) -> tuple[list[Any], dict[str, Any]]:
    """The tensors and constants that describe a packed weight to both kernels."""
    format, parts, device = weight.format, weight.parts, weight.device
    nothing = torch.zeros(1, device=device)
    bytes_as = {"e4m3": e4m3_values, "e8m0": e8m0_values}.get(format.scale_type)
    values = torch.tensor(bytes_as(), device=device) if bytes_as else nothing
    table = nothing if format.table is None else torch.tensor(format.table, device=device)
    unit = parts.get("tensor_scale", torch.ones((), device=device)).reshape(1)
    tensors = [parts["codes"], parts["scale"], parts.get("offset", nothing), values, table, unit]
    tensors.append(nothing if bias is None else bias.detach().contiguous())
    constants = {
        "ROW_BYTES": parts["codes"].shape[1],
        "BITS": format.bits,
        "GROUP": format.group_size,
        "SHIFT": 0.0 if format.table or format.bits == 8 or not format.symmetric else float(2 ** (format.bits - 1)),
        "TABLE": format.table is not None,
        "BYTE_SCALES": bytes_as is not None,
        "OFFSET": format.has_offset,
        "BIAS": bias is not None,
    }
    return tensors, constants


class TritonKernel:
    """`rows` is 0 for the kernel without tensor cores (a few input rows), else its tile's height."""

    def __init__(self, rows: int, columns: int, block_bytes: int, warps: int) -> None:
        self.rows, self.columns, self.block_bytes, self.warps = rows, columns, block_bytes, warps
        self.name = f"triton {rows or 1}×{columns}"
        # Each output is summed in the same order whatever the batch, as long as the same kernel computes it.
        self.batch_invariant = False

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"computes in float32, the inputs are {dtype}"
        if self.rows == 0 and m > 16:
            return "for up to 16 input rows"
        if self.rows and m < 4:
            return "for 4 input rows or more"
        backend, index = locate(weight.device)
        if not capabilities(backend.name, index).triton:
            return "the device has no Triton"
        return "" if find_spec("triton") is not None else "triton is not installed"

    def prepare(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        source = _source()
        tensors, constants = arguments(weight, bias)
        rows, columns = weight.rows, weight.columns
        groups = weight.parts["scale"].shape[1]
        blocks = -(-rows // self.columns)
        options = {**constants, "BLOCK_N": self.columns, "BLOCK_B": self.block_bytes, "num_warps": self.warps}
        precision = "ieee" if dtype == torch.float32 else "tf32"  # of no effect on 16-bit inputs

        def run(x: torch.Tensor) -> torch.Tensor:
            x = x.contiguous()
            m = x.shape[0]
            out = torch.empty(m, rows, dtype=x.dtype, device=x.device)
            if self.rows == 0:
                source.few_rows[(blocks, m)](x, *tensors, out, rows, columns, groups, **options)
            else:
                grid = (blocks, -(-m // self.rows))
                source.many_rows[grid](
                    x, *tensors, out, m, rows, columns, groups,
                    BLOCK_M=self.rows, PRECISION=precision, **options,
                )  # fmt: skip
            return out

        return Prepared(run)


KERNELS = (
    TritonKernel(0, 8, 256, 4),
    TritonKernel(0, 32, 64, 4),
    TritonKernel(16, 32, 64, 4),
    TritonKernel(64, 64, 64, 4),
    TritonKernel(128, 128, 32, 8),
)
