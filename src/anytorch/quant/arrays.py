"""Reading packed weights with NumPy alone: for programs without torch, and a second implementation of the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anytorch.errors import InputError
from anytorch.quant.formats import Format, matrix_shape, parse

Array = np.ndarray[Any, np.dtype[Any]]


def unpack_arrays(format: str | Format, shape: tuple[int, ...], parts: Mapping[str, Array]) -> Array:
    """The float32 weight behind parts that were read as NumPy arrays; see docs/reference/quant-format.md."""
    chosen = parse(format)
    rows, columns = matrix_shape(shape)
    groups = chosen.groups(columns)
    joined = parts["codes"]
    wanted = (rows, chosen.padded(columns) // chosen.codes_per_byte)
    if joined.shape != wanted:
        raise InputError(f"codes of a {chosen} weight of shape {shape} must be {wanted}; found {joined.shape}")
    if chosen.bits == 8:
        codes = joined
    else:
        places = np.arange(0, 8, chosen.bits, dtype=np.uint8)
        codes = ((joined[..., None] >> places) & np.uint8(2**chosen.bits - 1)).reshape(rows, -1)
    codes = codes.reshape(rows, groups, -1)

    scale, table = parts["scale"], chosen.scale_table
    step = scale.astype(np.float32) if table is None else np.array(table, np.float32)[scale]
    unit = parts.get("tensor_scale")
    if unit is not None:
        step = step * np.float32(unit)

    if chosen.table is not None:
        values = np.array(chosen.table, np.float32)[codes] * step[..., None]
    elif chosen.symmetric:
        middle = 0 if chosen.bits == 8 else 2 ** (chosen.bits - 1)
        values = (codes.astype(np.float32) - np.float32(middle)) * step[..., None]
    else:
        assert unit is not None
        offset = parts["offset"].astype(np.float32) * np.float32(unit)
        values = codes.astype(np.float32) * step[..., None] + offset[..., None]
    return values.reshape(rows, -1)[:, :columns].reshape(shape)
