"""The values the memory layer passes around. Plain data: no torch, no threads.

A *block* is what moves: the tensors that are used together (one layer), as one run of bytes, its *image*. A *step* is one
use: a module's forward, with the blocks it needs at once. Every block has a *home*, the level where it rests between its
uses; what does not rest on the device is brought there through a ring of device memory and dropped after use.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anytorch.counts import counted
from anytorch.errors import UsageError
from anytorch.files import replace_file
from anytorch.memory.sizes import words

Home = Literal["device", "host", "disk"]
Limit = Literal["computing", "host link", "disk", "nothing"]
LIMIT_HINTS = {
    "computing": "the streaming is hidden behind computing",
    "host link": "more device memory, fewer bits per weight, or more tokens per pass would help, in this order",
    "disk": "more memory, fewer bits per weight, or more tokens per pass would help, in this order",
    "nothing": "no speeds are known",
}
LANES = {"disk": "disk reads", "link": "copies to the device", "compute": "computing"}
COLOURS = {"disk": "#b8860b", "link": "#1f77b4", "compute": "#2e8b57"}


@dataclass(frozen=True)
class Level:
    """One level of memory: 0 the device, 1 the host's RAM, 2 the disk. Speeds are measured or given, never assumed."""

    index: int
    kind: Home
    place: str  # a torch device ("cpu", …) or a folder
    capacity: int  # bytes we may use
    read_gb_per_s: float | None = None  # from this level towards the device; None: not known
    write_gb_per_s: float | None = None
    pinned: bool = False  # host memory the device reads at full speed
    source: str = ""  # where the numbers come from
    direct: bool = True  # a disk is read past the page cache, which measured faster (or was not measured)


@dataclass(frozen=True)
class Tiers:
    """The levels of this machine for one device, fastest first. `shared`: the device computes in the host's own RAM."""

    levels: tuple[Level, ...]
    shared: bool

    def find(self, kind: Home) -> Level | None:
        return next((level for level in self.levels if level.kind == kind), None)

    @property
    def device(self) -> Level:
        return self.levels[0]


@dataclass(frozen=True)
class WeightBlock:
    name: str
    nbytes: int  # of its image on the device
    rest_nbytes: int = -1  # of what rests on a slower level, when that is quantized; -1: the same

    @property
    def resting(self) -> int:
        """Bytes it takes at its home below the device, on the links, and in the ring."""
        return self.nbytes if self.rest_nbytes < 0 else self.rest_nbytes


@dataclass(frozen=True)
class Step:
    """One use, in the order of a pass. `compute_s` is how long the device computes with these blocks, 0 when unknown."""

    name: str
    blocks: tuple[str, ...]
    compute_s: float = 0.0


@dataclass(frozen=True)
class Budgets:
    """Bytes the plan may use. `host=None`: the device computes in host RAM, there is no level between it and the disk.

    `disk=None`: nothing may be put on disk.
    """

    device: int
    host: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class Speeds:
    """GB/s (10**9) of the links that a block travels: host → device, and disk → wherever it is read to. None: not known."""

    host_gb_per_s: float | None = None
    disk_gb_per_s: float | None = None


@dataclass(frozen=True)
class Event:
    """Something that takes time in a simulated pass. Seconds from the pass's start; may be negative: fetched before it."""

    kind: Literal["disk", "link", "compute"]
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0


@dataclass(frozen=True)
class Prediction:
    """One pass in the steady state, by simulation."""

    pass_s: float
    limit: Limit
    from_host_nbytes: int  # streamed per pass from host homes
    from_disk_nbytes: int
    timeline: tuple[Event, ...] = ()


@dataclass(frozen=True)
class TierPlan:
    """Where every block rests, and how much memory brings the others up. Made by `plan.make_plan`; moves nothing itself."""

    blocks: Mapping[str, WeightBlock]
    steps: tuple[Step, ...]
    budgets: Budgets
    speeds: Speeds
    homes: Mapping[str, Home]
    ring_nbytes: int  # device memory that streamed blocks pass through
    staging_nbytes: int  # host memory that disk reads pass through on their way to a device of its own
    prediction: Prediction = Prediction(0.0, "nothing", 0, 0)

    def nbytes_at(self, home: Home) -> int:
        """Bytes that rest on a level; the ring and the staging buffers are not in it."""
        return sum(
            block.nbytes if home == "device" else block.resting
            for name, block in self.blocks.items()
            if self.homes.get(name) == home
        )

    @property
    def total_nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())

    @property
    def device_nbytes(self) -> int:
        """The most device memory the plan ever uses: never above the budget."""
        return self.nbytes_at("device") + self.ring_nbytes

    @property
    def host_nbytes(self) -> int:
        return self.nbytes_at("host") + self.staging_nbytes

    def explain(self) -> str:
        """In words: what rests where, what streams, the predicted time of a pass and what limits it.

        Several lines for a person. Figures that are not known are left out rather than guessed.
        """
        prediction, budgets = self.prediction, self.budgets
        ring = f"a ring of {words(self.ring_nbytes)} for the others"
        staging = f"{words(self.staging_nbytes)} of buffers for the disk"
        lines = [
            f"{counted(len(self.blocks), 'block')}, {words(self.total_nbytes)}, {counted(len(self.steps), 'step')} per pass",
            _level_words(self, "device", "resident", self.ring_nbytes, ring, budgets.device),
        ]
        if budgets.host is not None:
            lines.append(_level_words(self, "host", "rest there", self.staging_nbytes, staging, budgets.host))
        if self.nbytes_at("disk"):
            lines.append(_level_words(self, "disk", "rest there"))
        streams = [
            f"{words(nbytes)} from {where}" + (f" at {gb_per_s:.3g} GB/s" if gb_per_s else "")
            for nbytes, where, gb_per_s in (
                (prediction.from_host_nbytes, "host memory", self.speeds.host_gb_per_s),
                (prediction.from_disk_nbytes, "disk", self.speeds.disk_gb_per_s),
            )
            if nbytes
        ]
        lines.append(
            "streams per pass: " + ", ".join(streams) if streams else "everything is resident: nothing streams"
        )
        if prediction.pass_s > 0:
            computed = any(step.compute_s for step in self.steps)
            what = "one pass" if computed else "moving the blocks of one pass"
            took = f"{prediction.pass_s * 1e3:.3g} ms" if prediction.pass_s < 1 else f"{prediction.pass_s:.3g} s"
            lines.append(f"predicted: {what} takes {took}, limited by {prediction.limit}")
            lines.append(f"           {LIMIT_HINTS[prediction.limit]}")
        return "\n".join(lines)

    def picture(self, path: str) -> str:
        """Draw the tiers over one pass (who works when, and how full each level is) to a .png or .svg file.

        Returns its path. Needs matplotlib.
        """
        if not path.lower().endswith((".png", ".svg")):
            raise UsageError(f"cannot draw to {path!r}: the name must end in .png or .svg")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as exc:
            raise UsageError(
                "a picture needs matplotlib, which is not installed", hint="pip install matplotlib"
            ) from exc
        figure = Figure(figsize=(9, 5), layout="constrained")
        lanes, levels = figure.subplots(2, 1, height_ratios=[3, 2])
        _lanes(self, lanes)
        _levels(self, levels)
        body = io.BytesIO()
        figure.savefig(body, format=path[-3:].lower(), dpi=120)
        replace_file(Path(path), body.getvalue())
        return path


# --- a plan in words and as a picture ----------------------------------------------------------------------------------


def _level_words(
    plan: TierPlan, home: Home, how: str, passing: int = 0, what: str = "", budget: int | None = None
) -> str:
    """A level in words: what rests there, `what` the `passing` bytes beside it are, and how much of a budget both use."""
    nbytes, count = plan.nbytes_at(home), sum(place == home for place in plan.homes.values())
    line = f"{home + ':':8}{words(nbytes)} {how} in {counted(count, 'block')}" + (f", {what}" if passing else "")
    return line if budget is None else f"{line}; {words(nbytes + passing)} of {words(budget)} used"


def _lanes(plan: TierPlan, axes: Any) -> None:
    kinds = [kind for kind in LANES if any(event.kind == kind for event in plan.prediction.timeline)]
    scale, unit = (1e3, "ms") if plan.prediction.pass_s < 1 else (1.0, "s")
    for event in plan.prediction.timeline:
        row = kinds.index(event.kind)
        start = max(0.0, event.start_s) * scale
        width = min(event.end_s, plan.prediction.pass_s) * scale - start
        if width > 0:
            axes.broken_barh([(start, width)], (row - 0.35, 0.7), facecolor=COLOURS[event.kind], edgecolor="white")
    axes.set_yticks(range(len(kinds)), [LANES[kind] for kind in kinds])
    axes.set_xlim(0, max(plan.prediction.pass_s * scale, 1e-9))
    axes.set_xlabel(f"one pass in the steady state ({unit}); limited by {plan.prediction.limit}")
    axes.set_title(f"{words(plan.total_nbytes)} within {words(plan.budgets.device)} of device memory")


def _levels(plan: TierPlan, axes: Any) -> None:
    """One bar per level: what rests there, the ring or the staging buffers, and the budget as a line."""
    rows = [("device", plan.nbytes_at("device"), plan.ring_nbytes, plan.budgets.device)]
    if plan.budgets.host is not None:
        rows.append(("host", plan.nbytes_at("host"), plan.staging_nbytes, plan.budgets.host))
    if plan.nbytes_at("disk"):
        rows.append(("disk", plan.nbytes_at("disk"), 0, 0))
    gib = 2**30
    for row, (_, resident, passing, budget) in enumerate(rows):
        axes.barh(row, resident / gib, color="#4c72b0", label="resting" if row == 0 else None)
        axes.barh(row, passing / gib, left=resident / gib, color="#dd8452", label="passing" if row == 0 else None)
        if budget:
            axes.plot([budget / gib] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GiB (black line: the budget)")
    axes.legend(loc="lower right")
