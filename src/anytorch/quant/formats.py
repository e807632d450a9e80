"""The formats a weight can rest in: how many bits, how groups are scaled, and exactly how many bytes that makes.

A weight is a matrix of rows (output features) times columns (input features). Every row is cut into groups of
`group_size` neighbouring columns; a group shares one scale, and in asymmetric formats one offset:

    integers   w = (code·scale + offset) · tensor_scale      or, symmetric, (code − 2^(bits−1))·scale · tensor_scale
    tables     w = table[code] · scale · tensor_scale

Nothing here needs torch or numpy: these are numbers about formats, and the tables themselves.
`docs/reference/quant-format.md` is the specification of the bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from anytorch.errors import UsageError, did_you_mean

ScaleType = Literal["float32", "float16", "e4m3", "e8m0"]
SCALE_BITS: dict[ScaleType, int] = {"float32": 32, "float16": 16, "e4m3": 8, "e8m0": 8}

# FP4 as the OCP MX specification and NVIDIA's Blackwell define it: sign, two exponent bits, one mantissa bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# NormalFloat: the quantiles of N(0,1) that QLoRA (arXiv 2305.14314, appendix E) publishes.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' own FP4 (3 bits of exponent, 0 of mantissa but for two codes), which is not E2M1. It divides by 12 in
# single precision, and so do we: the bytes must decode to the same numbers.
BNB_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
BNB_FP4 = tuple(value / 12.0 for value in BNB_FP4_TWELFTHS) + tuple(-value / 12.0 for value in BNB_FP4_TWELFTHS)


@dataclass(frozen=True)
class Format:
    """One way to store a weight. `str(format)` is its full name and `parse` reads it back."""

    family: str  # "int8", "int4", "int2", "nvfp4", "mxfp4", "nf4", "bnb-fp4"
    bits: int  # of one code
    group_size: int  # columns that share a scale; 0: the whole row
    symmetric: bool = True
    scale_type: ScaleType = "float16"
    table: tuple[float, ...] | None = None  # the value of each code; None: codes are integers
    activations: Literal["float", "int8"] = "float"  # "int8": inputs are rounded too, with one scale per token

    def __str__(self) -> str:
        parts = [self.family]
        if self.family in ("int4", "int2"):
            parts.append("sym" if self.symmetric else "asym")
        if self.family in ADJUSTABLE and self.group_size:
            parts.append(f"g{self.group_size}")
        if self.activations == "int8":
            parts.append("dynamic")
        return "-".join(parts)

    @property
    def has_offset(self) -> bool:
        return not self.symmetric

    @property
    def has_tensor_scale(self) -> bool:
        """One float32 for the whole tensor keeps 8- and 16-bit scales in range, whatever the size of the weights."""
        return self.scale_type in ("float16", "e4m3")

    @property
    def scale_table(self) -> tuple[float, ...] | None:
        """The number that each byte of a stored scale stands for; None where scales are stored as numbers."""
        return (
            {"e4m3": e4m3_values, "e8m0": e8m0_values}[self.scale_type]() if SCALE_BITS[self.scale_type] == 8 else None
        )

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.bits

    def groups(self, columns: int) -> int:
        """Groups in a row; the last one may be short, and its codes are padded to a whole group."""
        return 1 if self.group_size == 0 else -(-columns // self.group_size)

    def padded(self, columns: int) -> int:
        """Codes stored per row. A whole row is padded to whole bytes only."""
        if self.group_size == 0:
            return -(-columns // self.codes_per_byte) * self.codes_per_byte
        return self.groups(columns) * self.group_size

    def nbytes(self, rows: int, columns: int) -> int:
        """Exactly what the packed tensors take."""
        codes = rows * self.padded(columns) * self.bits // 8
        scales = rows * self.groups(columns) * SCALE_BITS[self.scale_type] // 8
        offsets = scales if self.has_offset else 0
        return codes + scales + offsets + (4 if self.has_tensor_scale else 0)

    def bits_per_weight(self, rows: int, columns: int) -> float:
        return self.nbytes(rows, columns) * 8 / (rows * columns)


ADJUSTABLE = ("int8", "int4", "int2", "nf4", "bnb-fp4")  # the others fix their group in their definition
GROUP_SIZES = (16, 32, 64, 128, 256)

_INT8 = Format("int8", 8, 0, scale_type="float32")
_INT4 = Format("int4", 4, 64, symmetric=False)
_INT2 = Format("int2", 2, 32, symmetric=False)
NAMED: dict[str, Format] = {
    "int8": _INT8,
    "int8-dynamic": replace(_INT8, activations="int8"),
    "int4": _INT4,
    "int4-asym": _INT4,
    "int4-sym": replace(_INT4, symmetric=True),
    "int2": _INT2,
    "int2-asym": _INT2,
    "nvfp4": Format("nvfp4", 4, 16, scale_type="e4m3", table=E2M1),
    "mxfp4": Format("mxfp4", 4, 32, scale_type="e8m0", table=E2M1),
    "nf4": Format("nf4", 4, 64, scale_type="float32", table=NF4),
    "bnb-fp4": Format("bnb-fp4", 4, 64, scale_type="float32", table=BNB_FP4),
}
ALIASES = {"fp4": "nvfp4", "w8": "int8", "w4": "int4", "w8a8": "int8-dynamic"}


def parse(name: str | Format, group_size: int | None = None) -> Format:
    """The format behind a name: "int8", "int4", "int4-sym-g32", "int8-dynamic", "fp4" (NVFP4), "mxfp4", "nf4".

    `group_size` overrides the format's own; 0 (int8 only) means one scale for a whole row.
    """
    if isinstance(name, Format):
        found = name
    else:
        text = ALIASES.get(name.strip().lower(), name.strip().lower())
        size = re.search(r"-g(\d+)", text)
        base = text.replace(size.group(0), "") if size else text
        if base not in NAMED:
            raise UsageError(
                f"unknown quantization {name!r}; known: {', '.join([*NAMED, *ALIASES])}",
                hint=did_you_mean(base, [*NAMED, *ALIASES], "a group size is written like int4-g32"),
            )
        found = NAMED[base]
        if size:
            found = _with_group(found, int(size.group(1)), name)
    return found if group_size is None else _with_group(found, group_size, str(name))


def _with_group(found: Format, group_size: int, asked: str) -> Format:
    if group_size == found.group_size:
        return found
    if found.family not in ADJUSTABLE:
        raise UsageError(
            f"{asked!r} with groups of {group_size}: {found.family} is defined with groups of {found.group_size}",
            hint="leave group_size out, or use int4 or nf4",
        )
    if group_size == 0 and found.family == "int8":
        return replace(found, group_size=0, scale_type="float32")
    if group_size not in GROUP_SIZES:
        raise UsageError(
            f"{asked!r} with groups of {group_size}: the sizes are {', '.join(map(str, GROUP_SIZES))}",
            hint="0 (one scale per row) is for int8 only",
        )
    return replace(found, group_size=group_size, scale_type="float32" if found.table else "float16")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of any rank, as it is packed.

    The last dimension is the row where it is long enough to hold groups (linear layers, embeddings, stacked experts);
    a short one (a convolution's kernel) is joined with all dimensions but the first.
    """
    if not shape or 0 in shape:
        raise UsageError(f"a tensor of shape {tuple(shape)} has no weights to quantize")
    if len(shape) == 1:
        return 1, shape[0]
    if len(shape) > 2 and shape[-1] < 32:
        return shape[0], math.prod(shape[1:])
    return math.prod(shape[:-1]), shape[-1]


@cache
def e4m3_values() -> tuple[float, ...]:
    """The value of each byte read as FP8 E4M3 (the "fn" kind: no infinities, 0x7F and 0xFF are NaN)."""

    def value(byte: int) -> float:
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        if exponent == 15 and mantissa == 7:
            return math.nan
        return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))

    return tuple(value(byte) for byte in range(256))


@cache
def e8m0_values() -> tuple[float, ...]:
    """The value of each byte read as an E8M0 scale: 2^(byte − 127), and 255 is NaN."""
    return (*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan)
