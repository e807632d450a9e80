"""Our Triton kernels, for devices that have Triton: packed weights are unpacked in registers as they are read."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional

from anytorch import logs
from anytorch.devices.locate import locate
from anytorch.devices.precision import capabilities
from anytorch.quant.formats import E2M1
from anytorch.quant.kernels.base import Kernel, Prepared
from anytorch.quant.tensor import QuantTensor

log = logs.logger(__name__)


def _source() -> Any:
    return import_module("anytorch.quant.kernels.triton_source")


def arguments(weight: QuantTensor, bias: torch.Tensor | None) -> tuple[list[Any], dict[str, Any]]:
    """The tensors and constants that describe a packed weight to both kernels."""
    format, parts, device = weight.format, weight.parts, weight.device
    nothing = torch.zeros(1, device=device)
    values = nothing if format.scale_table is None else torch.tensor(format.scale_table, device=device)
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
        "BYTE_SCALES": format.scale_table is not None,
        "OFFSET": format.has_offset,
        "BIAS": bias is not None,
    }
    return tensors, constants


UNROLLED = 8  # tiles in a row: more of them are a loop, which compiles in less time
ROW_GROUP = 64  # codes taken together where one scale serves a whole row


class Launcher:
    """Launches one kernel with one set of constants, after the first time without Triton's search for what to launch.

    On an H200 that search took 22 of the 34 µs of a call whose kernel takes 8. The first call takes both ways, so that
    whoever checks its answer has checked the short one; a Triton whose kernels cannot be called so refuses by the number
    of arguments, and is called the long way.
    """

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self._kernel, self._options = kernel, options
        self._short: dict[tuple[int, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], x: torch.Tensor, *arguments: Any) -> None:
        aligned = x.data_ptr() % 16 == 0  # the machine code is for addresses that are; a view's may not be
        short = self._short.get(grid) if aligned else None
        if short is not None:
            short(x, *arguments)
            return
        made = self._kernel[grid](x, *arguments, **self._options)
        if not aligned or grid in self._short:
            return
        self._short[grid] = None
        if hasattr(made, "__getitem__") and hasattr(made, "packed_metadata"):  # not in Triton's interpreter
            try:
                short = made[grid]
                short(x, *arguments)
            except (TypeError, ValueError, RuntimeError, AttributeError, SystemError) as exc:
                log.info("Triton's kernels are launched the long way: %s: %s", type(exc).__name__, exc)
            else:
                self._short[grid] = short


class FewRows(Kernel):
    """For a row of inputs, or a few: no tensor cores, and every word of the weight is read as fast as memory gives it.

    `rows` of the weight and `words` (of 32 bits, along a row) are a tile; each warp has rows / warps of them.
    """

    def __init__(self, rows: int, words: int, warps: int) -> None:
        self.rows, self.words, self.warps = rows, words, warps
        self.name = f"triton {rows}×{words}w{warps}"

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        if m > 4:
            return "for up to 4 input rows"
        if weight.parts["codes"].shape[1] % 4:
            return "reads words of four bytes"
        return _why_no_triton(weight, dtype)

    def prepare(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        tensors, constants, grid, options = self.launch(weight, bias)
        rows, values = weight.rows, tuple(constants.values())
        launcher = Launcher(_source().few_rows, options)

        def run(x: torch.Tensor) -> torch.Tensor:
            x = x.contiguous()
            out = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
            launcher((grid, x.shape[0], 1), x, *tensors, out, rows, *values)
            return out

        return Prepared(run)

    def launch(
        self, weight: QuantTensor, bias: torch.Tensor | None
    ) -> tuple[list[Any], dict[str, Any], int, dict[str, int]]:
        """The kernel's tensors, its constants in their order, how many programs, and options."""
        tensors, about = arguments(weight, bias)
        tensors[0] = tensors[0].view(torch.int32)
        whole = weight.format.group_size == 0
        group = ROW_GROUP if whole else weight.format.group_size
        words = group * weight.format.bits // 32
        row_words = tensors[0].shape[1]
        groups = -(-row_words // words)
        block = max(1, min(self.words // words, 1 << (groups - 1).bit_length()))
        constants = {
            "COLUMNS": weight.columns,
            "ROW_WORDS": row_words,
            "GROUPS": groups,
            "BITS": weight.format.bits,
            "GROUP": group,
            "WHOLE": whole,
            "SHIFT": about["SHIFT"],
            "TABLE": about["TABLE"],
            "E2M1": weight.format.table == E2M1,
            "BYTE_SCALES": about["BYTE_SCALES"],
            "OFFSET": about["OFFSET"],
            "BIAS": about["BIAS"],
            "EVEN": weight.rows % self.rows == 0 and weight.columns * weight.format.bits == 32 * row_words,
            "UNROLL": groups <= UNROLLED * block,
            "BLOCK_N": self.rows,
            "BLOCK_G": block,
        }
        return tensors, constants, -(-weight.rows // self.rows), {"num_warps": self.warps}


class ManyRows(Kernel):
    """Tiles of `rows` inputs for tensor cores."""

    def __init__(self, rows: int, columns: int, block_bytes: int, warps: int) -> None:
        self.rows, self.columns, self.block_bytes, self.warps = rows, columns, block_bytes, warps
        self.name = f"triton {rows}×{columns}"

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        return "for 4 input rows or more" if m < 4 else _why_no_triton(weight, dtype)

    def prepare(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        source = _source()
        tensors, options, blocks = self.launch(weight, bias)
        rows, columns = weight.rows, weight.columns
        groups = weight.parts["scale"].shape[1]
        precision = "ieee" if dtype == torch.float32 else "tf32"  # of no effect on 16-bit inputs

        def run(x: torch.Tensor) -> torch.Tensor:
            x = x.contiguous()
            m = x.shape[0]
            out = torch.empty(m, rows, dtype=x.dtype, device=x.device)
            source.many_rows[blocks, -(-m // self.rows)](
                x, *tensors, out, m, rows, columns, groups, BLOCK_M=self.rows, PRECISION=precision, **options
            )
            return out

        return Prepared(run)

    def launch(self, weight: QuantTensor, bias: torch.Tensor | None) -> tuple[list[Any], dict[str, Any], int]:
        """The kernel's tensors, its options, and how many programs stand side by side."""
        tensors, constants = arguments(weight, bias)
        options = {**constants, "BLOCK_N": self.columns, "BLOCK_B": self.block_bytes, "num_warps": self.warps}
        return tensors, options, -(-weight.rows // self.columns)


class UnpackFirst(Kernel):
    """The weight unpacked in one pass of our own, then the device's ordinary product: for thousands of input rows."""

    name = "triton unpack, then multiply"
    rows, bytes_, warps = 8, 256, 4

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        return "for 64 input rows or more" if m < 64 else _why_no_triton(weight, dtype)

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        kernel = _source().unpack_weight
        tensors, constants = arguments(weight, None)
        del constants["BIAS"]
        rows, columns, groups = weight.rows, weight.columns, weight.parts["scale"].shape[1]
        grid = (-(-rows // self.rows), -(-constants["ROW_BYTES"] // self.bytes_))
        options = {**constants, "BLOCK_N": self.rows, "BLOCK_B": self.bytes_, "num_warps": self.warps}

        def run(x: torch.Tensor) -> torch.Tensor:
            full = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
            kernel[grid](*tensors[:6], full, rows, columns, groups, **options)
            return functional.linear(x, full, bias)

        return Prepared(run)


def _why_no_triton(weight: QuantTensor, dtype: torch.dtype) -> str:
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"computes in float32, the inputs are {dtype}"
    backend, index = locate(weight.device)
    if not capabilities(backend.name, index).triton:
        return "the device has no Triton"
    return "" if find_spec("triton") is not None else "triton is not installed"


KERNELS = (
    FewRows(8, 512, 4),
    FewRows(16, 256, 4),
    ManyRows(16, 32, 64, 4),
    ManyRows(64, 64, 64, 4),
    ManyRows(128, 128, 32, 8),
    UnpackFirst(),
)
