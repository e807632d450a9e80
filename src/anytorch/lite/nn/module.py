"""Module: something with parameters.

There is no registry. A module's state is what its attributes hold: a `Parameter` is learned, any other tensor is a buffer
(kept and saved, not learned), and a module is a part with a state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from anytorch.errors import ModelError
from anytorch.lite.autograd import make, no_grad
from anytorch.lite.device import CustomDevice
from anytorch.lite.moving import on_device
from anytorch.lite.tensors import CustomTensor


class Parameter(CustomTensor):
    """A tensor that is learned."""

    def __init__(self, data: Any, device: CustomDevice | str | None = None, dtype: Any = None) -> None:
        super().__init__(data, device, dtype, requires_grad=True)


class Module:
    """Base of all layers: `forward` is what subclasses write, calling the module is what users do."""

    training = True

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.forward(*inputs, **options)

    # --- what it holds -----------------------------------------------------------------------------------------------

    def members(self) -> Iterable[tuple[str, Any]]:
        return vars(self).items()

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((name, value) for name, value in self.members() if isinstance(value, Module))

    def modules(self) -> Iterator[Module]:
        yield self
        for _, child in self.named_children():
            yield from child.modules()

    def named_tensors(self, prefix: str = "") -> Iterator[tuple[str, CustomTensor]]:
        """Parameters and buffers with their full names: "encoder.0.weight"."""
        for name, value in self.members():
            if isinstance(value, CustomTensor):
                yield prefix + name, value
        for name, child in self.named_children():
            yield from child.named_tensors(f"{prefix}{name}.")

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        seen: set[int] = set()  # a tensor that two layers share is one parameter
        for name, value in self.named_tensors():
            if isinstance(value, Parameter) and id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def parameters(self) -> list[Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    # --- what is done with it ----------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Any:
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Any:
        return self.train(False)

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def to(self, device: CustomDevice | str) -> Any:
        """Move every tensor, in place."""
        for _, value in self.named_tensors():
            moved = value.detach().to(device)
            value.data, value.device, value.grad = moved.data, moved.device, None
        return self

    def apply(self, function: Callable[[Module], Any]) -> Any:
        for module in self.modules():
            function(module)
        return self

    # --- saving and loading ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, CustomTensor]:
        """Every tensor by its name. They share memory with the module."""
        return {name: value.detach() for name, value in self.named_tensors()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take over the numbers of another module of this shape: ours, arrays, or a torch `state_dict()` as it is."""
        own = dict(self.named_tensors())
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if strict and (missing or unexpected):
            raise ModelError(
                f"the state does not fit {type(self).__name__}: "
                f"missing {', '.join(missing) or 'none'}; unexpected {', '.join(unexpected) or 'none'}",
                hint="load_state_dict(state, strict=False) loads what matches",
            )
        arrays = {name: as_array(state[name]) for name in own.keys() & state.keys()}
        for name, host in arrays.items():  # all are looked at before any is changed
            if host.shape != own[name].shape:
                raise ModelError(f"{name}: the state has shape {host.shape}, the module {own[name].shape}")
        with no_grad():
            for name, host in arrays.items():
                target = own[name]
                target.copy_(make_beside(target, host))

    def __repr__(self) -> str:
        inner = "".join(
            f"\n  ({name}): {repr(child).replace(chr(10), chr(10) + '  ')}" for name, child in self.named_children()
        )
        return f"{type(self).__name__}({self.describe()}{inner}{chr(10) if inner else ''})"

    def describe(self) -> str:
        """The arguments to show in `repr`."""
        return ""


def make_beside(target: CustomTensor, host: Any) -> CustomTensor:
    out: CustomTensor = make(target, on_device(np.asarray(host, target.dtype), target.device))
    return out


def as_array(value: Any) -> Any:
    """A tensor of ours, an array, or torch's (recognised by its methods: torch is never imported here)."""
    if isinstance(value, CustomTensor):
        return value.detach().numpy()
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value  # NumPy has no bfloat16
        return value.numpy()
    return np.asarray(value)


class Sequential(Module):
    """One layer after the other."""

    def __init__(self, *layers: Module) -> None:
        self.layers = list(layers)

    def members(self) -> Iterable[tuple[str, Any]]:
        return ((str(i), layer) for i, layer in enumerate(self.layers))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def __getitem__(self, i: int) -> Module:
        return self.layers[i]

    def __setitem__(self, i: int, layer: Module) -> None:
        self.layers[i] = layer

    def __len__(self) -> int:
        return len(self.layers)


class ModuleList(Sequential):
    """Layers in a list, for a forward of your own."""

    def __init__(self, layers: Iterable[Module]) -> None:
        super().__init__(*layers)

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError("a ModuleList is not called; loop over its layers")

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers)
