"""Replace forward, state_dict, load_state_dict and to of a fitted model's modules; `detach` restores them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from anytorch.errors import UsageError
from anytorch.memory.parked import PARKED, park, wake
from anytorch.memory.running import Running, held_by
from anytorch.memory.units import Unit

if TYPE_CHECKING:
    from anytorch.memory.fitted_model import Fitted

RECORD = "_anytorch_doors"
ACTIVATIONS = "_anytorch_activations"  # what `checkpointing` put around blocks' forwards
COMPILER = "torch._dynamo"
Undo = Callable[[], None]


def attach(model: nn.Module, running: Running, loading: StateLoading) -> None:
    undo: list[Undo] = []
    model.__dict__[RECORD] = undo
    for unit in running.units:
        undo.append(_replace(unit.module, "forward", _forward(unit, unit.module.forward, running)))
    slots = running.parked_slots()
    for owner, names in slots.items():
        undo.append(owner.register_state_dict_pre_hook(partial(running.show, names)).remove)
        undo.append(owner.register_state_dict_post_hook(partial(running.hide, names)).remove)
    for module in model.modules():
        names = slots.get(module, {})
        undo.append(module.register_load_state_dict_pre_hook(partial(loading.before, names)).remove)
        undo.append(module.register_load_state_dict_post_hook(loading.after).remove)
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

    def pack(tensor: torch.Tensor) -> Any:
        return running.pack(unit, tensor)

    def around(enter: Callable[[Unit], None], leave: Callable[[Unit], None]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            enter(unit)
            try:
                if torch.is_grad_enabled():
                    with torch.autograd.graph.saved_tensors_hooks(pack, running.unpack):
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


def _refuse_copy(_: dict[int, Any]) -> NoReturn:
    raise UsageError(
        "a fitted model cannot be copied: it owns files, threads and memory",
        hint="copy it before fitting, or call anytorch.memory.unfit(model) first",
    )


def _apply(model: nn.Module, running: Running) -> Callable[..., nn.Module]:
    """`.to`, `.half`, `.cuda` and similar calls all come through here, with a function to apply to every tensor."""

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


class StateLoading:
    """What torch's `load_state_dict` does to parameters that are not there: their new values wait in memory, a block's at a
    time, and are written to its home when all of them have come, or at the end."""

    def __init__(self, fit: Fitted) -> None:
        self.fit = fit
        self._top: nn.Module | None = None  # the module whose load_state_dict was called
        self._awake: dict[nn.Module, list[tuple[str, str]]] = {}  # owner → (parameter's name, block)
        self._new: dict[str, dict[str, torch.Tensor]] = {}

    def before(
        self, names: Mapping[str, str], module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any
    ) -> None:
        """The parameters that the state has values for show them, so that torch's own copying does no harm."""
        if not prefix:
            self._top = module
            self._forget_broken_off()
        for name, block in names.items():
            parameter = held_by(module, name)
            values = state.get(f"{prefix}{name}")
            if not isinstance(values, torch.Tensor) or not isinstance(parameter, PARKED):
                continue
            if metadata.get("assign_to_params_buffers"):
                raise UsageError(
                    "load_state_dict(assign=True) would replace the parameters of a fitted model",
                    hint="leave assign out: the values are then copied into the fitted model",
                )
            if values.shape == parameter.shape:  # torch says so if not
                wake(parameter, values.detach().to("cpu", parameter.dtype, copy=True))
                self._awake.setdefault(module, []).append((name, block))

    def _forget_broken_off(self) -> None:
        """A load that an exception ended left parameters awake; listed twice, a placeholder would count as a new value."""
        for module, waiting in self._awake.items():
            for name, _ in waiting:
                parameter = held_by(module, name)
                if not isinstance(parameter, PARKED):
                    park(parameter, self.fit.device)
        self._awake.clear()
        self._new.clear()

    def after(self, module: nn.Module, _: Any) -> None:
        running = self.fit.running
        assert running is not None
        for name, block in self._awake.pop(module, ()):
            parameter = held_by(module, name)
            values = parameter.data
            park(parameter, self.fit.device)
            collected = self._new.setdefault(block, {})
            collected[running.path_of(parameter, block)] = values
            if len(collected) == len(self.fit.found.groups[block].parameters):
                self._write(block)
        if module is self._top:
            self._top = None
            for waiting in list(self._new):
                self._write(waiting)

    def _write(self, block: str) -> None:
        mover = self.fit.mover
        mover.begin_change(block)
        try:
            self.fit.write_back(block, self._new.pop(block))
        finally:
            mover.end_change(block)
