"""When an op may be computed at once instead of being taken apart into ops that autograd and others know."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_grad = torch.is_grad_enabled


def unwatched(*tensors: torch.Tensor | None) -> bool:
    """Nobody wants a gradient, and no mode, transform or tensor subclass must see the ops this one is made of.

    Nor is any a lazily negated view: an op registered above autograd gets those as they are.
    """
    if _modes() or forward_ad._current_level >= 0 or _transform() is not None:
        return False
    grad = _grad()
    for tensor in tensors:
        if tensor is not None:
            kind = type(tensor)
            if (
                (grad and tensor.requires_grad)
                or tensor.is_neg()
                or (kind is not torch.Tensor and kind is not Parameter)
            ):
                return False
    return True
