"""Our C++ kernels for the CPU: packed weights times 16-bit inputs, without unpacking the weight in memory.

The library comes from `anytorch.native`. It computes on the threads of torch's own OpenMP where that is GCC's, which we find
and hand over as addresses; elsewhere on one thread.
"""

from __future__ import annotations

import ctypes
import math
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from anytorch import native, settings
from anytorch.errors import NativeUnavailable, OutOfMemory
from anytorch.quant.formats import Format
from anytorch.quant.kernels.base import Kernel, Prepared
from anytorch.quant.tensor import QuantTensor

SOURCE = Path(__file__).parent.parent / "cpp" / "linear.cpp"
WHOLE_ROW_GROUP = 128  # columns added up in 32 bits where one scale serves a whole row; rows are padded to whole ones
INT16_MAX = 32767
DOT, PANEL = 0, 1
NO_DOT, NO_MEMORY = 1, 2  # what a call returns; mirrors cpp/linear.cpp


class _Weight(ctypes.Structure):  # mirrors `struct Weight` of cpp/linear.cpp
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "offset", "scale_values", "table", "values")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "row_bytes", "stored_groups", "group", "group_size")),
        *((name, ctypes.c_int32) for name in ("bits", "scale_kind", "x_top")),
        *((name, ctypes.c_float) for name in ("unit", "tensor_scale")),
    )


OPENMP = ("omp_get_max_threads", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier", "GOMP_parallel")


class _OpenMP(ctypes.Structure):  # mirrors `struct OpenMP` of cpp/linear.cpp
    _fields_ = tuple((name, ctypes.c_void_p) for name in OPENMP)


@lru_cache(maxsize=8)
def _library(cache: Path, level: str | None) -> Any:
    """The compiled library. Keyed by what decides which file it is, so that a changed setting is noticed."""
    library = native.load("quant", [SOURCE], level=level)
    library.quant_use_openmp.argtypes = [ctypes.POINTER(_OpenMP)]
    library.quant_use_openmp.restype = None
    library.quant_use_openmp(ctypes.byref(_openmp_of_torch()))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.quant_linear.argtypes = [pointer, pointer, integer, pointer, pointer, ctypes.c_int]
    library.quant_linear.restype = ctypes.c_int
    library.quant_unpack.argtypes = [pointer, integer, integer, pointer]
    library.quant_unpack.restype = ctypes.c_int
    library.dot_split_of.argtypes = [pointer]
    library.dot_split_of.restype = ctypes.c_int
    return library


def library() -> Any:
    """The compiled library; raises NativeUnavailable."""
    return _library(settings.cache_folder(), settings.get("simd"))


@lru_cache(maxsize=8)
def _trouble(cache: Path, level: str | None) -> str:
    try:
        _library(cache, level)
    except NativeUnavailable as exc:
        return exc.message.splitlines()[0]
    return ""


def _openmp_of_torch() -> _OpenMP:
    """The functions of torch's own OpenMP; null pointers where it has none of GCC's, and one thread computes."""
    if sys.platform != "linux":
        return _OpenMP()
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        runtime = ctypes.CDLL(str(path))  # torch has loaded it: this is another name for the same one
        return _OpenMP(*(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in OPENMP))
    return _OpenMP()


@lru_cache(maxsize=32)
def _tables(format: Format) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float, int, int]:
    """Integers and exact values of the codes, the scales' values, what an integer step is worth, the columns added up at
    a time, and the largest integer an input may become without overflowing 32 bits."""
    group = format.group_size or WHOLE_ROW_GROUP
    scales = None if format.scale_table is None else torch.tensor(format.scale_table, dtype=torch.float32)
    if format.bits == 8:
        return None, None, scales, 1.0, group, INT16_MAX
    if format.table is None:
        low = 2 ** (format.bits - 1) if format.symmetric else 0
        exact = torch.arange(2**format.bits, dtype=torch.float32) - low
        top, unit = int(exact.abs().max()), 1.0
    else:
        exact = torch.tensor(format.table, dtype=torch.float32)
        if format.family in ("nvfp4", "mxfp4"):
            top, unit = 12, 0.5  # every E2M1 number is a multiple of a half
        else:
            # The table has real numbers: weights and inputs share the bits that 32 leave for one group's sum.
            top = min(INT16_MAX, math.isqrt((2**31 - 1) // group))
            unit = 1.0 / top
    integers = (exact / unit).round().to(torch.int16)
    return integers, exact, scales, unit, group, min(INT16_MAX, (2**31 - 1) // (top * group))


def describe(weight: QuantTensor) -> tuple[_Weight, tuple[Any, ...]]:
    """The C view of a packed weight on the CPU, and what must live as long as it."""
    parts = {name: part.contiguous() for name, part in weight.parts.items()}
    integers, exact, scales, unit, group, x_top = _tables(weight.format)
    format = weight.format
    described = _Weight(
        codes=parts["codes"].data_ptr(),
        scale=parts["scale"].data_ptr(),
        offset=parts["offset"].data_ptr() if "offset" in parts else None,
        scale_values=None if scales is None else scales.data_ptr(),
        table=None if integers is None else integers.data_ptr(),
        values=None if exact is None else exact.data_ptr(),
        rows=weight.rows,
        columns=weight.columns,
        row_bytes=parts["codes"].shape[1],
        stored_groups=parts["scale"].shape[1],
        group=group,
        group_size=format.group_size,
        bits=format.bits,
        scale_kind={"float32": 0, "float16": 1}.get(format.scale_type, 2),
        x_top=x_top,
        unit=unit,
        tensor_scale=float(parts["tensor_scale"]) if "tensor_scale" in parts else 1.0,
    )
    return described, (parts, integers, exact, scales)


class CppKernel(Kernel):
    """`dot` reads packed bytes once for a few input rows; `panel` unpacks some rows at a time for many."""

    batch_invariant = True

    def __init__(self, name: str, kind: int) -> None:
        self.name, self.kind = name, kind

    def why_not(self, weight: QuantTensor, dtype: torch.dtype, m: int) -> str:
        if weight.device.type != "cpu":
            return "for the CPU alone"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"computes in float32, the inputs are {dtype}"
        if self.kind == DOT and m > 32:
            return "for up to 32 input rows"
        trouble = _trouble(settings.cache_folder(), settings.get("simd"))
        if trouble:
            return trouble
        if self.kind == DOT:
            described, _held = describe(weight)
            if library().dot_split_of(ctypes.byref(described)) == 0:
                return "groups too small for it, or no AVX2"
        return ""

    def prepare(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        described, held = describe(weight)
        call, kind, rows = library().quant_linear, self.kind, weight.rows
        address = ctypes.byref(described)
        bias32 = None if bias is None else bias.detach().float().contiguous()
        bias_address = None if bias32 is None else bias32.data_ptr()

        def run(x: torch.Tensor, _keep: Any = (described, held, bias32)) -> torch.Tensor:
            x32 = x.float().contiguous()
            out = torch.empty(x32.shape[0], rows, dtype=torch.float32)
            failed = call(address, x32.data_ptr(), x32.shape[0], bias_address, out.data_ptr(), kind)
            if failed == NO_MEMORY:
                asked = f"{x32.shape[0]} × {x32.shape[1]} inputs by {rows} packed rows"
                raise OutOfMemory(f"no memory to multiply {asked}", hint="give it fewer input rows at a time")
            assert failed != NO_DOT, "why_not has said that dot does not serve this format"
            return out.to(x.dtype)

        return Prepared(run)


KERNELS = (CppKernel("cpp dot", DOT), CppKernel("cpp panel", PANEL))


def unpack_rows(weight: QuantTensor, first: int, count: int, out: torch.Tensor, described: Any) -> None:
    """Rows of a packed weight as float32 into `out` (count × columns); `described` comes from `describe`."""
    if library().quant_unpack(ctypes.byref(described[0]), first, count, out.data_ptr()):
        raise OutOfMemory(f"no memory to unpack {count} × {weight.columns} packed weights", hint="free host memory")


def available() -> bool:
    return not _trouble(settings.cache_folder(), settings.get("simd"))
