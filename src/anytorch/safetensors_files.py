"""Safetensors files without torch: which files a checkpoint has, and where in them each tensor lies. No tensor is read.

The format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length, the header (JSON: name →
dtype, shape, begin and end), then the tensors' bytes, one after another without gaps. Nothing in it can run code.
This is the only reader of these headers in the package: what it lets pass can be read without further checks.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NoReturn

from anytorch import large_pages
from anytorch.errors import ModelError
from anytorch.files import parse_json

if TYPE_CHECKING:
    import torch

SINGLE, INDEX, SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")
LARGEST_HEADER = 100_000_000  # what the reference reader allows
LARGEST_SIZE = 2**63 - 1
MOST_DIMENSIONS = 8
SMALL_NBYTES = (
    64 * 2**20
)  # what is smaller is read, not mapped: a mapped file that is cut short ends the process (SIGBUS)
CHECKSUMS = "anytorch.crc32"  # in the metadata of our own files: a CRC-32 of every MiB, 8 hexadecimal digits each
DIGITS = 8
AGAIN = "it was cut short or damaged: fetch or write it again"

# The format's name → torch's name and the bits of an element.
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64),
    "C64": ("complex64", 64), "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F6_E2M3": ("float6_e2m3", 6), "F6_E3M2": ("float6_e3m2", 6), "F4": ("float4_e2m1", 4),
}  # fmt: skip
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "n_enc_layers", "n_dec_layers", "encoder_layers",
          "decoder_layers")  # fmt: skip
CODES = {name: code for code, (name, _) in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor is: `nbytes` bytes from `offset` of the file `path`."""

    name: str
    code: str  # the format's name of the dtype: "BF16"
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int
    checksums: tuple[int, ...] | None = None  # of the whole data part of its file, when we wrote it
    data_start: int = 0  # where that part begins

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype: "bfloat16"."""
        return DTYPES[self.code][0]

    @property
    def itemsize(self) -> int:
        return max(1, DTYPES[self.code][1] // 8)


def checkpoint_files(path: str | Path) -> list[Path]:
    """The safetensors files of a folder, or the one file given: model.safetensors, what an index names, or all there are.

    Raises ModelError when there are none, or when an index names a file that is missing or not beside it.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ModelError(f"{path} does not exist", hint="name a model folder or a .safetensors file")
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    indexes = [path / INDEX] if (path / INDEX).is_file() else sorted(path.glob(f"*{SUFFIX}.index.json"))
    found = shard_files(indexes[0]) if indexes else sorted(path.glob(f"*{SUFFIX}"))
    if not found:
        pickled = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickled:
            raise ModelError(
                f"{path}: the weights are a pickle ({pickled[0]}), which is not loaded",
                hint="loading a pickle runs the code in it: fetch the model's safetensors file, or convert it once in a "
                "place you trust with transformers' AutoModel.from_pretrained(folder).save_pretrained(folder)",
            )
        raise ModelError(
            f"{path}: found no weights: it has no {SUFFIX} file",
            hint=f"name the folder that holds config.json and {SINGLE}",
        )
    return found


def shard_files(index: Path) -> list[Path]:
    """The files that an index of shards names, sorted; every one is beside it and exists. Raises ModelError."""
    try:
        names = sorted({str(name) for name in parse_json(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
        raise ModelError(f"{index}: cannot be read as an index of shards: {exc}", hint="fetch it again") from exc
    return [file_in(index.parent, name, index) for name in names]


def file_in(folder: Path, name: str, named_by: Path) -> Path:
    """The file `name` of a folder, which the file `named_by` names. Raises ModelError for a name that leads elsewhere.

    What names files (an index, the description of a training run) is data from elsewhere, and may not choose what is read
    on this machine: a name with a folder in it is refused. A symbolic link with a plain name is followed: whoever may write
    to the folder put it there, and every file in a Hugging Face cache is a link to ../../blobs.
    """
    if name in ("", ".", "..") or not name == PurePosixPath(name).name == PureWindowsPath(name).name:
        raise ModelError(
            f"{named_by}: names a file in another folder: {name!r}",
            hint="name a file of the same folder, without a path",
        )
    try:
        there = (folder / name).is_file()
    except OSError:  # a name that no file can have
        there = False
    if not there:
        raise ModelError(f"{folder / name}: this shard is missing, {named_by.name} names it", hint="fetch it again")
    return folder / name


def locate_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint (a folder or one file) by name. Raises ModelError for a file that is not whole."""
    found: dict[str, StoredTensor] = {}
    for file in checkpoint_files(path):
        found.update(read_header(file)[0])
    return found


def read_header(path: str | Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of one file by name, and its metadata. Raises ModelError, which says what is wrong with the file."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(LARGEST_HEADER, size - 8):
                _refuse(path, "it is cut off in its header, or has none")
            raw = file.read(length)
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror}", hint="check that it is there and readable") from exc
    header, metadata = _parsed(path, raw)
    data_start, data_nbytes = 8 + length, size - 8 - length
    checksums = _checksums(path, metadata)
    tensors = {name: _stored(path, name, entry, data_start, data_nbytes, checksums) for name, entry in header.items()}
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            what = "overlaps the one before" if tensor.offset < end else "leaves a gap to the one before"
            _refuse(path, f"tensor {tensor.name!r} {what}: it begins at byte {tensor.offset}, not at {end}")
        end += tensor.nbytes
    if end != size:
        _refuse(path, f"its last {size - end} bytes belong to no tensor")
    return tensors, metadata


def _parsed(path: Path, raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name occurs twice")
        return made

    try:
        header = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as exc:
        _refuse(path, f"its header is not JSON ({exc})", exc)
    if not isinstance(header, dict):
        _refuse(path, f"its header is a {type(header).__name__}")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(path, "its metadata must map names to texts")
    return header, metadata


def _checksums(path: Path, metadata: dict[str, str]) -> tuple[int, ...] | None:
    digits = metadata.get(CHECKSUMS, "")
    try:
        return tuple(int(digits[i : i + DIGITS], 16) for i in range(0, len(digits), DIGITS)) or None
    except ValueError as exc:
        _refuse(path, "its checksums are not hexadecimal", exc)


def _stored(
    path: Path, name: str, entry: Any, start: int, available: int, checksums: tuple[int, ...] | None
) -> StoredTensor:
    try:
        code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as exc:
        _refuse(path, f"the header's entry for {name!r} is invalid ({exc!r})", exc)
    if not isinstance(code, str) or code not in DTYPES:
        _refuse(path, f"tensor {name!r} has the unknown dtype {code!r}")
    if not is_shape(shape) or not is_shape((begin, end)) or begin > end:
        told = f"{list(shape)} at {begin}:{end}" if is_shape((*shape[:MOST_DIMENSIONS], begin, end)) else "not sizes"
        _refuse(path, f"tensor {name!r} has an invalid offset or shape: {told[:200]}")
    if end > available:
        _refuse(path, f"it is cut off: tensor {name!r} ends at byte {start + end}, the file at {start + available}")
    bits = _bits(shape, DTYPES[code][1], 8 * available)
    if bits != 8 * (end - begin):
        _refuse(
            path,
            f"tensor {name!r} has {end - begin} bytes, which does not match its dtype {code} and shape {list(shape)}",
        )
    if not _has_strides(shape, DTYPES[code][1]):
        _refuse(path, f"tensor {name!r} is empty and has an invalid shape: {list(shape)}")
    return StoredTensor(name, code, shape, str(path), start + begin, end - begin, checksums, start)


def is_shape(values: Sequence[Any]) -> bool:
    """True for at most 8 whole numbers from 0 to 2**63 - 1: what a file asks for is bounded before it is computed with."""
    return len(values) <= MOST_DIMENSIONS and all(type(n) is int and 0 <= n <= LARGEST_SIZE for n in values)


def _has_strides(shape: tuple[int, ...], bits: int) -> bool:
    """True if the distances between elements can be counted in bytes, which torch and NumPy do for empty tensors, too."""
    total = max(1, bits // 8)
    for n in shape:
        total *= max(1, n)
    return total <= LARGEST_SIZE


def check_layers(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Raise ModelError if a config.json asks for more layers than its checkpoint has tensors."""
    for name in LAYERS:
        layers = config.get(name)
        if layers is not None and (type(layers) is not int or not 0 <= layers <= tensors):
            told = layers if is_shape((layers,)) else f"a {type(layers).__name__}"
            raise ModelError(
                f"{where}: {name} is {told}, and the checkpoint has {tensors} tensors",
                hint="config.json and the weights are of different models, or one of them is damaged",
            )


def _bits(shape: tuple[int, ...], per_element: int, most: int) -> int | None:
    """Bits of a tensor, None where they are more than `most`: a header may not make us multiply without end."""
    total = 0 if 0 in shape else per_element
    for n in shape:
        total *= n
        if total > most:
            return None
    return total


def _refuse(path: Path, why: str, cause: BaseException | None = None) -> NoReturn:
    raise ModelError(f"{path} is not a whole safetensors file: {why}", hint=AGAIN) from cause


def torch_dtype(stored: StoredTensor) -> torch.dtype:
    """Torch's dtype of a stored tensor. Raises ModelError where this torch has none."""
    import torch

    found: torch.dtype | None = getattr(torch, stored.dtype, None)
    if found is None:
        raise ModelError(
            f"{stored.path}: tensor {stored.name!r} has the dtype {stored.code}, which torch does not have"
        )
    return found


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """A tensor's values in memory of its own. Raises ModelError where the file was cut short since its header was read."""
    dtype = torch_dtype(stored)
    return read_bytes(stored.path, stored.offset, stored.nbytes).view(dtype).view(stored.shape)


def read_bytes(path: str | Path, offset: int, nbytes: int) -> torch.Tensor:
    """Some bytes of a file, uint8. Raises ModelError where they are not all there."""
    import torch

    data = torch.empty(nbytes, dtype=torch.uint8)
    large_pages.ask(data.data_ptr(), nbytes)
    view = memoryview((ctypes.c_char * nbytes).from_address(data.data_ptr())).cast("B") if nbytes else memoryview(b"")
    read_into(path, offset, view)
    return data


def read_into(path: str | Path, offset: int, view: memoryview) -> None:
    """Fill `view` with the file's bytes from `offset`. Raises ModelError where they are not all there."""
    got = 0
    try:
        with Path(path).open("rb", buffering=0) as file:
            file.seek(offset)
            while got < view.nbytes and (count := file.readinto(view[got:])):
                got += count
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror}", hint="check that it is there and readable") from exc
    if got < view.nbytes:
        _refuse(Path(path), f"it was cut short while it was read: {offset + view.nbytes} bytes were expected")


def map_file(path: str | Path) -> torch.Tensor:
    """A whole file as a uint8 tensor that the system pages in as it is read; writing to it does not change the file.

    Only for files that nobody cuts short meanwhile: that would end the process.
    """
    import torch

    return torch.from_file(str(path), shared=False, size=Path(path).stat().st_size, dtype=torch.uint8)


def stored_tensor(stored: StoredTensor) -> torch.Tensor:
    """A tensor's values: of a small one read into memory, of a large one in its mapped file. Raises ModelError."""
    if stored.nbytes <= SMALL_NBYTES:
        return read_tensor(stored)
    dtype = torch_dtype(stored)
    read_bytes(stored.path, stored.offset + stored.nbytes - 1, 1)  # its last byte, so that it is there as a whole
    data = map_file(stored.path)[stored.offset : stored.offset + stored.nbytes]
    return (data.clone() if stored.offset % dtype.itemsize else data).view(dtype).view(stored.shape)


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str] | None = None, *, align: int = 8
) -> bytes:
    """The start of a file that holds (name, code, shape, nbytes) in this order; the data begin at a multiple of `align`."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, code, shape, nbytes in tensors:
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    padding = -(8 + len(text)) % align
    return struct.pack("<Q", len(text) + padding) + text + b" " * padding
