"""Reading safetensors without torch: one file or a sharded index, mapped into memory, a tensor at a time.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, a JSON header with each
tensor's dtype, shape and place, then the tensors' bytes. Nothing in it can run code, which is why pickled weights
(pytorch_model.bin) are refused here.
"""

from __future__ import annotations

import json
import mmap
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from anytorch.errors import ModelError
from anytorch.quant.shards import INDEX, shard_files
from anytorch.values import dataclass

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SINGLE = "model.safetensors"
LARGEST_HEADER = 100_000_000  # what the reference reader allows
ITEM_NBYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
NUMPY_NAMES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Where one tensor is: bytes [begin, end) of the file."""

    file: Path
    dtype: str  # safetensors' own name: "F32", "BF16", …
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The weights in a folder (or one .safetensors file). Opening reads headers only.

    `tensor(name)` gives NumPy arrays that share the mapped file's memory where they can; they stay valid after `close`.
    Raises ModelError, naming the file, for a missing, truncated or damaged one.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._entries: dict[str, Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for file in _files(self.folder):
            self._entries.update(read_header(file))

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
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
        return self.entry(name).dtype

    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(entry.end - entry.begin for entry in self._entries.values())

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they are in the file, read-only, flat and not copied (for `torch.frombuffer`)."""
        import numpy as np

        entry = self.entry(name)
        whole = np.frombuffer(self._map(entry.file), dtype=np.uint8)
        return whole[entry.begin : entry.end]

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """The tensor; bfloat16, which NumPy does not have, comes as float32 (exactly). Read-only where not converted."""
        import numpy as np

        entry = self.entry(name)
        if entry.dtype not in NUMPY_NAMES:
            raise ModelError(
                f"{entry.file}: tensor {name!r} has dtype {entry.dtype}, which NumPy cannot hold",
                hint="use `raw` and a framework that knows it, or a checkpoint in float32, float16 or bfloat16",
            )
        values = self.raw(name).view(NUMPY_NAMES[entry.dtype]).reshape(entry.shape)
        if entry.dtype == "BF16":  # the upper half of a float32
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def close(self) -> None:
        """Close the files. Arrays already returned keep their mapping alive."""
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as handle:
                    self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as exc:
                raise ModelError(f"{file}: cannot be read: {exc}") from exc
        return self._maps[file]


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint; every one exists."""
    if folder.is_file():
        return [folder]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return shard_files(folder / INDEX)
    pickled = sorted(p.name for p in folder.glob("*.bin") if "model" in p.name) + sorted(
        p.name for p in folder.glob("*.pt*") if p.suffix in (".pt", ".pth")
    )
    if pickled:
        raise ModelError(
            f"{folder}: the weights are a pickle ({pickled[0]}), which can run any code when loaded",
            hint="fetch the model's safetensors file, or convert it once in a place you trust: "
            "transformers' AutoModel.from_pretrained(folder).save_pretrained(folder)",
        )
    raise ModelError(
        f"{folder}: found no weights: neither {SINGLE} nor {INDEX}",
        hint="name the folder that holds config.json and model.safetensors",
    )


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors in a file's header, checked so that each of them can be read."""
    again = "the file is incomplete or damaged: fetch it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise ModelError(f"{file}: not a safetensors file, or one cut off in its header", hint=again)
            text = handle.read(length)
    except OSError as exc:
        raise ModelError(f"{file}: cannot be read: {exc.strerror}") from exc
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            str(name): Entry(
                file,
                str(found["dtype"]),
                tuple(int(n) for n in found["shape"]),
                8 + length + int(found["data_offsets"][0]),
                8 + length + int(found["data_offsets"][1]),
            )
            for name, found in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as exc:
        raise ModelError(f"{file}: its safetensors header is invalid: {exc}", hint=again) from exc
    for name, entry in entries.items():
        if entry.end > size:
            raise ModelError(
                f"{file}: cut off: tensor {name!r} ends at byte {entry.end}, the file has {size}", hint=again
            )
        nbytes = ITEM_NBYTES.get(entry.dtype, 0) * prod(entry.shape)
        if min(entry.shape, default=1) < 0 or not 8 + length <= entry.begin <= entry.end:
            raise ModelError(f"{file}: tensor {name!r} has an invalid offset or shape", hint=again)
        if entry.dtype in ITEM_NBYTES and entry.end - entry.begin != nbytes:
            raise ModelError(
                f"{file}: tensor {name!r} of {entry.dtype}{list(entry.shape)} should have {nbytes} bytes and has "
                f"{entry.end - entry.begin}",
                hint=again,
            )
    return entries
