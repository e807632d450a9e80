"""The doors of a fitted model: forward, state_dict, load_state_dict and to. All of them can be put back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from anytorch.errors import UsageError
from anytorch.memory.units import Unit

if TYPE_CHECKING:
    from anytorch.memory.rewriting import Loading
    from anytorch.memory.running import Running

RECORD = "_anytorch_doors"
ACTIVATIONS = "_anytorch_activations"  # what `checkpointing` put around blocks' forwards
COMPILER = "torch._dynamo"
Undo = Callable[[], None]


def attach(model: nn.Module, running: Running, loading: Loading) -> None:
    undo: list[Undo] = []
    model.__dict__[RECORD] = undo
    for unit in running.units:
        undo.append(_replace(unit.module, "forward", _forward(unit, unit.module.forward, running)))
    for owner, names in running.parked_slots().items():
        before = owner.register_state_dict_pre_hook(_shower(running, names))
        after = owner.register_state_dict_post_hook(_hider(running, names))
        undo += [before.remove, after.remove]
    slots = running.parked_slots()
    for module in model.modules():
        undo.append(module.register_load_state_dict_pre_hook(_filler(loading, slots.get(module, {}))).remove)
        undo.append(module.register_load_state_dict_post_hook(_keeper(loading)).remove)
    undo.append(_replace(model, "_apply", _apply(model, running)))
    undo.append(_replace(model, "__deepcopy__", _refuse_copy))


def detach(model: nn.Module) -> None:
    """Put every door back. Nothing of the model leads to what ran it any more, so each goes with its last user."""
    for undo in reversed(model.__dict__.pop(RECORD, [])):
        undo()
    around = model.__dict__.get(ACTIVATIONS, ())
    if any(one.streamed for _, one in around):  # they call forwards that were ours
        del model.__dict__[ACTIVATIONS]


def _replace(module: nn.Module, name: str, value: Any) -> Undo:
    """Set an attribute of the instance, over its class's. Undone by removing it, or by what the instance had itself."""
    had, before = name in module.__dict__, module.__dict__.get(name)
    module.__dict__[name] = value

    def undo() -> None:
        if had:
            module.__dict__[name] = before
        else:
            module.__dict__.pop(name, None)

    return undo


def _forward(unit: Unit, original: Callable[..., Any], running: Running) -> Callable[..., Any]:
    """A unit's forward with its weights' arrival around it.

    The arrival is no part of a graph: the compiler must not trace it, while the forward inside may be compiled. Saying so
    loads the compiler (70 MB, seconds), so it is said when a program has loaded it.
    """

    def unpack(saved: Any) -> torch.Tensor:
        return running.unpack(saved)

    def pack(tensor: torch.Tensor) -> Any:
        return running.pack(unit, tensor)

    def around(enter: Callable[[Unit], None], leave: Callable[[Unit], None]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            enter(unit)
            try:
                if torch.is_grad_enabled():
                    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                        return original(*args, **kwargs)
                return original(*args, **kwargs)
            finally:
                leave(unit)

        return forward

    plain = around(running.enter, running.leave)
    untraced: list[Callable[..., Any]] = []

    def make_untraced() -> Callable[..., Any]:
        if not untraced:
            disable: Any = torch.compiler.disable
            untraced.append(disable(around(disable(running.enter), disable(running.leave)), recursive=False))
        return untraced[0]

    make_untraced._torchdynamo_disable = True  # type: ignore[attr-defined]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return make_untraced()(*args, **kwargs)
        return plain(*args, **kwargs)

    return forward


def _shower(running: Running, names: Mapping[str, str]) -> Callable[..., None]:
    def show(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        running.show(module, names)

    return show


def _hider(running: Running, names: Mapping[str, str]) -> Callable[..., None]:
    def hide(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        running.hide(module, names)

    return hide


def _filler(loading: Loading, names: Mapping[str, str]) -> Callable[..., None]:
    def fill(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        loading.before(module, names, state, prefix, metadata)

    return fill


def _keeper(loading: Loading) -> Callable[..., None]:
    def keep(module: nn.Module, keys: Any) -> None:
        loading.after(module)

    return keep


def _refuse_copy(_: dict[int, Any]) -> NoReturn:
    raise UsageError(
        "a fitted model cannot be copied: it owns files, threads and memory",
        hint="copy it before fitting, or call anytorch.memory.unfit(model) first",
    )


def _apply(model: nn.Module, running: Running) -> Callable[..., nn.Module]:
    """`.to`, `.half`, `.cuda` and their like all come through here, with a function to apply to every tensor."""

    def apply(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for dtype in {p.dtype for p in model.parameters()}:
            probe = torch.empty(0, dtype=dtype, device=running.device)
            result = function(probe)
            if result.device != probe.device or result.dtype != probe.dtype:
                raise UsageError(
                    f"a fitted model stays on {probe.device} as {probe.dtype}; it was asked to become {result.dtype} on "
                    f"{result.device}",
                    hint="anytorch.memory.unfit(model) first, then move it and fit it again",
                )
        return model

    return apply
