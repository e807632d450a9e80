"""Saving a quantized model and loading it again: one safetensors file, described in docs/reference/quant-format.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytorch.errors import ModelError, UsageError
from anytorch.quant.choose import Prefer
from anytorch.quant.container import Reader, save_tensors
from anytorch.quant.linear import QuantLinear
from anytorch.quant.model import replace_module, set_tensor
from anytorch.quant.tensor import PARTS

FILE = "model.safetensors"


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a model with packed layers to `folder`/model.safetensors, whole or not at all; returns the file.

    Only tensors are stored. Whoever loads it builds the model first, by the same code that built this one.
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
            raise ModelError(f"the state of the model holds {name}, which is no tensor and cannot be stored")
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
    Raises ModelError, before the model is changed, if the file does not fit it.
    """
    path = Path(folder)
    reader = Reader(path / FILE if path.is_dir() else path, verify=verify)
    shared: dict[str, str] = dict(reader.extra.get("shared", {}))
    _compare(model, reader, shared)
    for name in reader.packed:
        owner = name.rpartition(".")[0]
        linear = model.get_submodule(owner)
        packed = reader.get_packed(name)
        assert isinstance(linear, nn.Linear)
        layer = QuantLinear.of(linear, packed.format, prefer=prefer, packed=packed)
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
        if not isinstance(module, nn.Linear):
            found = "no such layer" if module is None else type(module).__name__
            raise ModelError(f"{reader.path} holds the packed weight {name}; the model has {found} there")
        if (module.out_features, module.in_features) != shape:
            raise ModelError(
                f"{reader.path}: {name} is {shape}; the model's is {(module.out_features, module.in_features)}"
            )
    state = model.state_dict(keep_vars=True)
    stored = {name for name in reader.plain if not name.endswith(".input_scale")}
    missing = sorted(state.keys() - stored - reader.packed.keys() - shared.keys())
    extra = sorted(stored - state.keys())
    if missing or extra:
        said = [f"lacks {', '.join(missing[:5])}"] if missing else []
        said += [f"holds {', '.join(extra[:5])}, which the model has not"] if extra else []
        raise ModelError(f"{reader.path} does not fit the model: it {' and '.join(said)}")
    for name in stored:
        wanted, found_shape = tuple(state[name].shape), reader.tensors[name].shape
        if wanted != found_shape:
            raise ModelError(f"{reader.path}: {name} is {found_shape}; the model's is {wanted}")
