"""The full-precision weights of layers that a mode quantizes, kept on disk so that leaving the mode gives back every bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from anytorch import settings
from anytorch.memory.reader import Reader
from anytorch.memory.spill import Spill
from anytorch.safetensors_files import StoredTensor


@dataclass(frozen=True)
class Kept:
    """Where a layer's tensors are, and what is needed to make the layer anew."""

    located: dict[str, StoredTensor]
    device: torch.device
    trained: bool
    training: bool


class Originals:
    """Written before the layers are replaced; nothing of them stays in memory."""

    def __init__(self, disk: str | None) -> None:
        self._spill = Spill(disk or settings.cache_folder() / "originals")
        self._kept: dict[str, Kept] = {}

    def keep(self, model: nn.Module) -> None:
        for name, layer in linear_layers(model):
            tensors = {key: tensor.detach() for key, tensor in layer.named_parameters(recurse=False)}
            self._kept[name] = Kept(
                self._spill.write(tensors), layer.weight.device, layer.weight.requires_grad, layer.training
            )

    def restore(self, model: nn.Module) -> None:
        """Put plain layers back where the model has others now, and their values where only those changed; then give the
        disk space back."""
        reader = Reader()
        try:
            for name, kept in self._kept.items():
                parent, _, own = name.rpartition(".")
                there, layer = model.get_submodule(name), _layer(kept, reader)
                if type(there) is nn.Linear:
                    for key, parameter in there.named_parameters(recurse=False):
                        parameter.data = layer.get_parameter(key).data
                else:
                    setattr(model.get_submodule(parent), own, layer)
        finally:
            reader.close()
            self._spill.close()


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear)


def _layer(kept: Kept, reader: Reader) -> nn.Linear:
    tensors = reader.read_tensors(kept.located.values())
    weight = tensors["weight"]
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in tensors, device="meta")
    for key, tensor in tensors.items():
        # A copy: the buffer is larger than the tensor, and page-aligned for the disk's sake.
        setattr(layer, key, nn.Parameter(tensor.to(kept.device, copy=True), requires_grad=kept.trained))
    return layer.train(kept.training)
