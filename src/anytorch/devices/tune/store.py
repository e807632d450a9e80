"""Tuned values in the one settings file: written with where they come from, read back only on the same machine.

    [settings]                       threads = 2
    [tuned."GPU-…" or "cpu"]         key = "…", date, anytorch, device, name, batch_size, autocast_dtype
    [tuned."…".settings]             what was written to [settings]: threads = 2
    [tuned."…".machine]              the facts behind the key
    [tuned."…".measured.threads]     default, chosen, gain, times, error

A value in [settings] that a [tuned] table also holds was stored by `apply`, and counts only while that table's key is
this machine's. Any other value was set by hand and always counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch import logs, settings
from anytorch.devices.choose import resolve
from anytorch.devices.types import Candidate
from anytorch.errors import ConfigError
from anytorch.measured.machine import identity, key_of, what_changed
from anytorch.measured.verdict import Question, Trial, Verdict, fastest

if TYPE_CHECKING:
    import torch

log = logs.logger(__name__)
_told: set[str] = set()  # refusals already logged in this process


@dataclass(frozen=True)
class Tuned:
    """What `apply` stored for one device, measured on this very machine."""

    device: str
    name: str
    date: str
    settings: Mapping[str, Any]
    batch_size: int | None
    autocast_dtype: str | None  # "float32": autocast is off
    measured: Mapping[str, Any]
    key: str


@dataclass(frozen=True)
class Applied:
    """What `use_tuned` did in this process. `ignored` gives the reason for each value that was left alone."""

    device: str
    values: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    tuned: Tuned | None = None


# --- writing ----------------------------------------------------------------------------------------------------------


def apply(plan: TunePlan) -> Path:
    """Store a plan in the settings file and return the file's path. All else in the file stays as it is.

    Settings whose default was kept are not written, and are taken out if an earlier plan for this device put them in.
    """
    data = settings.read_settings_file()
    tables = _tables(data.get("tuned", {}))
    stored = dict(data.get("settings", {}))
    for name, value in _stored_settings(tables.get(plan.storage_key, {})).items():
        if stored.get(name) == value and name not in plan.settings:
            del stored[name]
    stored.update(plan.settings)
    tables[plan.storage_key] = entry(plan)
    return settings.write_settings_file({**data, "settings": stored, "tuned": tables})


def entry(plan: TunePlan) -> dict[str, Any]:
    """A plan as the table [tuned."<device>"]. TOML has no null: what is not known is left out. Pure."""
    table: dict[str, Any] = {
        "device": plan.device,
        "name": plan.name,
        "key": plan.machine_key,
        "date": plan.date,
        "anytorch": plan.anytorch,
        "duration_s": plan.duration_s,
    }
    for setting, names in (("batch_size", ("batch_size",)), ("autocast_dtype", ("autocast_dtype", "cpu_dtype"))):
        item = next((found for name in names if (found := plan.item(name)) is not None), None)
        if item is not None:
            table[setting] = item.chosen
    table["settings"] = dict(plan.settings)
    table["machine"] = dict(plan.machine)
    table["measured"] = {item.setting: _numbers(item) for item in plan.items}
    return table


def _numbers(item: Item) -> dict[str, Any]:
    found: dict[str, Any] = {
        "default": item.default,
        "chosen": item.chosen,
        "gain": round(item.gain, 3),
        "why": item.why,
    }
    found["workload"] = item.workload
    found["milliseconds"] = {o.name: round(o.seconds * 1e3, 5) for o in item.options if o.seconds is not None}
    found["error"] = {o.name: float(f"{o.error:.2e}") for o in item.options if o.error is not None}
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


def tuned_for(device: str | torch.device | None = None) -> Tuned | None:
    """What is stored for a device; None if nothing is, or if it is another machine's (which is logged once)."""
    return _tuned(resolve(device).chosen)


def _tuned(candidate: Candidate) -> Tuned | None:
    tables = _tables(settings.stored("tuned"))
    name = candidate.uuid if candidate.uuid in tables else candidate.id
    table = tables.get(name)
    if table is None:
        return None
    if refusal := _refusal(table):
        _tell(f"the tuning stored for {name} is not used: {refusal}")
        return None
    try:
        return Tuned(
            device=str(table["device"]),
            name=str(table["name"]),
            date=str(table["date"]),
            settings={
                key: settings.parse_setting(key, value)
                for key, value in _stored_settings(table).items()
                if key in SETTINGS
            },
            batch_size=int(table["batch_size"]) if "batch_size" in table else None,
            autocast_dtype=str(table["autocast_dtype"]) if "autocast_dtype" in table else None,
            measured=table.get("measured", {}),
            key=str(table["key"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ConfigError(
            f"the settings file {settings.settings_file()}: [tuned.{name!r}] is invalid: {exc!r}",
            hint="delete that table, or run `anytorch optimize --apply` again",
        ) from exc


def trusted_setting(name: str) -> settings.Value:
    """`settings.lookup`, except that a tuned value from another machine counts as not set."""
    value = settings.lookup(name)
    return value if not _distrust(name, value) else settings.Value(settings.SETTINGS[name].default, "default")


def use_tuned(device: str | torch.device | None = None) -> Applied:
    """Set this process's threads and its precision of float32 products, as stored or as set by hand.

    `cpu_dtype` is reported too; `anytorch.autocast` uses it. Values tuned on another machine are ignored.
    """
    import torch

    candidate = resolve(device).chosen
    tuned = _tuned(candidate)
    values: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for name in SETTINGS:
        found = settings.lookup(name)
        if found.source == "file" and tuned is not None and name in tuned.settings and _owners(name, found.value):
            values[name] = tuned.settings[name]  # another device may have been tuned later: each has its own
        elif reason := _distrust(name, found):
            ignored[name] = reason
            _tell(f"the setting {name} = {found.value} is not used: {reason}")
        elif found.value is not None:
            values[name] = found.value
    if "threads" in values:
        torch.set_num_threads(values["threads"])
    if "matmul_precision" in values:
        torch.set_float32_matmul_precision(values["matmul_precision"])
    return Applied(candidate.id, values, ignored, tuned)


def _distrust(name: str, value: settings.Value) -> str:
    """Why a value is not to be used: every table that stored it was made on another machine. "" if it may be."""
    if value.source != "file":
        return ""
    refusals = [_refusal(table) for table in _owners(name, value.value)]
    return refusals[0] if refusals and all(refusals) else ""


def _owners(name: str, value: Any) -> list[Mapping[str, Any]]:
    tables = _tables(settings.stored("tuned"))
    return [table for table in tables.values() if _stored_settings(table).get(name) == value]


def _refusal(table: Mapping[str, Any]) -> str:
    now = identity()
    if table.get("key") == key_of(now):
        return ""
    before = table.get("machine")
    changed = what_changed(before if isinstance(before, Mapping) else {}, now)
    return f"it was measured on another machine or before a change ({changed}); run `anytorch optimize --apply` again"


def _tables(tuned: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables = dict(tuned)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"the settings file {settings.settings_file()}: tuned.{name} must be a table, not {table!r}",
                hint="delete that line, or run `anytorch reset`",
            )
    return tables


def _stored_settings(table: Mapping[str, Any]) -> Mapping[str, Any]:
    stored = table.get("settings", {})
    return stored if isinstance(stored, Mapping) else {}


def _tell(words: str) -> None:
    if words not in _told:
        _told.add(words)
        log.warning("%s", words)


# --- what tuning decides, and the rules it decides by: pure; measured options in, a choice with its reason out --------

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
        return Verdict(question, self.options, str(self.chosen), self.why, error_unit="of the largest value")


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
    setting: str, workload: str, default: str | int, options: Sequence[Trial], *, most_error: float = float("inf")
) -> Item:
    """The fastest accurate option; but the default unless the gain is beyond noise and spread on a quiet machine."""
    by_name = {option.name: option for option in options}
    base = by_name.get(str(default))
    good = [option for option in options if option.seconds is not None and (option.error or 0.0) <= most_error]
    if not good or (base is not None and base.seconds is not None and not any(o is not base for o in good)):
        return Item(setting, workload, default, default, 1.0, "nothing else can be used here", tuple(options))
    # Of those that are equally fast, the first: candidates are listed from the most careful to the boldest.
    best = by_name[fastest(good, noise=NOISE)[0]]
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
    elif saved < NOISE * base.seconds:
        why = f"{best.name} gains {saved / base.seconds:.1%}, which is within the noise ({NOISE:.0%})"
    elif saved <= max(base.spread_s, best.spread_s):
        why = f"{best.name} gains {saved / base.seconds:.1%}, which is within the spread of the measurement"
    else:
        gain = base.seconds / best.seconds
        return Item(setting, workload, default, chosen, gain, f"{gain:.2f} times as fast", tuple(options))
    return Item(setting, workload, default, default, 1.0, why, tuple(options))


def decide_batch(workload: str, default: int, options: Sequence[Trial]) -> Item:
    """The smallest batch within KNEE of the best time per sample: a larger one only costs memory and delay."""
    name, _ = fastest(options, noise=KNEE)
    if not name:
        return Item("batch_size", workload, default, default, 1.0, "no batch could be run", tuple(options))
    seconds = {option.name: option.seconds for option in options}
    base, best = seconds.get(str(default)), seconds[name]
    why = f"the smallest batch within {KNEE:.0%} of the best time per sample"
    return Item("batch_size", workload, default, int(name), base / best if base and best else 1.0, why, tuple(options))
