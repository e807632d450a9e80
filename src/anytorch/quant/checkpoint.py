"""Plain safetensors checkpoints, one file or a folder of them, read one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytorch.errors import ModelError
from anytorch.quant.linear import QuantLinear
from anytorch.quant.shards import INDEX, shard_files


class Checkpoint:
    """The tensors of a checkpoint by name."""

    def __init__(self, path: Path) -> None:
        import safetensors

        library: Any = safetensors
        self.path = path
        self.files: dict[str, Any] = {}
        self.prefix = ""
        for file in self._files():
            try:
                opened = library.safe_open(file, framework="pt")
            except (safetensors.SafetensorError, OSError) as exc:
                raise ModelError(
                    f"{file} is not a whole safetensors file: {exc}", hint="it was cut short or damaged: copy it again"
                ) from exc
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if (self.path / INDEX).is_file():
            return shard_files(self.path / INDEX)
        found = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else []
        if not found:
            pickles = sorted(self.path.glob("*.bin")) + sorted(self.path.glob("*.pt")) if self.path.is_dir() else []
            raise ModelError(
                f"there is no safetensors file at {self.path}",
                hint="convert the .bin or .pt file first: loading a pickle runs the code in it" if pickles else "",
            )
        return found

    def match(self, model: nn.Module) -> None:
        """Find the word that the checkpoint puts before all of the model's names, if any ("bert.", "model.")."""
        wanted = list(model.state_dict(keep_vars=True))
        if not wanted:
            return
        starts = {""} | {key.removesuffix(wanted[0]) for key in self.files if key.endswith(f".{wanted[0]}")}
        self.prefix = max(sorted(starts, key=len), key=lambda start: sum(start + name in self.files for name in wanted))

    def get(self, name: str) -> torch.Tensor:
        found = self.prefix + name
        if found not in self.files:
            raise ModelError(f"{self.path} has no tensor {found!r}")
        tensor: torch.Tensor = self.files[found].get_tensor(found)
        return tensor

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
