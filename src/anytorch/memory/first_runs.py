"""Seeing models when they first run: every call of a module that is within no other module's call passes here.

`watch` puts functions in the places of `nn.Module.__call__`, `to`, `train` and `requires_grad_`, and of what
`torch.func.functional_call` calls, for the length of a mode; outside of a mode torch's own are there. Calls within calls
cost one look at a thread's flag.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import stateless

from anytorch.memory.running import in_backward


class Watcher(Protocol):
    def run(
        self, model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any: ...

    def move(self, model: nn.Module, device: torch.device) -> bool: ...

    def will_train(self, model: nn.Module) -> None: ...

    def will_transform(self, model: nn.Module) -> None: ...

    def will_replace(self, model: nn.Module, names: Iterable[str], *, under_way: bool) -> None: ...


_inside = threading.local()
_watcher: Watcher | None = None
_hidden = False
_plain_call: Any = nn.Module.__call__
_plain_to: Any = nn.Module.to
_plain_train: Any = nn.Module.train
_plain_requires_grad: Any = nn.Module.requires_grad_
_plain_functional: Any = stateless._functional_call


class NotWatched:
    """`with NotWatched():` the calls of this thread do not count as a model's first run."""

    def __enter__(self) -> None:
        self._before = getattr(_inside, "on", False)
        _inside.on = True

    def __exit__(self, *_: object) -> None:
        _inside.on = self._before


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    watcher = _watcher
    if getattr(_inside, "on", False) or watcher is None:
        return _plain_call(self, *args, **kwargs)
    if not _is_ordinary(self):
        if _transformed() and not torch.compiler.is_compiling() and not in_backward():
            watcher.will_transform(self)
        return _plain_call(self, *args, **kwargs)
    _hide_from_compiler()
    _inside.on = True
    try:
        return watcher.run(self, _plain_call, args, kwargs)
    finally:
        _inside.on = False


def _hide_from_compiler() -> None:
    """The compiler enters a compiled model through its __call__, and is to go on to the forward behind it.

    It is not loaded for that: whoever compiles a model has loaded it, and calls the compiled model first.
    """
    global _hidden
    if not _hidden and (compiler := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        compiler.skip_code(_call.__code__)
        _hidden = True


def _to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    watcher = _watcher
    if watcher is None or getattr(_inside, "on", False):
        return _plain_to(self, *args, **kwargs)
    parsed: Any = torch._C._nn._parse_to(*args, **kwargs)  # a device or None, a dtype or None, …
    device, dtype = parsed[:2]
    with NotWatched():
        if device is None or dtype is not None or not watcher.move(self, device):
            return _plain_to(self, *args, **kwargs)
    return self


def _train(self: nn.Module, mode: bool = True) -> nn.Module:
    watcher = _watcher
    if mode and watcher is not None and not getattr(_inside, "on", False):
        with NotWatched():
            watcher.will_train(self)
    trained: nn.Module = _plain_train(self, mode)
    return trained


def _requires_grad(self: nn.Module, requires_grad: bool = True) -> nn.Module:
    watcher = _watcher
    if watcher is not None and not getattr(_inside, "on", False):
        with NotWatched():
            watcher.will_train(self)
    changed: nn.Module = _plain_requires_grad(self, requires_grad)
    return changed


def _functional(module: nn.Module, parameters_and_buffers: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.func.functional_call`: what it puts in for one call is not the model's, and is not prepared."""
    watcher = None if torch.compiler.is_compiling() else _watcher
    if watcher is None:
        return _plain_functional(module, parameters_and_buffers, *args, **kwargs)
    under_way = getattr(_inside, "on", False)
    if _transformed() and not under_way:
        watcher.will_transform(module)
    watcher.will_replace(module, parameters_and_buffers, under_way=under_way)
    with NotWatched():
        return _plain_functional(module, parameters_and_buffers, *args, **kwargs)


def _transformed() -> bool:
    # None outside of torch.func's transforms, which torch's stubs do not know.
    transform: Any = torch._C._functorch.peek_interpreter_stack()
    return transform is not None


def _is_ordinary(module: nn.Module) -> bool:
    """False for a call that is not the program's own: traced, transformed, computed again in backward, or a replica."""
    traced: Any = torch._C._get_tracing_state()  # None outside of a tracer
    if traced is not None or _transformed() or torch.compiler.is_compiling() or in_backward():
        return False
    if getattr(module, "_is_replica", False):
        return False
    # `functional_call` puts tensors in the places of parameters for one call.
    own = (value for part in module.modules() for value in part._parameters.values() if value is not None)
    first = next(own, None)
    return first is None or (isinstance(first, nn.Parameter) and not isinstance(first, UninitializedParameter))


def watch(watcher: Watcher) -> None:
    global _watcher, _plain_call, _plain_to, _plain_train, _plain_requires_grad, _plain_functional
    if nn.Module.__call__ is not _call:
        _plain_call = nn.Module.__call__
        setattr(nn.Module, "__call__", _call)  # noqa: B010  (a method, to the type checker)
    if nn.Module.to is not _to:
        _plain_to = nn.Module.to
        setattr(nn.Module, "to", _to)  # noqa: B010
    if nn.Module.train is not _train:
        _plain_train = nn.Module.train
        setattr(nn.Module, "train", _train)  # noqa: B010
    if nn.Module.requires_grad_ is not _requires_grad:
        _plain_requires_grad = nn.Module.requires_grad_
        setattr(nn.Module, "requires_grad_", _requires_grad)  # noqa: B010
    if stateless._functional_call is not _functional:
        _plain_functional = stateless._functional_call
        stateless._functional_call = _functional
    _watcher = watcher


def unwatch() -> None:
    """Take the functions away; one that somebody has put another in front of stays, and does nothing."""
    global _watcher
    _watcher = None
    for name, ours, plain in (
        ("__call__", _call, _plain_call),
        ("to", _to, _plain_to),
        ("train", _train, _plain_train),
        ("requires_grad_", _requires_grad, _plain_requires_grad),
    ):
        if getattr(nn.Module, name) is ours:
            setattr(nn.Module, name, plain)
    if stateless._functional_call is _functional:
        stateless._functional_call = _plain_functional
