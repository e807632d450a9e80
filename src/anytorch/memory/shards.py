"""Where the tensors of a checkpoint lie: the headers of its safetensors files. No tensor is read.

The format: eight bytes with the header's length, the header (JSON: name → dtype, shape, begin and end), then the bytes.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from anytorch.errors import ModelError
from anytorch.memory.images import Located, element_size

LARGEST_HEADER = 100 * 2**20  # the format's own limit
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
CODES = {name: code for code, name in DTYPES.items()}
SUMS_KEY = "anytorch.sums"  # in the header's metadata: checksums of our own files, 16 hexadecimal digits each


def checkpoint_files(path: str | Path) -> list[Path]:
    """The weight files of a folder (its index names them), or the one file given. Raises ModelError."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ModelError(f"{path} does not exist", hint="name a model folder or a .safetensors file")
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if indexes:
        try:
            weight_map = json.loads(indexes[0].read_bytes())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ModelError(f"cannot read the index {indexes[0]}: {exc}", hint="download it again") from exc
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ModelError(f"{indexes[0]} names {missing[0]}, which is not there", hint="download the missing file")
        return [path / name for name in names]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{path} has no .safetensors file", hint="save the model with safe_serialization=True")
    return found


def locate_tensors(path: str | Path) -> dict[str, Located]:
    """Every tensor of a checkpoint: its name, dtype, shape and place. Raises ModelError for a file that makes no sense."""
    found: dict[str, Located] = {}
    for file in checkpoint_files(path):
        found.update(read_header(file))
    return found


def read_header(path: Path) -> dict[str, Located]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
            if length > min(LARGEST_HEADER, size - 8):
                raise ModelError(f"{path} is not a safetensors file: its header does not fit in its {size} bytes")
            raw = file.read(length)
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror}", hint="check its permissions") from exc
    try:
        header: dict[str, Any] = json.loads(raw)
        metadata = header.pop("__metadata__", None) or {}
        digits = str(metadata.get(SUMS_KEY, ""))
        sums = tuple(int(digits[i : i + 16], 16) for i in range(0, len(digits), 16)) if digits else None
        tensors = {name: _located(name, entry, path, 8 + length, size, sums) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ModelError(f"{path} has a damaged safetensors header: {exc}", hint="download or write it again") from exc
    return tensors


def _located(
    name: str, entry: dict[str, Any], path: Path, start: int, size: int, sums: tuple[int, ...] | None
) -> Located:
    code = entry["dtype"]
    if code not in DTYPES:
        raise ModelError(f"{path}: tensor {name!r} has the dtype {code!r}, which torch does not support")
    begin, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    count = 1
    for n in shape:
        count *= n
    dtype = DTYPES[code]
    if not 0 <= begin <= end or end - begin != count * element_size(dtype):
        raise ModelError(
            f"{path}: tensor {name!r} has {end - begin} bytes, which does not match its shape {list(shape)}"
        )
    if start + end > size:
        raise ModelError(
            f"{path} is cut off: tensor {name!r} ends at byte {start + end}, the file at {size}",
            hint="download or write it again",
        )
    return Located(name, dtype, shape, str(path), start + begin, end - begin, sums, start)


def header_bytes(
    tensors: list[tuple[str, str, tuple[int, ...], int]], *, metadata: dict[str, str] | None = None, align: int = 8
) -> bytes:
    """The start of a safetensors file for (name, dtype, shape, nbytes) in file order; data begin on `align`."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % align
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding
