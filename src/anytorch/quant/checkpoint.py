"""Plain safetensors checkpoints, one file or a folder of them, read one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from anytorch.errors import ModelError
from anytorch.quant.linear import QuantLinear
from anytorch.safetensors_files import locate_tensors, map_file, mapped_tensor


class Checkpoint:
    """The tensors of a checkpoint by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = locate_tensors(path)
        self.prefix = ""
        self._mapped: dict[str, torch.Tensor] = {}

    def match(self, model: nn.Module) -> None:
        """Find the word that the checkpoint puts before all of the model's names, if any ("bert.", "model.")."""
        wanted = list(model.state_dict(keep_vars=True))
        if not wanted:
            return
        starts = {""} | {key.removesuffix(wanted[0]) for key in self.tensors if key.endswith(f".{wanted[0]}")}
        self.prefix = max(
            sorted(starts, key=len), key=lambda start: sum(start + name in self.tensors for name in wanted)
        )

    def get(self, name: str) -> torch.Tensor:
        found = self.prefix + name
        if found not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {found!r}")
        file = self.tensors[found].path
        if file not in self._mapped:
            self._mapped[file] = map_file(file)
        return mapped_tensor(self.tensors[found], self._mapped[file])

    def fill(self, module: nn.Module, name: str) -> None:
        """Give a module's own parameters and buffers the checkpoint's values."""
        for own, parameter in module.named_parameters(recurse=False):
            self._assign(module, own, parameter, f"{name}.{own}" if name else own)
        for own, buffer in module.named_buffers(recurse=False):
            full = f"{name}.{own}" if name else own
            if own not in module._non_persistent_buffers_set:
                self._assign(module, own, buffer, full)
            elif buffer.is_meta:
                raise ModelError(
                    f"the buffer {full} is made by the model's own code and not stored; on the meta device it is lost",
                    hint="build the model on a real device (its Linear layers alone may be on meta)",
                )

    def _assign(self, module: nn.Module, own: str, old: torch.Tensor, full: str) -> None:
        value = self.get(full)
        if value.shape != old.shape:
            raise ModelError(f"{self.path}: {full} is {tuple(value.shape)}; the model has {tuple(old.shape)}")
        if not old.is_meta:
            with torch.no_grad():
                old.copy_(value)
        elif isinstance(old, nn.Parameter):
            setattr(module, own, nn.Parameter(value.clone(), requires_grad=old.requires_grad))
        else:
            setattr(module, own, value.clone())

    def fill_rest(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if not isinstance(module, QuantLinear):
                self.fill(module, name)
