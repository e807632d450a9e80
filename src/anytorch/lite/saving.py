"""Tensors to and from safetensors files: numbers and names, nothing that could run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anytorch.errors import ModelError
from anytorch.files import replace_file
from anytorch.lite.create import wrap
from anytorch.lite.dtypes import Array
from anytorch.lite.nn.module import Module, as_array
from anytorch.lite.tensors import CustomTensor
from anytorch.safetensors_files import StoredTensor, header_bytes, read_header

TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?", "BF16": "<u2",
}  # fmt: skip
NAMES = {np.dtype(text): name for name, text in TYPES.items() if name != "BF16"}


def save(state: Module | Mapping[str, Any], path: str | Path) -> None:
    """Write a module's state, or any dictionary of tensors, to a `.safetensors` file."""
    tensors = state.state_dict() if isinstance(state, Module) else state
    arrays = {name: np.asarray(as_array(value), order="C") for name, value in tensors.items()}
    layout: list[tuple[str, str, tuple[int, ...], int]] = []
    for name, array in arrays.items():
        code = NAMES.get(array.dtype.newbyteorder("<"))
        if code is None or not isinstance(name, str) or name == "__metadata__":
            raise ModelError(f"{name!r} has dtype {array.dtype}, which a safetensors file cannot hold")
        layout.append((name, code, array.shape, array.nbytes))
    parts = (array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values())
    replace_file(Path(path), header_bytes(layout) + b"".join(parts))


def load(path: str | Path) -> dict[str, CustomTensor]:
    """The tensors of a `.safetensors` file. bfloat16, which NumPy does not have, becomes float32."""
    tensors, _ = read_header(path)
    content = memoryview(Path(path).read_bytes())
    return {name: wrap(read_tensor(stored, content)) for name, stored in tensors.items()}


def read_tensor(stored: StoredTensor, content: memoryview) -> Array:
    """One tensor of a file's content. Raises ModelError for what NumPy does not have."""
    if stored.code not in TYPES:
        raise ModelError(f"{stored.path}: {stored.name!r} has the dtype {stored.code}, which NumPy does not have")
    dtype = np.dtype(TYPES[stored.code])
    try:
        raw = np.frombuffer(content[stored.offset : stored.offset + stored.nbytes], dtype).reshape(stored.shape)
    except ValueError as exc:  # more dimensions, or larger ones, than NumPy has
        raise ModelError(f"{stored.path}: {stored.name!r} has a shape that NumPy cannot make: {exc}") from exc
    if stored.code == "BF16":  # the upper half of a float32
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(dtype.newbyteorder("="))  # a copy of its own, which may be written to
