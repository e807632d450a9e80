"""The C functions of code/encoder.cpp, with their types."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_longlong, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch import native
from anytorch.errors import ModelError
from anytorch.native import Int32
from anytorch.text.checkpoints.ranges import LARGEST

if TYPE_CHECKING:
    import numpy.typing as npt

    from anytorch.text.checkpoints.spec import EncoderSpec

CODE = Path(__file__).parent / "code"
SOURCES = (CODE / "encoder.cpp",)

OK, BAD_TOKEN, TOO_LONG, NO_MEMORY, BAD_STARTS, BAD_PART = range(6)
QKV, OUT, UP, DOWN = range(4)
EMBED_NORM, FINAL_NORM, ATTN_NORM, MLP_NORM, Q_NORM, K_NORM = range(6)
FORMATS = {None: 0, "int8": 1, "int4": 2, "int2": 3, "fp4": 4}
PARTS = ("embed and pool", "qkv", "rotate", "attention", "out", "up", "down", "norm")
ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}
# The whole numbers of a Shape, which an EncoderSpec has under the same names.
WHOLE = (
    "vocabulary", "width", "layers", "heads", "kv_heads", "head_width", "inner", "max_positions", "position_offset",
    "activation", "gated", "pre_norm", "rms_norm", "embed_norm", "final_norm", "qk_norm", "causal",
)  # fmt: skip


class Shape(ctypes.Structure):
    """Kept the same as `struct Shape` in encoder.cpp."""

    _fields_ = [*((name, c_int32) for name in WHOLE), ("eps", c_float), ("budget", c_int32), ("block", c_int32)]


def shape_of(spec: EncoderSpec, budget: int, block: int) -> Shape:
    """The spec as C++ reads it. Raises ModelError for a number that does not fit there: ctypes would cut it off."""
    values = {name: int(getattr(spec, name)) for name in WHOLE if name != "activation"}
    values |= {"activation": ACTIVATIONS[spec.activation], "budget": budget, "block": block}
    for name, value in values.items():
        if not 0 <= value <= LARGEST:
            raise ModelError(f"an encoder whose {name} is {value} cannot be computed: it must be from 0 to {LARGEST}")
    return Shape(**values, eps=spec.eps)


_FUNCTIONS = {
    "encoder_shape_is_valid": (c_int, [POINTER(Shape)]),
    "encoder_new": (c_void_p, [POINTER(Shape), Int32]),
    "encoder_shape_nbytes": (c_int, []),
    "encoder_free": (None, [c_void_p]),
    "encoder_set_words": (None, [c_void_p, c_void_p]),
    "encoder_set_added": (c_int, [c_void_p, c_void_p, Int32]),
    "encoder_set_norm": (c_int, [c_void_p, Int32, Int32, c_void_p, c_void_p]),
    "encoder_set_relative": (c_int, [c_void_p, c_void_p, c_int64, c_int64]),
    "encoder_set_attention": (c_int, [c_void_p, Int32, c_float, Int32]),
    "encoder_linear_new": (c_int, [c_void_p, Int32, Int32, Int32, Int32, Int32, Int32, Int32]),
    "encoder_linear_smooth": (c_int, [c_void_p, Int32, Int32, c_void_p, c_void_p]),
    "encoder_linear_done": (None, [c_void_p, Int32, Int32]),
    "encoder_calibrate": (
        c_int,
        [c_void_p, Int32, c_void_p, c_void_p, Int32, c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int)],
    ),
    "encoder_has_bytes": (c_int, []),
    "encoder_linear_rows": (c_int, [c_void_p, Int32, Int32, c_void_p, c_void_p, Int32, Int32]),
    "encoder_linear_nbytes": (c_longlong, [c_void_p]),
    "encoder_profile": (None, [c_void_p, Int32, c_void_p]),
    "encoder_peak": (c_double, [Int32, Int32]),
    "encoder_run": (
        c_int,
        [c_void_p, c_void_p, c_void_p, Int32, Int32, Int32, c_void_p, c_void_p, POINTER(c_int)],
    ),
}


def open_library(level: str | None = None) -> ctypes.CDLL:
    """The compiled encoder for a SIMD level (None: the best here). Raises NativeUnavailable."""
    library = native.load("packed", SOURCES, level=level)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def pointer(array: npt.NDArray[Any] | None) -> c_void_p | None:
    return None if array is None else array.ctypes.data_as(c_void_p)
