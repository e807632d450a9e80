"""Three modes, `speed`, `balanced` and `memory`: what each does to the process and to every model that runs in it.

    with anytorch.mode("memory"):
        model(x)        # found when it first runs: weights in 4 bits, streamed if the budget is too small
        model.train()   # and now: weights as they were, blocks checkpointed
    # the process and the model are as they were

A mode is data (`mode_table`); every step of applying one comes with the step that undoes it (`prepared`). Nothing is claimed
that is not set: `describe()` asks the process, the device and the models what is in force.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anytorch import limits, logs
from anytorch.devices.choose import resolve
from anytorch.devices.memory import memory
from anytorch.devices.precision import autocast_dtype
from anytorch.errors import BudgetTooSmall, UsageError, did_you_mean
from anytorch.memory import casts, first_runs
from anytorch.memory.fitted_model import HANDLE
from anytorch.memory.mode_table import MODES, PRECISIONS, Mode
from anytorch.memory.originals import tensors_of
from anytorch.memory.prepared import Phase, Prepared, device_budget, in_words, same_place
from anytorch.quant.formats import parse
from anytorch.quant.linear import QuantLinear
from anytorch.workers import start

log = logs.logger(__name__)

# Flash attention first, the plain one last: it must stay allowed, for not every shape and dtype has a fused kernel.
FUSED_FIRST = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@contextmanager
def matmul_precision(wanted: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention_kernel(device: torch.device) -> str:
    """The kernel torch takes for a usual attention on this device: "flash", "efficient", "cudnn", "math" or "own"."""
    name = autocast_dtype(device)
    dtype = getattr(torch, name) if name else torch.float32
    q = torch.zeros(1, 4, 64, 64, dtype=dtype, device=device)
    try:
        chosen = SDPBackend(torch._fused_sdp_choice(q, q, q))
    except NotImplementedError:
        return "own"  # a device with a kernel of its own for the whole function, as ours
    return chosen.name.removesuffix("_ATTENTION").lower()


class ActiveMode(AbstractContextManager["ActiveMode"]):
    """A mode in force. Leaving its `with` block (or `off()`) puts the process and its models back as they were."""

    def __init__(self, mode: Mode, device: str | torch.device = "auto") -> None:
        self.mode = mode
        self.device = resolve(device).device
        self._stack = ExitStack()
        self._lock = threading.RLock()
        # By the id of the module that is called: a model, or a part of one that is called by itself.
        self._known: dict[int, Prepared | None] = {}
        self._prepared: list[Prepared] = []

    def on(self) -> ActiveMode:
        global _active
        with _switching:
            if _active is not None:
                raise UsageError(
                    f"mode {self.mode.name!r} cannot be turned on while {_active.mode.name!r} is on",
                    hint="leave the first `with anytorch.mode(...)` block, or call its off()",
                )
            if self.mode.fused_attention:
                self._stack.enter_context(sdpa_kernel(FUSED_FIRST, set_priority=True))
            self._stack.enter_context(matmul_precision(self.mode.matmul_precision))
            casts.watch()
            first_runs.watch(self)
            _active = self
        return self

    def off(self) -> None:
        """Undo everything, models included, the last one first. Calling it twice is harmless."""
        global _active
        with _switching:
            if _active is not self:
                return
            _active = None
            first_runs.unwatch()
            casts.unwatch()
            self._stack.close()
            failures = []
            with self._lock:
                while self._prepared:
                    try:
                        self._prepared.pop().undo()
                    except Exception as exc:  # noqa: BLE001  (raised once the other models have been put back)
                        failures.append(exc)
                self._known.clear()
            if failures:
                raise failures[0]

    __enter__ = on

    def __exit__(self, *exc: object) -> None:
        self.off()

    # --- a model that was named --------------------------------------------------------------------------------------

    def apply(
        self, model: torch.nn.Module, *, training: bool | None = None, disk: str | None = None
    ) -> torch.nn.Module:
        """Prepare a model for this mode now, before it runs, and put it on the device; returns the same module.

        `training` (the model's own state by default) keeps the weights in their dtype: four-bit weights cannot be trained.
        `disk` names a folder for the originals of quantized weights and for what does not fit elsewhere.
        """
        with self._lock, first_runs.NotWatched():
            before = self._known.get(id(model))
            if before is not None and before.asked:
                raise UsageError(f"this {type(model).__name__} was prepared for mode {self.mode.name!r} already")
            if before is not None:
                before.undo()
                self._prepared.remove(before)
            prepared = self._new(model, disk, asked=True)
            trains = model.training if training is None else training
            prepared.prepare("training" if trains else "inference")
            self._remember(model, prepared)
        return model

    # --- models that run ---------------------------------------------------------------------------------------------

    def run(self, model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a model; the first time it is prepared, and again when training begins or ends."""
        prepared = self._begin_call(model)
        try:
            dtype = prepared.autocast if prepared is not None else None
            if dtype is None or torch.is_autocast_enabled(self.device.type):  # the program has an autocast of its own
                return call(model, *args, **kwargs)
            with torch.autocast(self.device.type, dtype=dtype):
                result = call(model, *args, **kwargs)
            return in_float32(result, dtype)
        finally:
            if prepared is not None:
                prepared.count_call(-1)

    def _begin_call(self, model: nn.Module) -> Prepared | None:
        """What a call of this model runs with, counted as its user: no other thread packs or moves weights under it."""
        known: Prepared | None = self._known.get(id(model), _UNKNOWN)
        if known is None:
            return None
        if known is not _UNKNOWN:
            known.count_call(1)  # before the look whether it is ready, as `_alone` holds calls up before it counts them
            if known.is_ready_for(model):
                return known
            known.count_call(-1)
        with self._lock:
            known = self._known.get(id(model), _UNKNOWN)
            prepared = self._first_run(model) if known is _UNKNOWN else known
            whole = prepared.model if prepared is not None else None
            if prepared is not None and whole is not None and not prepared.is_ready_for(model):
                phase = prepared.phase_of(model)
                with self._alone(whole, prepared) as alone, torch.inference_mode(False), torch.no_grad():
                    if alone or phase != "inference":
                        self._prepare(whole, prepared, phase)
            if prepared is not None:
                prepared.count_call(1)
            return prepared

    @contextmanager
    def _alone(self, model: nn.Module, prepared: Prepared) -> Iterator[bool]:
        """Hold up calls that begin; True if none that uses a layer of this model is under way in another thread.

        Else weights may be given back, but not packed or moved: this call runs with the model as it is, and a later one
        prepares it. To wait for another thread could be for ever.
        """
        modules = {id(module) for module in model.modules()}
        related = [p for p in self._prepared if p is prepared or p.has_any_of(modules)]
        for one in related:
            one.held = True
        try:
            yield not any(one.calls for one in related)
        finally:
            for one in related:
                one.held = False

    def _first_run(self, model: nn.Module) -> Prepared | None:
        if next(tensors_of(model), None) is None:
            self._remember(model, None)  # a loss, an activation: nothing to prepare
            return None
        whole = next((p for p in list(self._prepared) if (it := p.model) is not None and _contains(it, model)), None)
        if whole is not None:
            self._remember(model, whole)
            return whole
        prepared = self._new(model, None, asked=False)
        self._remember(model, prepared)
        return prepared

    def _new(self, model: nn.Module, disk: str | None, *, asked: bool) -> Prepared:
        return Prepared(model, self.mode, self.device, disk, asked=asked, gone=partial(_drop, weakref.ref(self)))

    def _prepare(self, model: nn.Module, prepared: Prepared, phase: Phase) -> None:
        why = self._why_left_alone(model)
        if why:
            prepared.undo()
            prepared.leave_alone(why, phase)
        else:
            self._take_over(model, prepared, phase)
            prepared.prepare(phase)

    def _take_over(self, model: nn.Module, prepared: Prepared, phase: Phase) -> None:
        """Parts of the model that were called by themselves before it are its parts from now on.

        Layers that it has in common with a model that goes on by itself are packed only where neither wants gradients.
        """
        modules = {id(module) for module in model.modules()}
        for other in [p for p in self._prepared if p is not prepared]:
            part = other.model
            if part is None and other.shares_parts_with(model):
                _drop(weakref.ref(self), other)
                prepared.take_over(other)
            elif part is not None and part is not model and not other.asked and id(part) in modules:
                _drop(weakref.ref(self), other)
                prepared.take_over(other)
                self._known[id(part)] = prepared
            elif part is not None and other.packed_layers_of(modules, standing=phase != "inference"):
                prepared.shared = other.shared = True
                other.unpack()
            elif part is not None and other.wants_gradients and other.has_any_of(modules):
                prepared.shared = True

    def _why_left_alone(self, model: nn.Module) -> str:
        if type(model).__module__.partition(".")[0] == "anytorch":
            return "anytorch's own models choose their precision, kernels and memory themselves"
        if isinstance(model, torch.jit.ScriptModule):
            return "it is a TorchScript module, whose parts cannot be replaced"
        places = {tensor.device for tensor in tensors_of(model)}
        if HANDLE not in model.__dict__ and not all(same_place(place, self.device) for place in places):
            return f"it runs on {', '.join(sorted(map(str, places)))}; the mode is for {self.device}"
        parts = [
            p.name
            for p in list(self._prepared)
            if p.asked and (it := p.model) is not None and it is not model and _contains(model, it)
        ]
        return f"its part {parts[0]} was prepared by itself" if parts else ""

    def move(self, model: nn.Module, device: torch.device) -> bool:
        """Stream a model that is to be moved to the device and does not fit there; False: let torch move it.

        One that will be trained is streamed only if it does not fit at all, for torch's own optimizers cannot train it then.
        """
        if not same_place(device, self.device) or HANDLE in model.__dict__ or self.device.type == "cpu":
            return False
        with self._lock:
            elsewhere = sum(t.nbytes for t in tensors_of(model) if not same_place(t.device, self.device))
            free, budget = memory(self.device).free, device_budget(self.mode, self.device, model)
            if free is None or budget is None or elsewhere <= (free if model.training else budget):
                return False
            prepared = self._known[id(model)] if id(model) in self._known else self._first_run(model)
            if prepared is None or prepared.model is not model:
                return False
            try:
                prepared.stream(model, budget)
            except (BudgetTooSmall, UsageError) as exc:
                prepared.left["streaming"] = str(exc)
                return False
            return True

    def will_train(self, model: nn.Module) -> None:
        """Give a model its weights back when it is put into train mode, frozen or unfrozen: who does so has to find them."""
        with self._lock:
            for prepared in self._packed_with(model):
                prepared.unpack()

    def will_transform(self, model: nn.Module) -> None:
        """The same before a call within torch.func's transforms, which packed layers do not know.

        In a thread of its own: the transform is one of the calling thread's, and would see what is done to the weights.
        """
        if self._packed_with(model):
            thread = threading.Thread(target=self.will_train, args=(model,), name="anytorch-weights")
            start(thread)
            thread.join()

    def will_replace(self, model: nn.Module, names: Iterable[str], *, under_way: bool) -> None:
        """Give back the weights that `functional_call` puts others in the places of: a packed layer has no such place.

        Raises UsageError where they have to stay packed: the model was packed on request, or is being called.
        """
        names = list(names)
        if not packed_among(model, names):
            return
        if not under_way:
            self.will_transform(model)
        if left := packed_among(model, names):
            raise UsageError(
                f"functional_call gives {left[0]!r} another value, and mode {self.mode.name!r} has packed that layer"
                + (" for the call that this one is part of" if under_way else ""),
                hint="turn the mode on with weights=None, or prepare the model with mode.apply(model, training=True)",
            )

    def _packed_with(self, model: nn.Module) -> list[Prepared]:
        prepared = list(self._prepared)  # models may go meanwhile
        found = [one for one in prepared if not one.asked and "weights" in one.did]
        return [one for one in found if one.shares_parts_with(model)]

    def _remember(self, model: nn.Module, prepared: Prepared | None) -> None:
        self._known[id(model)] = prepared
        if prepared is not None and prepared.model is model:
            self._prepared.append(prepared)
        weakref.finalize(model, partial(_forget, weakref.ref(self), id(model))).atexit = False

    # --- what is in force --------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What is in force now, asked of the process and the device rather than remembered."""
        mode, device = self.mode, self.device
        return {
            "mode": mode.name,
            "device": str(device),
            "autocast": autocast_dtype(device) if mode.mixed_precision else None,
            "attention": attention_kernel(device),
            "float32 matmul precision": torch.get_float32_matmul_precision(),
            "checkpointing": mode.checkpointing,
            "weights": mode.weights,
            "device budget": device_budget(mode, device),
            "models": [prepared.describe() for prepared in list(self._prepared)],
        }

    def explain(self) -> str:
        """In words: what the mode asks for, and what became of it for every model that ran, with the reasons."""
        asked = in_words(self.mode, device_budget(self.mode, self.device))
        lines = [f"mode {self.mode.name} on {self.device}: {asked}"]
        lines += [prepared.explain() for prepared in list(self._prepared)]
        return "\n".join(lines if self._prepared else [*lines, "no model has run yet"])


_UNKNOWN: Any = object()


def packed_among(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The names that are weights of packed layers."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = ((name, *name.rpartition(".")[::2]) for name in names)
    return [name for name, owner, own in owners if own == "weight" and isinstance(modules.get(owner), QuantLinear)]


def _contains(model: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in model.modules())


def _forget(mode: weakref.ref[ActiveMode], key: int) -> None:
    """Forget a module that was called and is now deleted."""
    active = mode()
    if active is not None:
        active._known.pop(key, None)


def _drop(mode: weakref.ref[ActiveMode], prepared: Prepared) -> None:
    """Drop a prepared model that is deleted with all its parts."""
    active = mode()
    if active is not None and prepared in active._prepared:
        active._prepared.remove(prepared)


def in_float32(value: Any, dtype: torch.dtype) -> Any:
    """A model's result with tensors of the autocast dtype as float32: what the program would see without a mode."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == dtype else value
    if isinstance(value, Mapping):
        changed = {key: in_float32(item, dtype) for key, item in value.items()}
        same = all(changed[key] is item for key, item in value.items())
        return value if same else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        items = [in_float32(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


_switching = threading.Lock()
_active: ActiveMode | None = None


def mode(name: str, *, device: str | torch.device = "auto", **changes: Any) -> ActiveMode:
    """`with anytorch.mode("balanced"): …`; `changes` are fields of `Mode`, as in `mode("memory", weights="nf4")`."""
    if name not in MODES:
        raise UsageError(f"unknown mode {name!r}; modes: {', '.join(MODES)}", hint=did_you_mean(name, MODES))
    unknown = sorted(set(changes) - set(Mode.__dataclass_fields__))
    if unknown:
        raise UsageError(
            f"mode {name!r} has no setting {', '.join(map(repr, unknown))}; settings: "
            f"{', '.join(field for field in Mode.__dataclass_fields__ if field != 'name')}"
        )
    wanted = replace(MODES[name], **changes)
    if wanted.matmul_precision not in PRECISIONS:
        raise UsageError(f"matmul_precision={wanted.matmul_precision!r}: use one of {', '.join(PRECISIONS)}")
    limits.SHARE.check("device_share", wanted.device_share)
    if wanted.weights is not None:
        if not isinstance(wanted.weights, str):
            raise UsageError(f"weights={wanted.weights!r}: use a format's name, such as 'int4', or None")
        parse(wanted.weights)
    for switch in ("mixed_precision", "fused_attention", "checkpointing"):
        if not isinstance(getattr(wanted, switch), bool):
            raise UsageError(f"{switch}={getattr(wanted, switch)!r}: use True or False")
    return ActiveMode(wanted, device)


def active() -> ActiveMode | None:
    """The mode that is on in this process, or None."""
    return _active
