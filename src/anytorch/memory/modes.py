"""Three modes, `speed`, `balanced` and `memory`: what each turns on, for the process and for the models passed through it.

    with anytorch.mode("memory") as mode:
        model = mode.apply(model)        # weights in 4 bits, checkpointed blocks, streamed if the budget is too small
        model(x)
    # the process and the model are as they were

A mode is data (`MODES`); every step of applying one comes with the step that undoes it. Nothing is claimed that is not set:
`describe()` asks the process and the device what is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anytorch import logs, settings
from anytorch.devices.choose import resolve
from anytorch.devices.memory import memory
from anytorch.devices.precision import autocast, autocast_dtype
from anytorch.errors import UsageError, did_you_mean
from anytorch.memory.checkpointing import activations, restore
from anytorch.memory.fitting import fit, unfit
from anytorch.memory.reader import Reader
from anytorch.memory.spill import Spill
from anytorch.quant.formats import parse
from anytorch.quant.model import quantize, replace_module
from anytorch.quant.tensor import linear_of
from anytorch.safetensors_files import StoredTensor

log = logs.logger(__name__)


@dataclass(frozen=True)
class Mode:
    """What a mode asks for. `weights` is a format of `anytorch.quant`, for models that are not being trained."""

    name: str
    mixed_precision: bool  # autocast in the dtype that is fast on the device; nothing where none is
    fused_attention: bool  # torch's flash attention first, and models that spell attention out switched to it
    checkpointing: bool  # of the repeated blocks, while training
    weights: str | None
    device_share: float  # of the device's free memory that a model's weights may take; the rest of it streams
    matmul_precision: str  # torch.set_float32_matmul_precision


PRECISIONS = ("highest", "high", "medium")
MODES = {
    mode.name: mode
    for mode in (
        Mode("speed", True, True, False, None, 0.95, "high"),
        Mode("balanced", True, True, False, None, 0.80, "high"),
        Mode("memory", True, True, True, "int4", 0.40, "highest"),
    )
}


# Flash attention first, the plain one last: it must stay allowed, for not every shape and dtype has a fused kernel.
FUSED_FIRST = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


# --- the process ------------------------------------------------------------------------------------------------------


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


def device_budget(mode: Mode, device: torch.device) -> int | None:
    """Bytes a model may keep on the device; None if the free memory is unknown."""
    free = memory(device).free
    return None if free is None else int(free * mode.device_share)


# --- a model ----------------------------------------------------------------------------------------------------------


class Originals:
    """Linear layers, written to disk before they are replaced; nothing of them stays in memory."""

    def __init__(self, disk: str | None) -> None:
        self._spill = Spill(disk or settings.cache_folder() / "originals")
        self._kept: dict[str, Callable[[Reader], nn.Linear]] = {}  # name → what makes the layer anew

    def keep(self, model: nn.Module) -> None:
        for name, layer in linear_layers(model):
            tensors = {key: tensor.detach() for key, tensor in layer.named_parameters(recurse=False)}
            about = (layer.weight.device, layer.weight.requires_grad, layer.training)
            self._kept[name] = partial(_layer, self._spill.write(tensors), *about)

    def restore(self, model: nn.Module) -> None:
        """Put plain layers back where the model has others now, and their values where only those changed; then give the
        disk space back."""
        reader = Reader()
        try:
            for name, made_anew in self._kept.items():
                there, layer = model.get_submodule(name), made_anew(reader)
                if type(there) is nn.Linear:
                    for key, parameter in there.named_parameters(recurse=False):
                        parameter.data = layer.get_parameter(key).data
                else:
                    replace_module(model, name, layer)
        finally:
            reader.close()
            self._spill.close()


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear)


def _layer(
    located: dict[str, StoredTensor], device: torch.device, trained: bool, training: bool, reader: Reader
) -> nn.Linear:
    # A copy: the buffer is larger than the tensors, and page-aligned for the disk's sake.
    found = {key: t.to(device, copy=True) for key, t in reader.read_tensors(located.values()).items()}
    return linear_of(found["weight"], found.get("bias"), trained=trained, training=training)


@dataclass
class Applied:
    model: nn.Module
    did: dict[str, Any] = field(default_factory=dict)
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def step(self, name: str, what: Any, undo: Callable[[], object]) -> None:
        self.did[name] = what
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def describe(self) -> dict[str, Any]:
        return {"model": type(self.model).__name__} | self.did


def apply(model: nn.Module, mode: Mode, device: torch.device, training: bool, disk: str | None) -> Applied:
    """Every step of the mode, in an order in which each finds what it needs; all undone if one of them fails."""
    done = Applied(model)
    try:
        if mode.fused_attention:
            _use_fused_attention(done)
        budget = device_budget(mode, device)
        rest_format = None
        if mode.weights and not training:
            _keep_originals(done, mode.weights, disk)
            if budget is None or packed_nbytes(model, mode.weights) <= budget:
                quantize(model, mode.weights)
            else:  # packed layers do not move; weights that do may rest in as few bits
                rest_format = mode.weights
        _place(done, device, budget, disk, rest_format)
        if mode.checkpointing and training:
            done.step("checkpointed blocks", activations(model, "checkpoint"), lambda: restore(model))
        if mode.mixed_precision and autocast_dtype(device) is not None:
            _autocast(done, device)
    except BaseException:
        done.undo()
        raise
    log.info("mode %s: %s", mode.name, done.describe())
    return done


def _use_fused_attention(done: Applied) -> None:
    """Models of transformers that spell attention out are switched to torch's function; others are left alone."""
    switch = getattr(done.model, "set_attn_implementation", None)
    before = getattr(getattr(done.model, "config", None), "_attn_implementation", None)
    if switch is None or before != "eager":
        return
    try:
        switch("sdpa")
    except (ValueError, ImportError) as exc:
        log.info("attention of %s stays as it is: %s", type(done.model).__name__, exc)
        return
    done.step("attention", "sdpa", lambda: switch(before))


def _keep_originals(done: Applied, format: str, disk: str | None) -> None:
    originals = Originals(disk)
    done.step("weights", format, lambda: originals.restore(done.model))
    originals.keep(done.model)


def packed_nbytes(model: nn.Module, format: str) -> int:
    """What a model takes once its linear layers are packed."""
    chosen = parse(format)
    linear = {id(layer.weight): layer.weight for _, layer in linear_layers(model)}
    packed = sum(chosen.nbytes(*weight.shape) for weight in linear.values())
    return packed + sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if id(t) not in linear)


def _place(
    done: Applied, device: torch.device, budget: int | None, disk: str | None, rest_format: str | None = None
) -> None:
    model = done.model
    before = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    size = sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    if budget is not None and size > budget:
        fit(model, device, device_budget=budget, disk=disk, rest_format=rest_format)
        done.step("streamed", {"budget": budget, "size": size}, lambda: unfit(model))
        return
    model.to(device)
    if len(before) == 1 and before != {device}:
        home = before.pop()
        done.step("moved", str(device), lambda: model.to(home))


class Autocasting:
    """A pair of hooks: autocast is on while the model's forward runs, also when it raises."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._entered = threading.local()

    def enter(self, module: nn.Module, args: Any) -> None:
        stack = self._entered.__dict__.setdefault("stack", [])
        context = autocast(self.device)
        context.__enter__()
        stack.append(context)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._entered.stack.pop().__exit__(None, None, None)

    def __reduce__(self) -> tuple[type[Autocasting], tuple[torch.device]]:
        return Autocasting, (self.device,)  # a copied or stored model has a pair of its own


def _autocast(done: Applied, device: torch.device) -> None:
    hooks = Autocasting(device)
    handles = (
        done.model.register_forward_pre_hook(hooks.enter, prepend=True),
        done.model.register_forward_hook(hooks.leave, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    done.step("autocast", autocast_dtype(device), undo)


# --- a mode in force ---------------------------------------------------------------------------------------------------


class ActiveMode(AbstractContextManager["ActiveMode"]):
    """A mode in force. Leaving its `with` block (or `off()`) puts the process and its models back as they were."""

    def __init__(self, mode: Mode, device: str | torch.device = "auto") -> None:
        self.mode = mode
        self.device = resolve(device).device
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._models: list[Applied] = []

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
            _active = self
        return self

    def off(self) -> None:
        """Undo everything, models included, the last one first. Calling it twice is harmless."""
        global _active
        with _switching:
            if _active is not self:
                return
            _active = None
            self._stack.close()
            failures = []
            while self._models:
                try:
                    self._models.pop().undo()
                except Exception as exc:  # noqa: BLE001  (raised once the other models have been put back)
                    failures.append(exc)
            if failures:
                raise failures[0]

    __enter__ = on

    def __exit__(self, *exc: object) -> None:
        self.off()

    def apply(
        self, model: torch.nn.Module, *, training: bool | None = None, disk: str | None = None
    ) -> torch.nn.Module:
        """Prepare a model for this mode and put it on the device; returns the same module.

        `training` (the model's own state by default) keeps the weights in their dtype: four-bit weights cannot be trained.
        `disk` names a folder for the originals of quantized weights and for what does not fit elsewhere.
        """
        with self._lock:
            if any(done.model is model for done in self._models):
                raise UsageError(f"this {type(model).__name__} was prepared for mode {self.mode.name!r} already")
            done = apply(model, self.mode, self.device, model.training if training is None else training, disk)
            self._models.append(done)
        return model

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
            "models": [done.describe() for done in self._models],
        }


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
    precision = changes.get("matmul_precision", "highest")
    if precision not in PRECISIONS:
        raise UsageError(f"matmul_precision={precision!r}: use one of {', '.join(PRECISIONS)}")
    return ActiveMode(replace(MODES[name], **changes), device)


def active() -> ActiveMode | None:
    """The mode that is on in this process, or None."""
    return _active
