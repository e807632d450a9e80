"""The values the memory layer passes around. Plain data: no torch, no files, no threads.

A *block* is what moves: the tensors that are used together (one layer), as one run of bytes, its *image*. A *step* is one
use: a module's forward, with the blocks it needs at once. Every block has a *home*, the level where it rests between its
uses; what does not rest on the device is brought there through a ring of device memory and dropped after use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from anytorch.memory.plan_report import draw, explain

Home = Literal["device", "host", "disk"]
Limit = Literal["computing", "host link", "disk", "nothing"]


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
        """In words: what rests where, what streams, the predicted time of a pass and what limits it."""
        return explain(self)

    def picture(self, path: str) -> str:
        """Draw the tiers over one pass to a .png or .svg file; returns its path. Needs matplotlib."""
        return draw(self, path)
