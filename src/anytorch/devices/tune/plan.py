"""What tuning decides, and the rules it decides by. Pure: measured options in, a choice with its reason out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anytorch.measured.verdict import Question, Trial, Verdict, fastest

NOISE = 0.03  # a gain below this share is no gain
KNEE = 0.05  # the smallest batch within this share of the best throughput is large enough
SETTINGS = ("threads", "cpu_dtype", "matmul_precision")  # items that are settings of their own in the settings file


@dataclass(frozen=True)
class Item:
    """One setting: every candidate with its time, the choice, and why."""

    setting: str
    workload: str  # what was timed
    default: str | int
    chosen: str | int
    gain: float  # how many times faster than the default; 1.0 when the default is kept
    why: str
    options: tuple[Trial, ...]  # named by their values

    @property
    def changed(self) -> bool:
        return self.chosen != self.default

    def option(self, value: str | int) -> Trial | None:
        return next((option for option in self.options if option.name == str(value)), None)

    def verdict(self, device: str) -> Verdict:
        """For the store that everything measured goes to."""
        question = Question.of("setting", f"{self.setting}, {self.workload}", device, setting=self.setting)
        return Verdict(question, self.options, str(self.chosen), self.why)


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
    options: Sequence[Trial],
    *,
    most_error: float = float("inf"),
    noise: float = NOISE,
) -> Item:
    """The fastest accurate option; but the default unless the gain is beyond noise and spread on a quiet machine."""
    by_name = {option.name: option for option in options}
    base = by_name.get(str(default))
    good = [option for option in options if option.seconds is not None and (option.error or 0.0) <= most_error]
    if not good or (base is not None and base.seconds is not None and not any(o is not base for o in good)):
        return Item(setting, workload, default, default, 1.0, "nothing else can be used here", tuple(options))
    # Of those that are equally fast, the first: candidates are listed from the most careful to the boldest.
    best = by_name[fastest(good, noise=noise)[0]]
    assert best.seconds is not None
    chosen = type(default)(best.name)
    if base is None or base.seconds is None:
        why = f"the default {default} cannot be used: {base.refused if base else 'it was not measured'}"
        return Item(setting, workload, default, chosen, 1.0, why, tuple(options))
    saved = base.seconds - best.seconds
    if best is base:
        why = "the default is the fastest, or as fast as any"
    elif base.busy or best.busy:
        # Fewer threads win while somebody else holds a core; stored, that would slow every later run down.
        why = f"{best.name} seemed faster, but the machine was too busy with other work to tell"
    elif saved < noise * base.seconds:
        why = f"{best.name} gains {saved / base.seconds:.1%}, which is within the noise ({noise:.0%})"
    elif saved <= max(base.spread_s, best.spread_s):
        why = f"{best.name} gains {saved / base.seconds:.1%}, which is within the spread of the measurement"
    else:
        gain = base.seconds / best.seconds
        return Item(setting, workload, default, chosen, gain, f"{gain:.2f} times as fast", tuple(options))
    return Item(setting, workload, default, default, 1.0, why, tuple(options))


def decide_batch(workload: str, default: int, options: Sequence[Trial], *, knee: float = KNEE) -> Item:
    """The smallest batch within `knee` of the best time per sample: a larger one only costs memory and delay."""
    name, _ = fastest(options, noise=knee)
    if not name:
        return Item("batch_size", workload, default, default, 1.0, "no batch could be run", tuple(options))
    seconds = {option.name: option.seconds for option in options}
    base, best = seconds.get(str(default)), seconds[name]
    why = f"the smallest batch within {knee:.0%} of the best time per sample"
    return Item("batch_size", workload, default, int(name), base / best if base and best else 1.0, why, tuple(options))
