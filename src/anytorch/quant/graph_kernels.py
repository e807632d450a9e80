"""The packed linear layers' kernels for int8 as candidates for kernel graphs: C++ on the CPU, Triton elsewhere.

A graph says x @ (codes * scale)ᵀ in ordinary ops. Formats whose codes share bytes (int4, int2, fp4) have no form there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from anytorch.errors import OutOfMemory
from anytorch.graph.handwritten import Handwritten, Launch, register
from anytorch.graph.ops import FLOATS
from anytorch.graph.patterns import Match, int8_linear
from anytorch.quant.formats import parse
from anytorch.quant.kernels import cpp
from anytorch.quant.kernels.triton import FewRows, ManyRows
from anytorch.quant.tensor import QuantTensor

SMALLEST_GROUP = 16


def _group(match: Match, known: Mapping[str, int]) -> int:
    """Columns that share a scale; 0: all of a row, -1: not the scales of such a weight."""
    rows, columns = match.shape("codes", known)
    scale = match.shape("scale", known)
    if "after" in match:
        return 0 if scale in ((rows,), (1, rows)) else -1
    if "grouped" not in match:
        return 0 if scale == (rows, 1) else -1
    groups = match.shape("groups", known)
    whole = match.shape("grouped", known) == (rows, columns)
    if not whole or len(groups) != 3 or groups[0] != rows or scale != (rows, groups[1], 1):
        return -1
    return groups[2]


def why_no_weight(match: Match, known: Mapping[str, int]) -> str:
    """Why this is no packed weight with inputs that the kernels take; "" if it is."""
    x, codes = match.shape("x", known), match.shape("codes", known)
    if match["codes"].dtype != "int8" or len(codes) != 2:
        return "the codes are not bytes"
    group = _group(match, known)
    if group < 0 or 0 < group < SMALLEST_GROUP or (group and codes[1] % group):
        return f"scales are one per row, or per group of {SMALLEST_GROUP} columns or more"
    if match["x"].dtype != match.result.dtype or match["x"].dtype not in FLOATS or match["x"].dtype == "float64":
        return "inputs and results are floats of one dtype, 16 or 32 bits wide"
    if match["scale"].dtype not in FLOATS or ("bias" in match and match.shape("bias", known) != codes[:1]):
        return "scales are floats, and a bias one number per row of the weight"
    return "" if torch.Size(x).numel() and torch.Size(codes).numel() else "there is nothing to compute"


def packed(codes: torch.Tensor, scale: torch.Tensor, group: int) -> QuantTensor:
    format = replace(parse("int8"), group_size=group)
    parts = {"codes": codes, "scale": scale.to(torch.float32).reshape(codes.shape[0], -1)}
    return QuantTensor(format, tuple(codes.shape), torch.float32, parts)


def _example(match: Match, known: Mapping[str, int], device: torch.device) -> QuantTensor:
    """A weight of the match's sizes, of which only these count."""
    shape = match.shape("codes", known)
    group = _group(match, known)
    scale = torch.empty(shape[0], shape[1] // group if group else 1, device=device)
    return packed(torch.empty(shape, dtype=torch.int8, device=device), scale, group)


def _rows(match: Match, known: Mapping[str, int]) -> int:
    return torch.Size(match.shape("x", known)[:-1]).numel()


def _read(match: Match) -> tuple[int, int, int, int | None]:
    """The places of x, codes, scale and bias."""
    x, codes, scale = (match.place(name) for name in ("x", "codes", "scale"))
    return x, codes, scale, match.place("bias") if "bias" in match else None


# --- C++ ---------------------------------------------------------------------------------------------------------------


def why_no_cpp(match: Match, known: Mapping[str, int], device: torch.device, *, kernel: cpp.CppKernel) -> str:
    reason = why_no_weight(match, known)
    if reason or device.type != "cpu":
        return reason or "it is for the CPU"
    return kernel.why_not(_example(match, known, device), torch.float32, _rows(match, known))


def prepare_cpp(match: Match, known: Mapping[str, int], device: torch.device, *, kernel: cpp.CppKernel) -> Launch:
    call, group, m = cpp.library().quant_linear, _group(match, known), _rows(match, known)
    x_at, codes_at, scale_at, bias_at = _read(match)

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        described, held = cpp.describe(packed(tensors[codes_at], tensors[scale_at], group))
        x = tensors[x_at].to(torch.float32)
        bias = None if bias_at is None else tensors[bias_at].to(torch.float32)
        made = out if out.dtype == torch.float32 else torch.empty(out.shape)
        address = None if bias is None else bias.data_ptr()
        if call(ctypes.byref(described), x.data_ptr(), m, address, made.data_ptr(), kernel.kind):
            raise OutOfMemory(f"no memory to multiply {m} rows by packed ones", hint="free host memory")
        del held  # until here the library reads them
        if made is not out:
            out.copy_(made)

    return run


# --- Triton ------------------------------------------------------------------------------------------------------------


def why_no_triton(match: Match, known: Mapping[str, int], device: torch.device, *, few: bool) -> str:
    if reason := why_no_weight(match, known):
        return reason
    if match["scale"].dtype != "float32":
        return "it reads scales as float32"
    columns, m = match.shape("codes", known)[1], _rows(match, known)
    if (few and (m > 4 or columns % 4)) or (not few and m < 4):
        return "for up to 4 rows in words of four bytes" if few else "for 4 rows or more"
    return "" if find_spec("triton") is not None else "triton is not installed"


def prepare_few(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
    tensors, constants, grid, options = FewRows(8, 512, 4).launch(_example(match, known, device), None)
    rows, m = match.shape("codes", known)[0], _rows(match, known)
    x_at, codes_at, scale_at, bias_at = _read(match)
    constants["BIAS"] = bias_at is not None
    values = tuple(constants.values())
    kernel: Any = import_module("anytorch.quant.kernels.triton_source").few_rows

    def run(given: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        bias = tensors[-1] if bias_at is None else given[bias_at]
        bound = (given[codes_at].view(torch.int32), given[scale_at], *tensors[2:-1], bias)
        kernel[grid, m, 1](given[x_at], *bound, out, rows, *values, **options)

    return run


def prepare_many(match: Match, known: Mapping[str, int], device: torch.device, *, kernel: ManyRows) -> Launch:
    tensors, options, blocks = kernel.launch(_example(match, known, device), None)
    (rows, columns), m = match.shape("codes", known), _rows(match, known)
    x_at, codes_at, scale_at, bias_at = _read(match)
    options |= {"BIAS": bias_at is not None, "BLOCK_M": kernel.rows}
    options["PRECISION"] = "ieee" if match["x"].dtype == "float32" else "tf32"
    groups = columns // (_group(match, known) or columns)
    source: Any = import_module("anytorch.quant.kernels.triton_source").many_rows

    def run(given: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        bias = tensors[-1] if bias_at is None else given[bias_at]
        bound = (given[codes_at], given[scale_at], *tensors[2:-1], bias)
        source[blocks, -(-m // kernel.rows)](given[x_at], *bound, out, m, rows, columns, groups, **options)

    return run


def _entry(name: str, source: str, back: str, why_not: Any, prepare: Any) -> Handwritten:
    return Handwritten(name, "int8 linear", source, back, int8_linear(), why_not, prepare)


SOURCE = "quant/kernels/triton_source.py"
register(
    *(
        _entry(
            f"packed {kernel.name.removeprefix('cpp ')} (C++)",
            "quant/cpp/linear.cpp",
            "cpp",
            partial(why_no_cpp, kernel=kernel),
            partial(prepare_cpp, kernel=kernel),
        )
        for kernel in cpp.KERNELS
    ),
    _entry("packed few rows (Triton)", SOURCE, "triton", partial(why_no_triton, few=True), prepare_few),
    *(
        _entry(
            f"packed {kernel.rows} rows (Triton)",
            SOURCE,
            "triton",
            partial(why_no_triton, few=False),
            partial(prepare_many, kernel=kernel),
        )
        for kernel in (ManyRows(16, 32, 64, 4), ManyRows(64, 64, 64, 4))
    ),
)
