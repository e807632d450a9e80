"""Linear layers in few bits while a mode lasts, and their originals: on disk, and back in the same objects afterwards.

A layer that is packed leaves the model and waits here with a parked weight (`parked`), so that an optimizer, a hook or a
variable that refers to it still does when it returns. A packed model's `state_dict` shows the original values: what is
stored while a mode is on can be loaded where there is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import chain
from sys import getrefcount
from typing import Any

import torch
from torch import nn

from anytorch import settings
from anytorch.memory.parked import PARKED, park, wake
from anytorch.memory.reader import Reader
from anytorch.memory.spill import Spill
from anytorch.quant.conv1d import QuantConv1D, as_linear, kind_for, matrix_of
from anytorch.quant.formats import Format, parse
from anytorch.quant.linear import QuantLinear
from anytorch.quant.model import packable_layers, replace_module
from anytorch.quant.tensor import PARTS, pack
from anytorch.safetensors_files import StoredTensor

WEIGHT = "weight"
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass
class Kept:
    """A layer's original: the object, and where its weight is stored."""

    layer: nn.Module
    stored: dict[str, StoredTensor]
    parent: weakref.ref[nn.Module]  # not its name in the model: a part may outlive the whole
    child: str
    packed: QuantLinear | None = None  # what stands in its place

    def stands_in(self) -> QuantLinear | None:
        parent = self.parent()
        return self.packed if parent is not None and parent._modules.get(self.child) is self.packed else None


class Originals:
    """The linear layers of one model. `keep` stores them, `pack` puts packed ones in their places, `restore` undoes both."""

    def __init__(self, disk: str | None) -> None:
        self._spill = Spill(disk or settings.cache_folder() / "originals")
        self._kept: dict[str, Kept] = {}
        self._reader = Reader()

    def keep(self, model: nn.Module) -> None:
        """Write the weight of every layer that can be packed to disk."""
        for name, layer in _targets(model).items():
            parent, _, child = name.rpartition(".")
            stored = self._spill.write({WEIGHT: weight_of(layer).detach()})
            self._kept[name] = Kept(layer, stored, weakref.ref(model.get_submodule(parent)), child)

    def within(self, model: nn.Module) -> bool:
        """True if every layer that is kept has its place in this model."""
        modules = {id(module) for module in model.modules()}
        return all(id(kept.parent()) in modules for kept in self._kept.values())

    @property
    def trained(self) -> bool:
        """True if one of the layers wants a gradient: the packed ones in their places do not show it."""
        return any(weight_of(kept.layer).requires_grad for kept in self._kept.values())

    def pack(self, model: nn.Module, format: str) -> int:
        """Put packed layers in the places of those that were kept, one at a time; returns how many."""
        chosen = parse(format)
        for name, kept in self._kept.items():
            layer = kept.layer
            linear = as_linear(layer)
            kept.packed = kind_for(layer).of(linear, chosen, packed=pack(linear.weight, chosen, refine=True))
            show = ShowsOriginal(self, name)
            kept.packed.register_state_dict_post_hook(partial(show.saving))
            kept.packed.register_load_state_dict_pre_hook(partial(show.loading))
            # The same hooks: set or removed while either of the two is in the model, they count for both.
            for hooks in HOOKS:
                kept.packed.__dict__[hooks] = layer.__dict__[hooks]
            replace_module(model, name, kept.packed)
            park(weight_of(layer), linear.weight.device)
            del linear
        return len(self._kept)

    def value(self, name: str) -> torch.Tensor:
        """The original weight of a layer, read from disk, where its packed one is."""
        kept = self._kept[name]
        found = self._reader.read_tensors(kept.stored.values())[WEIGHT]
        place = kept.packed.codes.device if kept.packed is not None else weight_of(kept.layer).device
        dtype = kept.packed.dtype if kept.packed is not None else weight_of(kept.layer).dtype
        # A copy: the buffer is larger than the tensor, and page-aligned for the disk's sake.
        return found.to(place, dtype, copy=True)

    def changed(self, name: str, weight: torch.Tensor) -> None:
        """A new original, as `load_state_dict` brings it."""
        self._kept[name].stored = self._spill.write({WEIGHT: weight.detach()})

    def keeps_layers_of(self, modules: AbstractSet[int], *, standing: bool = False) -> bool:
        return any(
            id(kept.layer) in modules or (standing and kept.packed is not None and id(kept.packed) in modules)
            for kept in self._kept.values()
        )

    def restore_what_is_held(self) -> None:
        """The model is gone: give layers and weights that somebody still refers to their values, and the disk space back."""
        held = {}
        for name, kept in self._kept.items():
            # A layer is known to its `Kept`, a weight to its layer, and either to the call that counts.
            if getrefcount(kept.layer) > 2 or getrefcount(kept.layer._parameters[WEIGHT]) > 2:
                held[name] = kept
        self._kept = held
        self.restore()

    def restore(self) -> None:
        """Put the layers back with the values they had, also those that were only rounded; then give the disk space back."""
        try:
            for name, kept in self._kept.items():
                layer, weight = kept.layer, self.value(name)
                own = weight_of(layer)
                if isinstance(own, PARKED):
                    wake(own, weight)
                else:
                    own.data = weight
                parent, stands_in = kept.parent(), kept.stands_in()
                if stands_in is not None:
                    if stands_in.bias is not None and isinstance(layer.bias, nn.Parameter):
                        layer.bias.data = stands_in.bias.data  # moved, or changed by load_state_dict
                    layer.train(stands_in.training)
                    setattr(parent, kept.child, layer)
        finally:
            self.close()

    def close(self) -> None:
        self._reader.close()
        self._spill.close()
        self._kept = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept


class ShowsOriginal:
    """Hooks of a packed layer: state dicts hold the original weight. A copy of the layer has packed weights of its own."""

    def __init__(self, originals: Originals | None, name: str) -> None:
        self._originals = weakref.ref(originals) if originals is not None else None
        self._name = name

    def _kept(self) -> Originals | None:
        originals = self._originals() if self._originals is not None else None
        return originals if originals is not None and self._name in originals else None

    def saving(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        originals = self._kept()
        if originals is not None:
            for part in (*PARTS, "input_scale"):
                state.pop(prefix + part, None)
            state[prefix + WEIGHT] = originals.value(self._name)

    def loading(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Values for the original become the original's and, packed, the layer's."""
        originals = self._kept()
        weight = state.get(prefix + WEIGHT)
        assert isinstance(module, QuantLinear)
        if originals is None or not isinstance(weight, torch.Tensor):
            return
        transposed = isinstance(module, QuantConv1D)
        matrix = weight.T if transposed and weight.ndim == 2 else weight
        if tuple(matrix.shape) != (module.out_features, module.in_features):
            return  # torch says of the missing parts what does not fit
        del state[prefix + WEIGHT]
        weight = weight.detach().to(module.codes.device, module.dtype)
        originals.changed(self._name, weight)
        matrix = weight.T.contiguous() if transposed else weight
        for part, values in pack(matrix, module.format, refine=True).parts.items():
            state[prefix + part] = values

    def __reduce__(self) -> tuple[type[ShowsOriginal], tuple[None, str]]:
        return ShowsOriginal, (None, "")


def weight_of(layer: nn.Module) -> torch.Tensor:
    weight = layer._parameters[WEIGHT]
    assert weight is not None
    return weight


def _targets(model: nn.Module) -> dict[str, nn.Module]:
    """The layers to pack: not those whose forward a program has replaced."""
    return {name: layer for name, layer in packable_layers(model)[0].items() if "forward" not in layer.__dict__}


def packed_nbytes(model: nn.Module, format: str) -> int:
    """What a model takes once its linear layers are packed."""
    chosen: Format = parse(format)
    linear = {id(weight_of(layer)): matrix_of(layer) for layer in _targets(model).values()}
    packed = sum(chosen.nbytes(*matrix.shape) for matrix in linear.values())
    return packed + sum(tensor.nbytes for tensor in tensors_of(model) if id(tensor) not in linear)


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer of a model, once."""
    seen: set[int] = set()
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor
