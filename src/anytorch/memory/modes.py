"""Three modes, `speed`, `balanced` and `memory`: what each turns on, for the process and for the models passed through it.

    with anytorch.mode("memory") as mode:
        model = mode.apply(model)        # weights in 4 bits, checkpointed blocks, streamed if the budget is too small
        model(x)
    # the process and the model are as they were

A mode is data (`MODES`); `anytorch.memory.applied` does the work. Nothing is claimed that is not set: `describe()` asks the
process and the device what is in force.
"""

from __future__ import annotations

import difflib
import threading
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anytorch import logs
from anytorch.devices.choose import resolve
from anytorch.errors import UsageError
from anytorch.memory import applied

if TYPE_CHECKING:
    import torch

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


class ActiveMode(AbstractContextManager["ActiveMode"]):
    """A mode in force. Leaving its `with` block (or `off()`) puts the process and its models back as they were."""

    def __init__(self, mode: Mode, device: str | torch.device = "auto") -> None:
        self.mode = mode
        self.device = resolve(device).device
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._models: list[applied.Applied] = []

    def on(self) -> ActiveMode:
        global _active
        with _switching:
            if _active is not None:
                raise UsageError(
                    f"mode {self.mode.name!r} cannot be turned on while {_active.mode.name!r} is on",
                    hint="leave the first `with anytorch.mode(...)` block, or call its off()",
                )
            if self.mode.fused_attention:
                self._stack.enter_context(applied.fused_attention_first())
            self._stack.enter_context(applied.matmul_precision(self.mode.matmul_precision))
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
            failures = [exc for exc in (undone(self._models.pop()) for _ in range(len(self._models))) if exc]
            if failures:  # the others have been put back
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
            done = applied.apply(model, self.mode, self.device, model.training if training is None else training, disk)
            self._models.append(done)
        return model

    def describe(self) -> dict[str, Any]:
        """What is in force now, asked of the process and the device rather than remembered."""
        return applied.in_force(self.mode, self.device) | {"models": [done.describe() for done in self._models]}


def undone(done: applied.Applied) -> Exception | None:
    try:
        done.undo()
    except Exception as exc:  # noqa: BLE001  (raised by `off` once the other models have been put back)
        return exc
    return None


_switching = threading.Lock()
_active: ActiveMode | None = None


def mode(name: str, *, device: str | torch.device = "auto", **changes: Any) -> ActiveMode:
    """`with anytorch.mode("balanced"): …`; `changes` are fields of `Mode`, as in `mode("memory", weights="nf4")`."""
    if name not in MODES:
        near = difflib.get_close_matches(name, MODES, n=1)
        raise UsageError(
            f"unknown mode {name!r}; modes: {', '.join(MODES)}", hint=f"did you mean {near[0]!r}?" if near else ""
        )
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
