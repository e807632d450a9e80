"""Files of tensors in the safetensors format, read and written in a page.

    8 bytes     the length of the header, little-endian
    header      JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …}
    numbers     all tensors, one after the other

A file holds numbers and names, nothing that could run. What the header says is not believed before it has been checked.
"""

from __future__ import annotations

import json
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

TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?", "BF16": "<u2",
}  # fmt: skip
NAMES = {np.dtype(text): name for name, text in TYPES.items() if name != "BF16"}
LONGEST_HEADER = 100_000_000


def save(state: Module | Mapping[str, Any], path: str | Path) -> None:
    """Write a module's state, or any dictionary of tensors, to a `.safetensors` file."""
    tensors = state.state_dict() if isinstance(state, Module) else state
    arrays = {name: np.asarray(as_array(value), order="C") for name, value in tensors.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        if array.dtype.newbyteorder("<") not in NAMES or not isinstance(name, str) or name == "__metadata__":
            raise ModelError(f"{name!r} has dtype {array.dtype}, which a safetensors file cannot hold")
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers start at a multiple of 8
    parts = (array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays.values())
    replace_file(Path(path), len(text).to_bytes(8, "little") + text + b"".join(parts))


def load(path: str | Path) -> dict[str, CustomTensor]:
    """The tensors of a `.safetensors` file. bfloat16, which NumPy does not have, becomes float32."""
    path = Path(path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(LONGEST_HEADER, len(content) - 8):
        raise ModelError(f"{path} is not a safetensors file: its header would be {length:,} bytes long")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path} is not a safetensors file: its header is not JSON ({exc})") from exc
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: its header is a {type(header).__name__}")
    header.pop("__metadata__", None)
    numbers = memoryview(content)[8 + length :]
    return {name: wrap(read_tensor(path, name, entry, numbers)) for name, entry in header.items()}


def read_tensor(path: Path, name: str, entry: Any, numbers: memoryview) -> Array:
    try:
        type_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = np.dtype(TYPES[type_name])
        sizes = [*shape, begin, end]
        wanted = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize
    except (KeyError, TypeError, ValueError) as exc:
        raise ModelError(f"{path}: the header's entry for {name!r} is invalid: {entry}") from exc
    if any(type(n) is not int or n < 0 for n in sizes) or end - begin != wanted or end > len(numbers):
        raise ModelError(f"{path}: {name!r} should be {wanted:,} bytes at {begin}:{end} of {len(numbers):,}")
    try:
        raw = np.frombuffer(numbers[begin:end], dtype).reshape(shape)
    except ValueError as exc:  # more dimensions, or larger ones, than NumPy has
        raise ModelError(f"{path}: {name!r} has a shape that NumPy cannot make: {exc}") from exc
    if type_name == "BF16":  # the upper half of a float32
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(dtype.newbyteorder("="))  # a copy of its own, which may be written to
