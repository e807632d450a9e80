"""Safetensors files with packed weights in them: written tensor by tensor, read back strictly.

The library's own `save_file` wants every tensor's bytes in host memory at once. Here the file is laid out first and filled
in one tensor at a time; the header, which carries a checksum per weight, goes in last, and only then does the file get its
name.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from anytorch.errors import ModelError, OutputError, UsageError
from anytorch.files import replacing
from anytorch.quant.formats import Format, parse
from anytorch.quant.tensor import PARTS, QuantTensor, expected_parts
from anytorch.safetensors_files import CODES, header_bytes, map_file, mapped_tensor, read_header

KEY = "anytorch.quant"  # in the header's __metadata__; its value is JSON
VERSION = 1


def part_name(weight: str, part: str) -> str:
    """The name of a packed weight's part in the file: "layer.weight" and "codes" give "layer.weight.codes"."""
    return f"{weight}.{part}"


def code_of(dtype: object) -> str | None:
    """The format's name of a torch dtype; None where it has none."""
    return CODES.get(str(dtype).removeprefix("torch."))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def save_tensors(
    path: Path,
    packed: Mapping[str, QuantTensor],
    plain: Mapping[str, torch.Tensor] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write packed weights (and ordinary tensors) to one file, whole or not at all. `Reader` reads it back.

    `extra` joins the description under our key. Raises OutputError, which names the file, if it cannot be written.
    """
    plain = plain or {}
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(packed.keys() | plain.keys()):
        parts = packed[name].parts if name in packed else {}
        tensors |= {part_name(name, part): parts[part] for part in PARTS if part in parts} or {name: plain[name]}
    unknown = {str(tensor.dtype) for tensor in tensors.values() if code_of(tensor.dtype) is None}
    if unknown:
        raise ModelError(f"safetensors files cannot hold {', '.join(sorted(unknown))}")
    order = sorted(tensors, key=lambda name: _rank(tensors[name]))  # stable: the given order otherwise
    layout = [(n, str(code_of(tensors[n].dtype)), tuple(tensors[n].shape), tensors[n].nbytes) for n in order]
    offsets = dict(zip(order, accumulate((nbytes for *_, nbytes in layout), initial=0), strict=False))
    about = {
        name: {
            "format": str(one.format),
            "shape": list(one.shape),
            "dtype": str(one.dtype).removeprefix("torch."),
            "crc32": "0" * 8,
        }
        for name, one in packed.items()
    }

    def header() -> bytes:
        description = {"version": VERSION, **(extra or {}), "weights": about}
        return header_bytes(layout, {"format": "pt", KEY: json.dumps(description)})

    try:
        with replacing(path) as file:
            start = len(header())

            def put(name: str) -> bytes:
                data = tensor_bytes(tensors[name])
                file.seek(start + offsets[name])
                file.write(data)
                return data

            for name, one in packed.items():
                value = 0
                for part in PARTS:
                    if part in one.parts:
                        value = zlib.crc32(put(part_name(name, part)), value)
                about[name]["crc32"] = f"{value:08x}"
            for name in plain:
                put(name)
            file.seek(0)
            file.write(header())
    except OSError as exc:
        raise OutputError(
            f"cannot write {path}: {exc.strerror or exc}",
            hint="nothing was changed; make room, or name another folder",
        ) from exc


def _rank(tensor: torch.Tensor) -> tuple[int, int]:
    """Readers map tensors in place, so each must start at a multiple of its element's size, and the format allows no
    gaps. Whatever is a multiple of four bytes long keeps the order it was given in (a block's tensors stay neighbours,
    and one read fetches them); the odd ones follow."""
    if tensor.dtype.itemsize == 8:
        return 0, 0
    return (1, 0) if tensor.nbytes % 4 == 0 else (2, -tensor.dtype.itemsize)


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
            lacking = sorted({part_name(name, part) for part in expected_parts(format, shape)} - self.names)
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
        value = 0
        for part in parts.values() if self.verify else ():
            value = zlib.crc32(tensor_bytes(part), value)
        if self.verify and f"{value:08x}" != crc:
            raise ModelError(
                f"{self.path}: the weight {name} is damaged (its checksum is not {crc})", hint="copy the file again"
            )
        return QuantTensor(format, shape, dtype, parts)
