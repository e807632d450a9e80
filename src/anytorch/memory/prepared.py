"""What a mode does to one model, step by step, and how each step is undone.

A step that does not apply to a model leaves a sentence that says why (`left`). Prepared by the mode itself, when a model
first runs, a step that fails is such a sentence, too: turning a mode on breaks no program. `ActiveMode.apply` raises.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from anytorch import logs
from anytorch.devices.memory import memory
from anytorch.devices.precision import autocast_dtype
from anytorch.memory import casts
from anytorch.memory.checkpointing import activations, repeated_blocks, restore, restore_blocks
from anytorch.memory.fitted_model import HANDLE
from anytorch.memory.fitting import fit, unfit
from anytorch.memory.mode_table import Mode
from anytorch.memory.originals import Originals, packed_nbytes, tensors_of
from anytorch.memory.sizes import words

log = logs.logger(__name__)
_counting = threading.Lock()
Phase = Literal["training", "gradients", "inference"]
OWN_OPTIMIZER = (
    "anytorch.memory.TieredOptimizer trains a streamed model; "
    "torch's own optimizers cannot update weights that are not on the device"
)


def device_budget(mode: Mode, device: torch.device, model: nn.Module | None = None) -> int | None:
    """Bytes a model may keep on the device, what it has there already included; None if the free memory is unknown."""
    free = memory(device).free
    if free is None:
        return None
    there = 0 if model is None else sum(t.nbytes for t in tensors_of(model) if same_place(t.device, device))
    return int((free + there) * mode.device_share)


def same_place(one: torch.device, other: torch.device) -> bool:
    """Two names of one device: "cuda" is the card that is current."""
    if one.type != other.type or one.type == "cpu":
        return one.type == other.type
    current = torch.accelerator.current_device_index() if None in (one.index, other.index) else 0
    return (one.index if one.index is not None else current) == (other.index if other.index is not None else current)


class Prepared:
    """One model under a mode. Refers to the model weakly: it goes with its last user, mode or no mode.

    Its parts may outlive it, as a model does that was called in a wrapper made for that call. `gone` is called when the last
    of them is no more.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Mode,
        device: torch.device,
        disk: str | None,
        *,
        asked: bool,
        gone: Callable[[Prepared], object],
    ) -> None:
        self._model = weakref.ref(model)
        counted = partial(_count_down, weakref.ref(self))
        # Linear layers do not count: those that are packed are kept here.
        parts = [part for part in model.modules() if part is model or type(part) is not nn.Linear]
        self._parts = [weakref.ref(part, counted) for part in parts]
        self._living, self._gone = len(parts), gone
        self.name = type(model).__name__
        self.mode = mode
        self.device = device
        self.disk = disk
        self.asked = asked  # by `apply`: failures are raised, and the phase is the caller's
        self.phase: Phase | None = None
        self.trained = False
        self.calls = 0  # that are under way, in all threads
        self.held = False  # calls wait for the mode's lock
        self.shared = False  # layers with another model, where packed ones cannot stand in their places
        self.autocast: torch.dtype | None = None  # for the length of a call
        self._elsewhere: torch.device | None = None  # where it runs, if that is not the mode's device
        self.did: dict[str, Any] = {}
        self.left: dict[str, str] = {}  # step → why not
        self._undo: list[tuple[str, Callable[[nn.Module], object], Callable[[list[nn.Module]], object]]] = []
        self._originals: Originals | None = None

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    @property
    def parts(self) -> list[nn.Module]:
        """What is left of the model."""
        return [part for one in self._parts if (part := one()) is not None]

    def shares_parts_with(self, model: nn.Module) -> bool:
        modules = {id(module) for module in model.modules()}
        return any(id(part) in modules for part in self.parts) or self.packed_layers_of(modules)

    def has_any_of(self, modules: AbstractSet[int]) -> bool:
        model = self.model
        found = any(id(module) in modules for module in (model.modules() if model is not None else self.parts))
        return found or self.packed_layers_of(modules)

    def packed_layers_of(self, modules: AbstractSet[int], *, standing: bool = False) -> bool:
        """Whether any of these is a layer that waits here while a packed one stands in its place; `standing`: or is that."""
        return self._originals is not None and self._originals.keeps_layers_of(modules, standing=standing)

    @property
    def wants_gradients(self) -> bool:
        return self.trained or self.phase in ("training", "gradients")

    def count_call(self, change: int) -> None:
        with _counting:
            self.calls += change

    def unpack(self) -> None:
        """Give the weights back. A call without gradients packs them again, unless they are shared with another model."""
        self.undo("weights")
        self.phase = None

    def describe(self) -> dict[str, Any]:
        what: dict[str, Any] = {"model": self.name, **self.did}
        if self.autocast is not None:
            what["autocast"] = str(self.autocast).removeprefix("torch.")
            model = self.model
            if model is not None and (kept := casts.held_nbytes(model)):
                what["rounded weights"] = {"nbytes": kept}
        return what | ({"not applied": dict(self.left)} if self.left else {})

    def explain(self) -> str:
        done = [f"{step}: {what}" for step, what in self.describe().items() if step not in ("model", "not applied")]
        lines = [f"{self.name}: {'; '.join(done) or 'nothing was changed'}"]
        return "\n".join(lines + [f"  {step}: no, {why}" for step, why in self.left.items()])

    # --- undoing ---------------------------------------------------------------------------------------------------

    def step(
        self, name: str, what: Any, undo: Callable[[nn.Module], object], undo_parts: Callable[[list[nn.Module]], object]
    ) -> None:
        """Note a step that was done, how it is undone, and how it is undone for what is left of a model."""
        self.did[name] = what
        self._undo.append((name, undo, undo_parts))

    def undo(self, down_to: str | None = None) -> None:
        """Undo the steps, the last one first: all of them, or as far as the one named."""
        model = self.model
        while self._undo:
            name, undo, undo_parts = self._undo.pop()
            self.did.pop(name, None)
            if model is not None:
                undo(model)
            else:
                undo_parts(self.parts)
            if name == down_to:
                return
        self.autocast = None
        for part in [model] if model is not None else self.parts:
            casts.release(part)

    def take_over(self, other: Prepared) -> None:
        """What was done to parts of this model, when they were called by themselves or in another one, is undone; packed
        weights are only taken over where the other model is gone: that is a wrapper for each call, as a rule."""
        model = self.model
        assert model is not None
        self.trained = self.trained or other.trained
        originals = other._originals
        if other.model is None and originals is not None and len(other._undo) == 1 and originals.within(model):
            other._originals = None
            self._originals = originals
            self.step("weights", other.did["weights"], self._restore_originals, self._restore_originals)
            other._undo.clear()
        other.undo()

    def forget(self) -> None:
        """The model is gone: what lies on disk for it goes, too."""
        self._undo.clear()
        originals, self._originals = self._originals, None
        if originals is not None:
            originals.restore_what_is_held()

    # --- doing -----------------------------------------------------------------------------------------------------

    def phase_of(self, model: nn.Module) -> Phase:
        """What a call of the model is about: training, gradients of another kind (eval mode), or inference."""
        if torch.is_grad_enabled() and (
            any(parameter.requires_grad for parameter in model.parameters())
            or (self._originals is not None and self._originals.trained)
        ):
            return "training" if model.training else "gradients"
        return "inference"

    def is_ready_for(self, model: nn.Module) -> bool:
        """True if nothing needs to be done before this call of the model, or of a part of it."""
        if self.held:
            return False
        if self.asked:
            return True
        if self._elsewhere is not None:  # until it comes to the device
            return next(tensors_of(model)).device == self._elsewhere
        phase = self.phase_of(model)
        return phase == self.phase or (phase == "inference" and self.phase is not None and self.model is not model)

    def leave_alone(self, why: str, phase: Phase) -> None:
        model = self.model
        assert model is not None
        self.phase, self.left = phase, {"everything": why}
        place = next(tensors_of(model)).device
        self._elsewhere = None if same_place(place, self.device) else place

    def prepare(self, phase: Phase) -> None:
        """Every step of the mode for this phase, in an order in which each finds what it needs.

        A model that is trained gets its weights back first if they are packed, and is not packed again.
        """
        model = self.model
        assert model is not None
        self.phase, self.left, self._elsewhere = None, {}, None
        self.trained = self.trained or phase == "training"
        if "weights" in self.did and phase != "inference":
            self.undo("weights")
        elif self.mode.weights and phase == "inference" and "weights" not in self.did and not self.trained:
            self.undo()  # packed weights come before everything else
        try:
            for step in (self._attention, self._weights_and_place, self._checkpoints, self._precision):
                before = len(self._undo)
                try:
                    step(model, phase)
                except Exception as exc:
                    if self.asked:
                        raise
                    name = step.__name__.strip("_").replace("_", " ")
                    log.warning(
                        "mode %s: %s of %s failed: %s: %s", self.mode.name, name, self.name, type(exc).__name__, exc
                    )
                    self.left[name] = (str(exc) or repr(exc)).splitlines()[0]
                    while len(self._undo) > before:
                        self.undo(self._undo[-1][0])
        except BaseException:
            self.undo()
            raise
        self.phase = phase  # not before: another thread's call waits until all of this is done
        log.info("mode %s: %s", self.mode.name, self.describe())

    def _attention(self, model: nn.Module, phase: Phase) -> None:
        """Models of transformers that spell attention out are switched to torch's function; others are left alone."""
        if not self.mode.fused_attention or "attention" in self.did:
            return
        switch = getattr(model, "set_attn_implementation", None)
        before = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if switch is None or before != "eager":
            return
        try:
            switch("sdpa")
        except (ValueError, ImportError) as exc:
            self.left["attention"] = f"the model's own attention code is used: {exc}"
            return

        def back(it: Any) -> None:
            it.set_attn_implementation(before)

        def back_in_parts(parts: list[nn.Module]) -> None:
            for part in parts:
                if hasattr(part, "set_attn_implementation"):
                    back(part)

        self.step("attention", "sdpa", back, back_in_parts)

    def _weights_and_place(self, model: nn.Module, phase: Phase) -> None:
        if "streamed" in self.did or "weights" in self.did:
            return
        if HANDLE in model.__dict__:
            self.left["weights"] = "the program fitted the model itself (anytorch.memory.fit)"
            return
        budget = device_budget(self.mode, self.device, model)
        rest_format = None
        if self.mode.weights:
            why = self._why_not_packed(model, phase)
            if why:
                self.left["weights"] = why
            else:
                rest_format = self._pack(model, self.mode.weights, budget)
        self._place(model, phase, budget, rest_format)

    def _why_not_packed(self, model: nn.Module, phase: Phase) -> str:
        if phase == "training" or self.trained:
            return "weights in few bits cannot be trained, and this model is"
        if self.shared:
            return "another model that runs has some of its layers"
        if phase == "gradients":
            return "gradients are computed; call it under torch.no_grad() for packed weights"
        return _why_not_changed(model)

    def _pack(self, model: nn.Module, format: str, budget: int | None) -> str | None:
        """Pack the linear layers where the model then fits; else the format that those which stream may rest in."""
        before = sum(tensor.nbytes for tensor in tensors_of(model))
        fits = budget is None or packed_nbytes(model, format) <= budget
        originals = self._originals = Originals(self.disk)
        self.step("weights", format, self._restore_originals, self._restore_originals)
        originals.keep(model)
        if not fits:  # packed layers do not move; weights that do may rest in as few bits
            return format
        count = originals.pack(model, format)
        if not count:
            self.undo("weights")
            self.left["weights"] = "it has no torch.nn.Linear of its own"
            return None
        after = sum(tensor.nbytes for tensor in tensors_of(model))
        self.did["weights"] = {"format": format, "layers": count, "nbytes": after, "nbytes before": before}
        return None

    def _restore_originals(self, _: object) -> None:
        originals, self._originals = self._originals, None
        if originals is not None:
            originals.restore()

    def _place(self, model: nn.Module, phase: Phase, budget: int | None, rest_format: str | None) -> None:
        there = {tensor.device for tensor in tensors_of(model)}
        size = sum(tensor.nbytes for tensor in tensors_of(model))
        at_home = all(same_place(device, self.device) for device in there)
        if budget is not None and size > budget:
            if at_home and phase != "inference" and not self.asked:
                # It runs as it is, with an optimizer of torch's own.
                self.left["streaming"] = f"it is on {self.device} already and is trained there; {OWN_OPTIMIZER}"
                return
            why = _why_not_changed(model)
            if why and not self.asked:
                self.left["streaming"] = why
                return
            training = phase == "training"
            fit(model, self.device, device_budget=budget, disk=self.disk, rest_format=rest_format, training=training)
            what = {"budget": budget, "size": size} | ({"optimizer": OWN_OPTIMIZER} if training else {})
            self.step("streamed", what, unfit, self._cannot_bring_back)
            return
        if at_home:
            return
        model.to(self.device)
        if len(there) == 1:
            home = there.pop()
            self.step(
                "moved", str(self.device), lambda it: it.to(home), lambda parts: [part.to(home) for part in parts]
            )

    def stream(self, model: nn.Module, budget: int) -> None:
        """Bring a model that the device cannot hold to it block by block, in place of a move that could not succeed."""
        size = sum(tensor.nbytes for tensor in tensors_of(model))
        fit(model, self.device, device_budget=budget, disk=self.disk, training=model.training)
        what = {"budget": budget, "size": size, "optimizer": OWN_OPTIMIZER}
        self.step("streamed", what, unfit, self._cannot_bring_back)

    def _cannot_bring_back(self, parts: list[nn.Module]) -> None:
        """Warn that weights are lost: only the whole model knew where they stream from."""
        log.warning(
            "mode %s: the weights of %d parts of a streamed %s were freed with it; keep it while its parts are used",
            self.mode.name, len(parts), self.name,
        )  # fmt: skip

    def _checkpoints(self, model: nn.Module, phase: Phase) -> None:
        if not self.mode.checkpointing or phase != "training" or "checkpointed blocks" in self.did:
            return
        why = _why_not_changed(model, distributed=False)
        if why or not repeated_blocks(model):
            self.left["checkpointing"] = why or "it has no list of repeated blocks (torch.nn.ModuleList, Sequential)"
            return
        self.step("checkpointed blocks", activations(model, "checkpoint"), restore, restore_blocks)

    def _precision(self, model: nn.Module, phase: Phase) -> None:
        self.autocast = None
        casts.release(model)
        if not self.mode.mixed_precision:
            return
        name = autocast_dtype(self.device)
        floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if name is None:
            self.left["mixed precision"] = f"no dtype is faster than float32 on this {self.device.type}"
        elif floats and torch.float32 not in floats:
            self.left["mixed precision"] = f"its weights are {', '.join(sorted(map(str, floats)))}"
        elif name == "float16" and phase == "training":
            self.left["mixed precision"] = "float16 gradients need torch.amp.GradScaler, called by the program"
        else:
            self.autocast = getattr(torch, name)
            if phase == "inference" and "streamed" not in self.did and HANDLE not in model.__dict__:
                self._keep_rounded(model, self.autocast)

    def _keep_rounded(self, model: nn.Module, dtype: torch.dtype) -> None:
        budget = device_budget(self.mode, self.device, model)
        more = sum(weight.numel() for weight in casts.layers_of(model).values()) * dtype.itemsize
        if budget is not None and sum(tensor.nbytes for tensor in tensors_of(model)) + more > budget:
            self.left["weights kept in " + str(dtype).removeprefix("torch.")] = (
                f"{words(more)} more would exceed the budget of {words(budget)}; each call rounds them again"
            )
            return
        casts.hold(model, dtype)


def _count_down(prepared: weakref.ref[Prepared], _: object) -> None:
    one = prepared()
    if one is not None:
        one._living -= 1
        if not one._living:
            one.forget()
            one._gone(one)


def _why_not_changed(model: nn.Module, *, distributed: bool = True) -> str:
    """Why the modules of a model must not be replaced; "" if they may be."""
    if any(_is_compiled(module) for module in model.modules()):
        return "it is compiled; mode.apply(model) before torch.compile prepares it"
    if distributed and type(model).__module__.startswith(("torch.nn.parallel", "torch.distributed")):
        return f"{type(model).__name__} holds its weights in an order of its own"
    return ""


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def in_words(mode: Mode, budget: int | None) -> str:
    """What a mode asks of every model, in a sentence."""
    parts = [
        "mixed precision" if mode.mixed_precision else "",
        "fused attention" if mode.fused_attention else "",
        "checkpointed blocks in training" if mode.checkpointing else "",
        f"{mode.weights} weights in inference" if mode.weights else "",
        f"weights stream beyond {words(budget)}" if budget is not None else "",
    ]
    return ", ".join(part for part in parts if part)
