"""Safetensors files with packed weights in them: written tensor by tensor, read back strictly.

The library's own `save_file` wants every tensor in memory at once. A checkpoint is quantized here one weight at a time,
so the file is laid out first and filled in as the parts become ready; the header, which carries a checksum per weight,
goes in last, and only then does the file get its name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from anytorch.errors import ModelError, OutputError, UsageError
from anytorch.files import replacing
from anytorch.quant.formats import Format, parse
from anytorch.quant.tensor import PARTS, QuantTensor, expected_parts, metadata
from anytorch.safetensors_files import CODES, header_bytes, map_file, mapped_tensor, read_header

KEY = "anytorch.quant"  # in the header's __metadata__; its value is JSON
VERSION = 1

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def part_name(weight: str, part: str) -> str:
    """The name of a packed weight's part in the file: "layer.weight" and "codes" give "layer.weight.codes"."""
    return f"{weight}.{part}"


def packed_layout(name: str, format: Format, shape: tuple[int, ...]) -> Layout:
    return {part_name(name, part): wanted for part, wanted in expected_parts(format, shape).items()}


def code_of(dtype: object) -> str | None:
    """The format's name of a torch dtype; None where it has none."""
    return CODES.get(str(dtype).removeprefix("torch."))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def checksum(parts: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 over the parts' bytes in the order of PARTS, as eight hexadecimal digits."""
    value = 0
    for name in PARTS:
        if name in parts:
            value = zlib.crc32(tensor_bytes(parts[name]), value)
    return f"{value:08x}"


class Writer:
    """Fills a safetensors file of a known layout in any order. Use `writing`, which names the file when all is there."""

    def __init__(
        self, file: BinaryIO, layout: Layout, packed: Mapping[str, tuple[Format, tuple[int, ...], str]]
    ) -> None:
        self.file = file
        self.missing = set(layout)
        self.packed = {
            name: {"format": str(format), "shape": list(shape), "dtype": dtype, "crc32": "0" * 8}
            for name, (format, shape, dtype) in packed.items()
        }
        self.extra: dict[str, Any] = {}
        self.tensors: list[tuple[str, str, tuple[int, ...], int]] = []
        self.places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self.nbytes = 0
        for name in sorted(layout, key=lambda name: _rank(layout[name])):  # stable: the given order otherwise
            shape, dtype = layout[name]
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            self.tensors.append((name, str(code_of(dtype)), shape, nbytes))
            self.places[name] = (self.nbytes, tuple(shape), dtype)
            self.nbytes += nbytes
        self.start = 0

    def begin(self, extra: Mapping[str, Any]) -> None:
        """Reserve the header's place. `extra` joins the description under our key."""
        self.extra = dict(extra)
        self.start = len(self.header())
        self.file.truncate(self.start + self.nbytes)

    def header(self) -> bytes:
        description = {"version": VERSION, **self.extra, "weights": self.packed}
        return header_bytes(self.tensors, {"format": "pt", KEY: json.dumps(description)})

    def put(self, name: str, tensor: torch.Tensor) -> None:
        offset, *wanted = self.places[name]
        found = [tuple(tensor.shape), tensor.dtype]
        assert found == wanted, f"{name} is {found}, the layout says {wanted}"
        self.file.seek(self.start + offset)
        self.file.write(tensor_bytes(tensor))
        self.missing.discard(name)

    def put_packed(self, name: str, tensor: QuantTensor) -> None:
        for part, value in tensor.parts.items():
            self.put(part_name(name, part), value)
        self.packed[name]["crc32"] = checksum(tensor.parts)

    def finish(self) -> None:
        assert not self.missing, f"never written: {', '.join(sorted(self.missing))}"
        header = self.header()
        assert len(header) == self.start, "the header grew after its place was reserved"
        self.file.seek(0)
        self.file.write(header)


def _rank(tensor: tuple[tuple[int, ...], torch.dtype]) -> tuple[int, int]:
    """Readers map tensors in place, so each must start at a multiple of its element's size, and the format allows no
    gaps. Whatever is a multiple of four bytes long keeps the order it was given in (a block's tensors stay neighbours,
    and one read fetches them); the odd ones follow."""
    shape, dtype = tensor
    if dtype.itemsize == 8:
        return 0, 0
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return (1, 0) if nbytes % 4 == 0 else (2, -dtype.itemsize)


@contextmanager
def writing(
    path: Path,
    layout: Layout,
    packed: Mapping[str, tuple[Format, tuple[int, ...], str]],
    extra: Mapping[str, Any] | None = None,
) -> Iterator[Writer]:
    """A writer for `path`. The file appears there when the block ends well, and nothing is left behind otherwise.

    The block only writes: an OSError in it is the disk's, and is raised as OutputError, which names the file.
    """
    unknown = {str(dtype) for _, dtype in layout.values() if code_of(dtype) is None}
    if unknown:
        raise ModelError(f"safetensors files cannot hold {', '.join(sorted(unknown))}")
    try:
        with replacing(path) as file:
            writer = Writer(file, layout, packed)
            writer.begin(extra or {})
            yield writer
            writer.finish()
    except OSError as exc:
        raise OutputError(
            f"cannot write {path}: {exc.strerror or exc}",
            hint="nothing was changed; make room, or name another folder",
        ) from exc


class Reader:
    """One safetensors file with packed weights in it. Tensors are read when asked for."""

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path, self.verify = path, verify
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        self.tensors, about = read_header(path)
        self.names = frozenset(self.tensors)
        self.extra, self.packed = self._description(about.get(KEY))
        self._mapped = map_file(path)

    def _description(
        self, text: str | None
    ) -> tuple[dict[str, Any], dict[str, tuple[Format, tuple[int, ...], torch.dtype, str]]]:
        if text is None:
            raise ModelError(
                f"{self.path} holds no weights packed by anytorch (no {KEY!r} in its header)",
                hint="a plain checkpoint is quantized with anytorch.quant.quantize(model, format, weights=path)",
            )
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise ModelError(
                    f"{self.path} has version {data['version']!r} of the format; this anytorch reads {VERSION}",
                    hint="use the anytorch that wrote it, or quantize the original again",
                )
            packed = {}
            for name, entry in data["weights"].items():
                dtype = getattr(torch, entry["dtype"])
                if code_of(dtype) is None:
                    raise ValueError(f"{name} has the dtype {entry['dtype']!r}")
                packed[name] = (parse(entry["format"]), tuple(map(int, entry["shape"])), dtype, str(entry["crc32"]))
        except ModelError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as exc:
            raise ModelError(f"the header of {self.path} cannot be understood: {exc!r}") from exc
        for name, (format, shape, _, _) in packed.items():
            lacking = sorted(packed_layout(name, format, shape).keys() - self.names)
            if lacking:
                raise ModelError(f"{self.path} names the weight {name} and lacks {', '.join(lacking)}")
        return {key: value for key, value in data.items() if key not in ("version", "weights")}, packed

    @property
    def plain(self) -> list[str]:
        """The names of the tensors that are stored as they are."""
        parts = {part_name(name, part) for name in self.packed for part in PARTS}
        return sorted(self.names - parts)

    def get(self, name: str) -> torch.Tensor:
        return mapped_tensor(self.tensors[name], self._mapped)

    def get_packed(self, name: str) -> QuantTensor:
        """One packed weight. Raises ModelError if its parts have other sizes or another checksum than the header says."""
        format, shape, dtype, crc = self.packed[name]
        parts = {}
        for part, (wanted, stored) in expected_parts(format, shape).items():
            parts[part] = self.get(part_name(name, part))
            found = (tuple(parts[part].shape), parts[part].dtype)
            if found != (wanted, stored):
                raise ModelError(f"{self.path}: {part_name(name, part)} must be {stored} {wanted}; found {found}")
        if self.verify and checksum(parts) != crc:
            raise ModelError(
                f"{self.path}: the weight {name} is damaged (its checksum is not {crc})", hint="copy the file again"
            )
        return QuantTensor(format, shape, dtype, parts)


def save_tensors(
    path: Path, packed: Mapping[str, QuantTensor], plain: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write packed weights (and ordinary tensors) to one file. `Reader` reads it back. Raises OutputError."""
    plain = plain or {}
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in sorted(packed.keys() | plain.keys()):
        if name in packed:
            layout.update(packed_layout(name, packed[name].format, packed[name].shape))
        else:
            layout[name] = (tuple(plain[name].shape), plain[name].dtype)
    about = {name: (value.format, value.shape, metadata(value)["dtype"]) for name, value in packed.items()}
    with writing(path, layout, about) as writer:
        for name, value in packed.items():
            writer.put_packed(name, value)
        for name, tensor in plain.items():
            writer.put(name, tensor)
