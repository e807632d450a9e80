"""What tuning decides, and the rules it decides by. Pure: measured options in, a choice with its reason out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOISE = 0.03  # a gain below this share is no gain
KNEE = 0.05  # the smallest batch within this share of the best throughput is large enough
SETTINGS = ("threads", "cpu_dtype", "matmul_precision")  # items that are settings of their own in the settings file


@dataclass(frozen=True)
class Option:
    """One candidate value and what was measured with it. `seconds` is None if it could not be used; `note` says why."""

    value: str | int
    seconds: float | None = None  # median; per sample where the item is a batch size
    spread_s: float = 0.0
    repeats: int = 0
    error: float | None = None  # largest difference from fp64, relative to its largest value
    disturbed: int = 0  # samples in which the system took the processor away
    note: str = ""

    @property
    def busy(self) -> bool:
        """Too few quiet samples: the time is that of a machine that also did something else."""
        return self.disturbed >= max(1, self.repeats)


@dataclass(frozen=True)
class Item:
    """One setting: every candidate with its time, the choice, and why."""

    setting: str
    workload: str  # what was timed
    default: str | int
    chosen: str | int
    gain: float  # how many times faster than the default; 1.0 when the default is kept
    why: str
    options: tuple[Option, ...]

    @property
    def changed(self) -> bool:
        return self.chosen != self.default

    def option(self, value: str | int) -> Option | None:
        return next((option for option in self.options if option.value == value), None)


@dataclass(frozen=True)
class TunePlan:
    device: str  # "cuda:0"
    backend: str
    name: str
    uuid: str | None
    items: tuple[Item, ...]
    machine_key: str
    machine: Mapping[str, Any]  # the facts behind the key
    date: str
    anytorch: str
    duration_s: float
    notes: tuple[str, ...] = field(default=())  # what was not tuned, and why

    def item(self, setting: str) -> Item | None:
        return next((item for item in self.items if item.setting == setting), None)

    @property
    def settings(self) -> dict[str, str | int]:
        """The settings worth changing."""
        return {item.setting: item.chosen for item in self.items if item.setting in SETTINGS and item.changed}

    @property
    def storage_key(self) -> str:
        """A card is stored under its UUID: an index can change, a UUID cannot."""
        return self.uuid or self.device


def decide(
    setting: str,
    workload: str,
    default: str | int,
    options: Sequence[Option],
    *,
    most_error: float = float("inf"),
    noise: float = NOISE,
) -> Item:
    """The fastest accurate option; but the default unless the gain is beyond noise and spread on a quiet machine."""
    base = next((option for option in options if option.value == default), None)
    good = [option for option in options if option.seconds is not None and _accurate(option, most_error)]
    if not good or (base is not None and base.seconds is not None and not any(o is not base for o in good)):
        return Item(setting, workload, default, default, 1.0, "nothing else can be used here", tuple(options))
    least = min(option.seconds or 0.0 for option in good)
    # Of those that are equally fast, the first: candidates are listed from the most careful to the boldest.
    best = next(option for option in good if (option.seconds or 0.0) <= least * (1 + noise))
    assert best.seconds is not None
    if base is None or base.seconds is None:
        why = f"the default {default} cannot be used: {base.note if base else 'it was not measured'}"
        return Item(setting, workload, default, best.value, 1.0, why, tuple(options))
    saved = base.seconds - best.seconds
    if best.value == default:
        why = "the default is the fastest, or as fast as any"
    elif base.busy or best.busy:
        # Fewer threads win while somebody else holds a core; stored, that would slow every later run down.
        why = f"{best.value} seemed faster, but the machine was too busy with other work to tell"
    elif saved < noise * base.seconds:
        why = f"{best.value} gains {saved / base.seconds:.1%}, which is within the noise ({noise:.0%})"
    elif saved <= max(base.spread_s, best.spread_s):
        why = f"{best.value} gains {saved / base.seconds:.1%}, which is within the spread of the measurement"
    else:
        gain = base.seconds / best.seconds
        return Item(setting, workload, default, best.value, gain, f"{gain:.2f} times as fast", tuple(options))
    return Item(setting, workload, default, default, 1.0, why, tuple(options))


def _accurate(option: Option, most_error: float) -> bool:
    return option.error is None or option.error <= most_error


def decide_batch(workload: str, default: int, options: Sequence[Option], *, knee: float = KNEE) -> Item:
    """The smallest batch within `knee` of the best time per sample: a larger one only costs memory and delay."""
    timed = [option for option in options if option.seconds is not None and isinstance(option.value, int)]
    if not timed:
        return Item("batch_size", workload, default, default, 1.0, "no batch could be run", tuple(options))
    best = min(option.seconds or 0.0 for option in timed)
    enough = [option for option in timed if (option.seconds or 0.0) <= best * (1 + knee)]
    chosen = min(enough, key=lambda option: int(option.value))
    base = next((option for option in timed if option.value == default), None)
    assert chosen.seconds is not None
    gain = base.seconds / chosen.seconds if base is not None and base.seconds is not None else 1.0
    why = f"the smallest batch within {knee:.0%} of the best time per sample"
    return Item("batch_size", workload, default, chosen.value, gain, why, tuple(options))
