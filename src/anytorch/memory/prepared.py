"""What a mode does to one model, step by step, and how each step is undone.

A step that does not apply to a model leaves a sentence that says why (`left`). Prepared by the mode itself, when a model
first runs, a step that fails is such a sentence, too: turning a mode on breaks no program. `ActiveMode.apply` raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from anytorch import logs
from anytorch.devices.memory import memory
from anytorch.devices.precision import autocast_dtype
from anytorch.memory.checkpointing import activations, repeated_blocks, restore
from anytorch.memory.fitted_model import HANDLE
from anytorch.memory.fitting import fit, unfit
from anytorch.memory.mode_table import Mode
from anytorch.memory.originals import Originals, packed_nbytes, tensors_of
from anytorch.memory.sizes import words

log = logs.logger(__name__)
Phase = Literal["training", "gradients", "inference"]
OWN_OPTIMIZER = (
    "anytorch.memory.TieredOptimizer trains a streamed model; "
    "torch's own optimizers cannot update weights that are not there"
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
    """One model under a mode. Refers to the model weakly: it goes with its last user, mode or no mode."""

    def __init__(self, model: nn.Module, mode: Mode, device: torch.device, disk: str | None, *, asked: bool) -> None:
        self._model = weakref.ref(model)
        self.name = type(model).__name__
        self.mode = mode
        self.device = device
        self.disk = disk
        self.asked = asked  # by `apply`: failures are raised, and the phase is the caller's
        self.phase: Phase | None = None
        self.trained = False
        self.autocast: torch.dtype | None = None  # for the length of a call
        self._elsewhere: torch.device | None = None  # where it runs, if that is not the mode's device
        self.did: dict[str, Any] = {}
        self.left: dict[str, str] = {}  # step → why not
        self._undo: list[tuple[str, Callable[[nn.Module], object]]] = []
        self._originals: Originals | None = None

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    def describe(self) -> dict[str, Any]:
        what: dict[str, Any] = {"model": self.name, **self.did}
        if self.autocast is not None:
            what["autocast"] = str(self.autocast).removeprefix("torch.")
        return what | ({"not applied": dict(self.left)} if self.left else {})

    def explain(self) -> str:
        done = [f"{step}: {what}" for step, what in self.describe().items() if step not in ("model", "not applied")]
        lines = [f"{self.name}: {'; '.join(done) or 'nothing was changed'}"]
        return "\n".join(lines + [f"  {step}: no, {why}" for step, why in self.left.items()])

    # --- undoing ---------------------------------------------------------------------------------------------------

    def step(self, name: str, what: Any, undo: Callable[[nn.Module], object]) -> None:
        self.did[name] = what
        self._undo.append((name, undo))

    def undo(self, down_to: str | None = None) -> None:
        """Undo the steps, the last one first: all of them, or as far as the one named."""
        model = self.model
        if model is None:
            self.forget()
            return
        while self._undo:
            name, undo = self._undo.pop()
            self.did.pop(name, None)
            undo(model)
            if name == down_to:
                return
        self.autocast = None

    def forget(self) -> None:
        """The model is gone: what lies on disk for it goes, too."""
        self._undo.clear()
        if self._originals is not None:
            self._originals.close()
            self._originals = None

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
        self.phase, self.left, self._elsewhere = phase, {}, None
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
            self.left["attention"] = f"it stays as the model spells it out: {exc}"
            return
        self.step("attention", "sdpa", lambda it: it.set_attn_implementation(before))  # type: ignore[operator]

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
        if phase == "gradients":
            return "gradients are computed; call it under torch.no_grad() for packed weights"
        return _why_not_changed(model)

    def _pack(self, model: nn.Module, format: str, budget: int | None) -> str | None:
        """Pack the linear layers where the model then fits; else the format that those which stream may rest in."""
        before = sum(tensor.nbytes for tensor in tensors_of(model))
        fits = budget is None or packed_nbytes(model, format) <= budget
        originals = self._originals = Originals(self.disk)
        self.step("weights", format, self._restore_originals)
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

    def _restore_originals(self, model: nn.Module) -> None:
        originals, self._originals = self._originals, None
        if originals is not None:
            originals.restore(model)

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
            self.step("streamed", what, unfit)
            return
        if at_home:
            return
        model.to(self.device)
        if len(there) == 1:
            home = there.pop()
            self.step("moved", str(self.device), lambda it: it.to(home))

    def stream(self, model: nn.Module, budget: int) -> None:
        """Bring a model that the device cannot hold to it block by block, in place of a move that could not succeed."""
        size = sum(tensor.nbytes for tensor in tensors_of(model))
        fit(model, self.device, device_budget=budget, disk=self.disk, training=model.training)
        self.step("streamed", {"budget": budget, "size": size, "optimizer": OWN_OPTIMIZER}, unfit)

    def _checkpoints(self, model: nn.Module, phase: Phase) -> None:
        if not self.mode.checkpointing or phase != "training" or "checkpointed blocks" in self.did:
            return
        why = _why_not_changed(model, distributed=False)
        if why or not repeated_blocks(model):
            self.left["checkpointing"] = why or "it has no list of repeated blocks (torch.nn.ModuleList, Sequential)"
            return
        self.step("checkpointed blocks", activations(model, "checkpoint"), restore)

    def _precision(self, model: nn.Module, phase: Phase) -> None:
        self.autocast = None
        if not self.mode.mixed_precision:
            return
        name = autocast_dtype(self.device)
        floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if name is None:
            self.left["mixed precision"] = f"no dtype is faster than float32 on this {self.device.type}"
        elif floats and torch.float32 not in floats:
            self.left["mixed precision"] = f"its weights are {', '.join(sorted(map(str, floats)))}"
        elif name == "float16" and phase == "training":
            self.left["mixed precision"] = "float16 gradients need torch.amp.GradScaler, which is the program's to call"
        else:
            self.autocast = getattr(torch, name)


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
