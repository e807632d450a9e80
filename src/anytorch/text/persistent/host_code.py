"""The compiled decoder of the CPU, and its structures: `code/decode.cpp` by ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytorch import native
from anytorch.errors import OutOfMemory
from anytorch.text.persistent.panels import Panels

SOURCE = Path(__file__).parent / "code" / "decode.cpp"


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "out", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "after", "q_norm", "k_norm", "keys", "values")),
        ("window", ctypes.c_int64),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head", "inner", "positions")
        ),
        ("eps", ctypes.c_float),
        ("format", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("words", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("logits", Matrix),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "layer")),
    )


class Draw(ctypes.Structure):
    """How a row chooses its tokens. `points`: float64, one for every step; `seen`: uint8 [vocabulary], or None."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "penalty")),
        ("top_k", ctypes.c_int64),
        ("points", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
    )


class Run(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "steps", "ends", "threads")),
        *((name, ctypes.c_void_p) for name in ("tokens", "places", "made", "end", "logits", "done", "stopping")),
        ("homes", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("draws", ctypes.c_void_p),
        ("trace", ctypes.c_void_p),
        ("trace_words", ctypes.c_int64),
    )


def load_library() -> Any:
    """The compiled decoder; raises NativeUnavailable."""
    library: Any = native.load("decode", [SOURCE])
    library.panel_product.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return library


def packed_matrix(packed: Panels, bias: int | None) -> Matrix:
    """The C view of a packed matrix; `packed` and what `bias` is the address of must live as long as it."""
    return Matrix(packed.codes.data_ptr(), bias, *packed.shape, packed.scales.data_ptr(), packed.scale)


def panel_product(x: Tensor, packed: Panels, bias: Tensor | None = None) -> Tensor:
    """x [texts, columns] by a packed matrix, [texts, rows], as the token loop computes it: for tests and measurements."""
    wide, added = x.float().contiguous(), None if bias is None else bias.float().contiguous()
    out = torch.empty(len(x), packed.shape[0])
    matrix = packed_matrix(packed, None if added is None else added.data_ptr())
    failed = load_library().panel_product(ctypes.byref(matrix), packed.bits, wide.data_ptr(), len(x), out.data_ptr())
    if failed:
        raise OutOfMemory(f"no memory is left to round {len(x)} inputs", hint="give it fewer inputs at a time")
    return out
