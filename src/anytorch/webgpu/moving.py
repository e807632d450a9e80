"""`model.to("webgpu")` moves a module's parameters without replacing them, as it does on CUDA.

torch gives a parameter new contents in place only between the devices it lists in C++ (`has_compatible_shallow_copy_type`),
and ours cannot be on that list. Otherwise it makes a new Parameter per place: weights used in two places (the embedding and
the output layer of most language models) come apart, and an optimizer made before goes on training the old ones. So the
tensors behind the two objects are exchanged, and the Parameter stays the one that everybody holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from anytorch.webgpu.tensors import is_ours

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
    if parameter.requires_grad and not torch.nn.parameter.is_lazy(parameter):
        # A graph made before the move would add to the gradient of a tensor that nobody can see any more.
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
