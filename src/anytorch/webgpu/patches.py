"""What torch does for its own devices in C++ and has no hook for: patches that let this device behave like them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from anytorch.webgpu.tensors import is_ours

# --- model.to("webgpu") moves a module's parameters without replacing them, as it does on CUDA ------------------------
#
# torch gives a parameter new contents in place only between the devices it lists in C++ (has_compatible_shallow_copy_type),
# and ours cannot be on that list. Otherwise it makes a new Parameter per place: weights used in two places (the embedding
# and the output layer of most language models) come apart, and an optimizer made before goes on training the old ones. So
# the tensors behind the two objects are exchanged, and the Parameter stays the one that everybody holds.

Convert = Callable[[torch.Tensor], torch.Tensor]
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.parameter.UninitializedParameter)
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Moving:
    """What `Module._apply` calls for every tensor: `convert`, and for a parameter that changes devices the exchange."""

    def __init__(self, convert: Convert) -> None:
        self.convert = convert

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self.convert(tensor)
        if not isinstance(tensor, torch.nn.Parameter) or type(tensor) not in PLAIN or type(moved) not in PLAIN:
            return moved  # a buffer; or a subclass, which knows by itself how it is moved
        if is_ours(tensor) == is_ours(moved) or "meta" in (tensor.device.type, moved.device.type):
            return moved
        grad = tensor.grad
        exchange(tensor, moved)
        if grad is not None:
            tensor.grad = self.convert(grad)
        return tensor


def exchange(parameter: torch.nn.Parameter, moved: torch.Tensor) -> None:
    """Make `parameter` the tensor `moved`; its old contents go, its attributes and hooks stay."""
    other = torch.nn.Parameter(moved, parameter.requires_grad)
    if parameter.requires_grad and not torch.nn.parameter.is_lazy(parameter) and not parameter.is_inference():
        # A graph made before the move would add to the gradient of a tensor that nobody can see any more.
        with torch.inference_mode(False):  # in which a parameter seems to have no place in a graph
            torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_refuse)
    torch._C._swap_tensor_impl(parameter, other)
    for name in HOOKS:
        hooks = getattr(parameter, name)
        if hooks:
            setattr(parameter, name, hooks)  # tells the new tensor of them


def _refuse(gradients: Any) -> None:
    raise RuntimeError(
        "this graph was made before its parameters were moved to another device: run the forward pass again, "
        "or call backward() before to()"
    )


def patch_modules() -> None:
    original: Any = torch.nn.Module._apply

    @wraps(original)
    def apply(self: torch.nn.Module, fn: Convert, recurse: bool = True) -> Any:
        return original(self, fn if isinstance(fn, Moving) else Moving(fn), recurse)

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


# --- pin_memory() and DataLoader(pin_memory=True) go on working once the device is registered --------------------------
#
# torch asks the one accelerator of the process for page-locked memory, and a device written in Python has no way to answer:
# without this, every pinned DataLoader in the process raises. WebGPU uploads through staging buffers of its own and gains
# nothing from locked pages, so an ordinary copy is what it needs.

_said = False


def pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A plain copy; the first one says so, for a process that also uses another GPU loses a little by it."""
    global _said
    if not _said:
        _said = True
        warnings.warn(
            "pin_memory() makes ordinary copies while the webgpu device is registered: torch asks that device for "
            "page-locked memory, which WebGPU neither has nor needs",
            stacklevel=2,
        )
    return tensor.clone()


# --- print(tensor): torch works out widths and precisions in float64, which no shader has, with a dozen small ops -------


def patch_formatter() -> None:
    """Look at the numbers on the CPU. The formatter is given at most a thousand of them: large tensors are cut before."""
    formatter: Any = torch._tensor_str._Formatter
    original = formatter.__init__

    def initialise(self: Any, tensor: torch.Tensor) -> None:
        original(self, tensor.detach().cpu() if is_ours(tensor) else tensor)

    formatter.__init__ = initialise


def register(library: torch.library.Library) -> None:
    patch_modules()
    patch_formatter()
    library.impl("_pin_memory", pin, "CPU")
