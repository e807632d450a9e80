"""One block's step of the optimizer, on the CPU where the block rests: by our own loop or by torch's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anytorch.memory.buffers import parts_of
from anytorch.memory.fused import MOMENTS, Update, can_do, kind_of
from anytorch.memory.fused import step as step_natively
from anytorch.memory.rewriting import write_back
from anytorch.memory.shelf import Tensors
from anytorch.memory.states import OF, States

if TYPE_CHECKING:
    from anytorch.memory.handle import Fitted

Factory = Callable[..., torch.optim.Optimizer]
Options = Sequence[Mapping[str, Any]]  # of every parameter group


class BlockStep:
    """`groups`: the parameter group of every (block, path) that is trained."""

    def __init__(self, fitted: Fitted, factory: Factory, groups: Mapping[tuple[str, str], int], states: States) -> None:
        self._fitted = fitted
        self._factory = factory
        self._groups = groups
        self._states = states
        self._kind = kind_of(factory)

    def __call__(self, block: str, gradients: Tensors, scale: torch.Tensor | None, options: Options) -> None:
        """Update a block's weights at home and its states. `scale` is what clipping multiplies gradients by."""
        with torch.no_grad():
            if not self._natively(block, gradients, scale, options):
                self._by_torch(block, gradients, scale, options)

    def _natively(self, block: str, gradients: Tensors, scale: torch.Tensor | None, options: Options) -> bool:
        """By our own loop, where it gives the bits of torch's. False, with nothing changed, where it does not."""
        host = self._fitted.rest.host
        if self._kind is None or block not in host:
            return False
        states, pieces = self._states.take(block), host[block]
        views = {view.name: view for view in self._fitted.images[block].views}
        updates = []
        for path, gradient in gradients.items():
            state = {key: states[name] for key in (*MOMENTS, "step") if (name := f"{path}{OF}{key}") in states}
            view = views[path]
            dtype: torch.dtype = getattr(torch, view.dtype)
            weight = [part.view(dtype) for part in parts_of(pieces, view.offset, view.nbytes)]
            update = Update(weight, gradient, state, options[self._groups[block, path]])
            if not can_do(self._kind, update):
                return False
            updates.append(update)
        step_natively(self._kind, updates, None if scale is None else float(scale), torch.get_num_threads())
        self._states.put(block, states)
        return True

    def _by_torch(self, block: str, gradients: Tensors, scale: torch.Tensor | None, options: Options) -> None:
        resting = self._fitted.rest.tensors(block)
        home = self._fitted.rest.host.get(block, [])
        # Weights that lie in host memory in one piece are updated where they are; others in a copy that is written back.
        weights = {path: t if lies_in(t := resting[path], home) else t.clone() for path in gradients}
        shadows = {path: nn.Parameter(weight) for path, weight in weights.items()}
        for path, shadow in shadows.items():
            shadow.grad = gradients[path] if scale is None else gradients[path] * scale
        optimizer = self._optimizer(block, shadows, options)
        self._states.lend(block, optimizer, shadows)
        optimizer.step()
        self._states.take_back(block, optimizer, shadows)
        copies = {path: shadow.detach() for path, shadow in shadows.items() if not lies_in(shadow, home)}
        if copies:
            write_back(self._fitted, block, copies)

    def _optimizer(self, block: str, shadows: Mapping[str, nn.Parameter], options: Options) -> torch.optim.Optimizer:
        """Over one block's weights on the CPU, with the options of the groups they belong to."""
        members: dict[int, list[nn.Parameter]] = {}
        for path, shadow in shadows.items():
            members.setdefault(self._groups[block, path], []).append(shadow)
        return self._factory([{**options[index], "params": mine} for index, mine in sorted(members.items())])


def lies_in(tensor: torch.Tensor, pieces: list[torch.Tensor]) -> bool:
    address = tensor.data_ptr()
    return any(piece.data_ptr() <= address < piece.data_ptr() + piece.numel() for piece in pieces)


def tried(factory: Factory, options: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """An optimizer's defaults, and how many tensors it keeps for each parameter: seen by letting it take one step."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = factory([parameter], **options)
    optimizer.step()
    kept = optimizer.state[parameter].values()
    return optimizer.defaults, sum(isinstance(value, torch.Tensor) and value.dim() > 0 for value in kept)
