"""The tensors of a safetensors checkpoint as NumPy arrays: one file or several, a tensor at a time."""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anytorch.errors import ModelError
from anytorch.safetensors_files import SMALL_NBYTES, StoredTensor, locate_tensors, read_into

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

NUMPY_NAMES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """The weights in a folder (or one .safetensors file). Opening reads headers only.

    `tensor(name)` gives NumPy arrays, which stay valid after `close`. Small ones are read. Large ones are mapped, and shared
    between processes; if their file is cut short, a read ends the process (SIGBUS): call `check_still_whole` first.
    Raises ModelError, naming the file, for a missing, truncated or damaged one.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._entries = locate_tensors(self.folder)
        self._maps: dict[str, mmap.mmap] = {}

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> StoredTensor:
        try:
            return self._entries[name]
        except KeyError:
            import difflib  # only for bad input

            near = difflib.get_close_matches(name, self._entries, n=1)
            raise ModelError(
                f"{self.folder}: the checkpoint has no tensor {name!r}",
                hint=f"it has {near[0]!r}" if near else "it is the checkpoint of another model",
            ) from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def dtype(self, name: str) -> str:
        """As safetensors calls it: "F32", "F16", "BF16", …"""
        return self.entry(name).code

    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(entry.nbytes for entry in self._entries.values())

    def raw(self, name: str, part: int = 0, parts: int = 1) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they are in the file, flat and read-only: read, or of a large tensor mapped.

        Of one that is cut into equal `parts` along its first axis, those of one part.
        """
        entry = self.entry(name)
        nbytes = entry.nbytes // parts
        offset = entry.offset + part * nbytes
        if nbytes <= SMALL_NBYTES:
            data = np.empty(nbytes, np.uint8)
            read_into(entry.path, offset, data.data)
            data.flags.writeable = False
            return data
        whole = np.frombuffer(self._map(entry.path), dtype=np.uint8)
        check_still_whole(whole)
        return whole[offset : offset + nbytes]

    def tensor(self, name: str, part: int = 0, parts: int = 1) -> npt.NDArray[Any]:
        """The tensor, or one of its `parts`. Read-only where not converted.

        bfloat16, which NumPy does not have, comes as float32 (exactly).
        """
        entry = self.entry(name)
        if entry.code not in NUMPY_NAMES:
            raise ModelError(
                f"{entry.path}: tensor {name!r} has dtype {entry.code}, which NumPy cannot hold",
                hint="use `raw` and a framework that knows it, or a checkpoint in float32, float16 or bfloat16",
            )
        shape = entry.shape if parts == 1 else (entry.shape[0] // parts, *entry.shape[1:])
        values = self.raw(name, part, parts).view(NUMPY_NAMES[entry.code]).reshape(shape)
        if entry.code == "BF16":  # the upper half of a float32
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def close(self) -> None:
        """Close the files. Arrays already returned keep their mapping alive."""
        self._maps.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            try:
                with Path(file).open("rb") as handle:
                    self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as exc:
                raise ModelError(f"{file}: cannot be read: {exc}") from exc
        return self._maps[file]


def check_still_whole(array: npt.NDArray[Any]) -> None:
    """Raise ModelError if the file an array is mapped from (`mapped_from`) is shorter than when it was mapped."""
    mapped = mapped_from(array)
    if mapped is not None and mapped.size() < len(mapped):
        raise ModelError(
            f"a model's file was cut short while it was in use: it has {mapped.size()} bytes, not {len(mapped)}",
            hint="put the file back and load the model again; to replace a file in use, rename a new one over it",
        )


def mapped_from(array: npt.NDArray[Any]) -> mmap.mmap | None:
    """The mapping that an array's values lie in; None if they are in memory of their own."""
    base: Any = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base if isinstance(base, mmap.mmap) else None
