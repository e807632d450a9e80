"""Safetensors files with packed weights in them: written tensor by tensor, read back strictly. The format is described in
docs/reference/quant-format.md.

The library's own `save_file` wants every tensor's bytes in host memory at once. Here the file is laid out first and filled
in one tensor at a time; the header, which carries a checksum per weight, goes in last, and only then does the file get its
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytorch.errors import ModelError, OutputError, UsageError
from anytorch.files import parse_json, replacing
from anytorch.native.sums import crc32
from anytorch.quant.choose import Prefer
from anytorch.quant.conv1d import as_linear, is_conv1d, kind_for, matrix_of
from anytorch.quant.formats import Format, parse
from anytorch.quant.linear import QuantLinear
from anytorch.quant.model import replace_module, set_tensor
from anytorch.quant.tensor import PARTS, QuantTensor, expected_parts
from anytorch.safetensors_files import CODES, header_bytes, is_shape, read_header, stored_tensor

KEY = "anytorch.quant"  # in the header's __metadata__; its value is JSON
VERSION = 1
FILE = "model.safetensors"


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
                        value = crc32(put(part_name(name, part)), value)
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

    def _description(
        self, text: str | None
    ) -> tuple[dict[str, Any], dict[str, tuple[Format, tuple[int, ...], torch.dtype, str]]]:
        if text is None:
            raise ModelError(
                f"{self.path} holds no weights packed by anytorch (no {KEY!r} in its header)",
                hint="a plain checkpoint is quantized with anytorch.quant.quantize(model, format, weights=path)",
            )
        try:
            data = parse_json(text)
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
                if not is_shape(entry["shape"]):
                    raise ValueError(f"{name} has an invalid shape")
                packed[name] = (parse(entry["format"]), tuple(entry["shape"]), dtype, str(entry["crc32"]))
                expected_parts(*packed[name][:2])  # of a shape that is a matrix
        except ModelError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as exc:
            raise ModelError(f"the header of {self.path} cannot be understood: {exc!r}") from exc
        for name, (format, shape, _, _) in packed.items():
            lacking = sorted({part_name(name, part) for part in expected_parts(format, shape)} - self.names)
            if lacking:
                raise ModelError(f"{self.path} lists the weight {name}, but lacks {', '.join(lacking)}")
        return {key: value for key, value in data.items() if key not in ("version", "weights")}, packed

    @property
    def plain(self) -> list[str]:
        """The names of the tensors that are stored as they are."""
        parts = {part_name(name, part) for name in self.packed for part in PARTS}
        return sorted(self.names - parts)

    def get(self, name: str) -> torch.Tensor:
        return stored_tensor(self.tensors[name])

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
        for tensor in parts.values() if self.verify else ():
            value = crc32(tensor_bytes(tensor), value)
        if self.verify and f"{value:08x}" != crc:
            raise ModelError(
                f"{self.path}: the weight {name} is damaged (its checksum is not {crc})", hint="copy the file again"
            )
        return QuantTensor(format, shape, dtype, parts)


# --- whole models -----------------------------------------------------------------------------------------------------


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a model with packed layers to `folder`/model.safetensors, whole or not at all; returns the file.

    Only tensors are stored. To load it, first build the model with the code that built this one.
    Raises OutputError, which names the file and the reason, if it cannot be written.
    """
    path = Path(folder) / FILE
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    if not layers:
        raise UsageError(
            "this model has no packed layers to save", hint="call anytorch.quant.quantize(model, format) first"
        )
    own = {f"{name}.{part}" if name else part for name in layers for part in PARTS}
    plain: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in own:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"the state of the model holds {name}, which is not a tensor and cannot be stored")
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and place in first:  # tied weights: stored once
            shared[name] = first[place]
            continue
        first[place] = name
        plain[name] = tensor.detach()
    packed = {f"{name}.weight" if name else "weight": layer.packed for name, layer in layers.items()}
    save_tensors(path, packed, plain, {"shared": shared})
    return path


def load(model: nn.Module, folder: str | Path, *, prefer: Prefer = "memory", verify: bool = True) -> nn.Module:
    """Fill a model of the same architecture (it may be on the meta device) with what `save` wrote; returns the model.

    Its `nn.Linear` layers become packed ones where the file says so. Every checksum is verified unless `verify=False`.
    Raises ModelError, before the model is changed, if the file does not fit it. If a weight is damaged or cannot be read,
    some layers are packed already when it is raised; the same call fills such a model, too.
    """
    path = Path(folder)
    reader = Reader(path / FILE if path.is_dir() else path, verify=verify)
    shared: dict[str, str] = reader.extra.get("shared", {})
    _compare(model, reader, shared)
    for name in reader.packed:
        owner = name.rpartition(".")[0]
        there = model.get_submodule(owner)
        packed = reader.get_packed(name)
        linear = there if isinstance(there, QuantLinear) else as_linear(there)
        layer = kind_for(there).of(linear, packed.format, prefer=prefer, packed=packed)
        layer.dtype = packed.dtype
        if f"{owner}.input_scale" in reader.names:
            layer.input_scale = reader.get(f"{owner}.input_scale")
        replace_module(model, owner, layer)
    for name in reader.plain:
        if not name.endswith(".input_scale"):
            owner, _, own = name.rpartition(".")
            set_tensor(model.get_submodule(owner), own, reader.get(name))
    for name, other in shared.items():
        owner, _, own = other.rpartition(".")
        target, _, last = name.rpartition(".")
        setattr(model.get_submodule(target), last, getattr(model.get_submodule(owner), own))
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise ModelError(
            f"the buffers {', '.join(lost)} are made by the model's own code and not stored; on the meta device they are "
            "lost",
            hint="build the model on a real device",
        )
    return model


def _compare(model: nn.Module, reader: Reader, shared: dict[str, str]) -> None:
    modules = dict(model.named_modules())
    for name, (_, shape, _, _) in reader.packed.items():
        module = modules.get(name.rpartition(".")[0])
        if module is None or not (isinstance(module, (nn.Linear, QuantLinear)) or is_conv1d(module)):
            found = "no such layer" if module is None else type(module).__name__
            raise ModelError(f"{reader.path} holds the packed weight {name}; the model has {found} there")
        size = (
            (module.out_features, module.in_features)
            if isinstance(module, QuantLinear)
            else tuple(matrix_of(module).shape)
        )
        if size != shape:
            raise ModelError(f"{reader.path}: {name} is {shape}; the model's is {size}")
        scale = reader.tensors.get(f"{name.rpartition('.')[0]}.input_scale")
        if scale is not None and scale.shape != size[1:]:
            raise ModelError(f"{reader.path}: {scale.name} is {scale.shape}; {name} has {size[1]} inputs")
    if not isinstance(shared, dict) or not all(isinstance(other, str) for other in shared.values()):
        raise ModelError(f"{reader.path}: its table of shared tensors is invalid", hint="copy the file again")
    packed = [name for name, module in modules.items() if isinstance(module, QuantLinear)]  # by a call that failed
    own = {f"{name}.{part}" if name else part for name in packed for part in (*PARTS, "input_scale")}
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in own}
    stored = {name for name in reader.plain if not name.endswith(".input_scale")}
    missing = sorted(state.keys() - stored - reader.packed.keys() - shared.keys())
    extra = sorted(stored - state.keys())
    if missing or extra:
        said = [f"lacks {', '.join(missing[:5])}"] if missing else []
        said += [f"holds {', '.join(extra[:5])}, which the model lacks"] if extra else []
        raise ModelError(f"{reader.path} does not fit the model: it {' and '.join(said)}")
    for name, other in shared.items():
        if name not in state or other not in stored or name in reader.packed or name in stored:
            raise ModelError(
                f"{reader.path}: it says that {name!r} shares {other!r}, but one of them is missing or stored twice"
            )
    for name in [*stored, *shared]:
        wanted, found_shape = tuple(state[name].shape), reader.tensors[shared.get(name, name)].shape
        if wanted != found_shape:
            raise ModelError(f"{reader.path}: {name} is {found_shape}; the model's is {wanted}")
