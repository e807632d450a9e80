"""What a block's forward leaves for backward: kept, computed again, or moved to host memory.

anytorch.memory.activations(model, "checkpoint")    # the blocks' inputs are kept, the rest is computed again
anytorch.memory.activations(model, "offload")       # kept in host memory until backward comes
anytorch.memory.activations(model, "keep")          # torch's own way
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anytorch.errors import UsageError
from anytorch.memory.fitted_model import HANDLE
from anytorch.memory.fitting import fitted
from anytorch.memory.module_patches import ACTIVATIONS as RECORD
from anytorch.workers import start

WAYS = ("keep", "checkpoint", "offload")


def activations(model: nn.Module, way: str) -> int:
    """Set what a model's repeated blocks keep for backward; returns how many there are. Fit the model first."""
    if way not in WAYS:
        raise UsageError(f"way={way!r} is unknown; known: {', '.join(WAYS)}")
    restore(model)
    if way == "keep":
        return 0
    if way == "offload" and HANDLE in model.__dict__:
        _offload_of(model, True)  # the fitted model's own saved-tensor hooks do it: of two, only the inner is heard
        return len(repeated_blocks(model))
    if way == "checkpoint":
        load_compiler()
    made = [(block, Around(block, way, streamed=HANDLE in model.__dict__)) for block in repeated_blocks(model)]
    model.__dict__[RECORD] = made
    for block, around in made:
        block.__dict__["forward"] = around
    return len(made)


def _offload_of(model: nn.Module, on: bool) -> None:
    running = fitted(model).running
    assert running is not None
    running.offload = on


def load_compiler() -> None:
    """torch's checkpoint loads dynamo when it is first called. That import keeps the frames it was called from for ever, and
    with them the model whose forward was running: so it is done in a thread, whose frames hold nothing."""
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",), name="anytorch-import")
    start(thread)
    thread.join()


def restore(model: nn.Module) -> None:
    if HANDLE in model.__dict__:
        _offload_of(model, False)
    for block, around in model.__dict__.pop(RECORD, ()):
        around.give_back(block)


def restore_blocks(blocks: Iterable[nn.Module]) -> None:
    """The same for blocks whose model is gone."""
    for block in blocks:
        around = block.__dict__.get("forward")
        if isinstance(around, Around) and not around.streamed:
            around.give_back(block)


class Around:
    """Stands in for a block's `forward`."""

    def __init__(self, block: nn.Module, way: str, *, streamed: bool) -> None:
        self.block = block
        self.way = way
        self.streamed = streamed
        self.had = block.__dict__.get("forward")  # a fitted block has one of its own already

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        if self.way == "offload":
            with torch.autograd.graph.save_on_cpu(pin_memory=_pins(args)):
                return self._forward(*args, **kwargs)
        kwargs = without_cache(kwargs)
        if not self.streamed:
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        # A fitted block sees to its weights with saved-tensor hooks, and so does torch's newer checkpoint: of two, only the
        # inner one is heard. The older kind runs the block without a graph first, and needs an input with a gradient.
        ticket = torch.empty(0, requires_grad=True)
        return checkpoint(lambda _, *inputs: self._forward(*inputs, **kwargs), ticket, *args, use_reentrant=True)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Callable[..., Any] = self.had if self.had is not None else type(self.block).forward.__get__(self.block)
        return inner(*args, **kwargs)

    def give_back(self, block: nn.Module) -> None:
        if block.__dict__.get("forward") is self:
            if self.had is not None:
                block.__dict__["forward"] = self.had
            else:
                del block.__dict__["forward"]


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a block's arguments without its cache: a block that is computed twice would add keys and values to it twice."""
    emptied = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}
    return {key: emptied.get(key, value) if key in emptied else value for key, value in kwargs.items()}


def _pins(args: tuple[Any, ...]) -> bool:
    """Return True if an argument is on a device that is not the host: its copies go to pinned memory."""
    return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in args)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the outermost lists: what a transformer repeats. A Sequential counts if its layers have parts."""
    if _repeats(model):
        return list(model.children())
    return [block for child in model.children() for block in repeated_blocks(child)]


def _repeats(module: nn.Module) -> bool:
    layers = list(module.children())
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(layers) < 2 or len({type(c) for c in layers}) > 1:
        return False
    return isinstance(module, nn.ModuleList) or all(any(True for _ in layer.children()) for layer in layers)
