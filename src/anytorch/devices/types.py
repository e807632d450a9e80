"""The values the device layer passes around (reasons, capabilities, candidates, reports), and what a back end is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from anytorch.probe.facts import Hardware
from anytorch.values import dataclass

SOFTWARE_PRIORITY = 50  # of a software adapter such as llvmpipe: the CPU with a detour, so below the CPU itself


class State(str, Enum):
    USABLE = "usable"  # allocated, multiplied and copied on it
    SEEN = "seen, not tried"  # files say it should work
    UNUSABLE = "unusable"


class Level(str, Enum):
    """How bad a finding is, worst first."""

    ERROR = "error"  # a device cannot be used, or torch cannot
    WARNING = "warning"  # it works, but slowly, wrongly or by luck
    NOTE = "note"


SEVERITY = {level: place for place, level in enumerate(Level)}  # for sorting


@dataclass(frozen=True)
class Reason:
    """One diagnosis that fired. The code names its page: docs/doctor/<code>.md."""

    code: str  # "cpu-only-wheel"
    level: Level
    text: str  # what is wrong, in one sentence with the facts in it
    fix: str = ""  # the exact command or step
    evidence: str = ""  # the file, value or message that proves it
    backends: tuple[str, ...] = ()  # the back ends it keeps from working: ("cuda",)


@dataclass(frozen=True)
class Caps:
    """What a device can do. Code above this layer asks these and never the device's name."""

    dtypes: tuple[str, ...]  # can be stored and computed with: "float32", "bfloat16", …
    fast_dtypes: tuple[str, ...]  # of those, the ones with hardware behind them
    autocast_dtype: str | None  # the dtype autocast should use here; None: autocast does not pay
    graphs: bool = False  # capture and replay (torch.accelerator.Graph, CUDA graphs)
    triton: bool = False
    flash_attention: bool = False
    quantizations: tuple[str, ...] = ()  # "int8", "int4", "int2", "fp8", "fp4"
    unified_memory: bool = False  # shares the host's RAM
    peak_gb_per_s: float | None = None  # memory bandwidth, when known
    peak_tflops: Mapping[str, float] = field(default_factory=dict)  # per dtype, when known
    early_launches: bool = False  # a kernel may start before the one before it is done, and wait for it itself
    no_triton: str = ""  # why there is none, on a device of a kind that it compiles for


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device; None, never 0, where unknown. `source` names where the figures come from."""

    allocated: int | None = None  # by this process's tensors
    reserved: int | None = None  # by this process's allocator
    peak: int | None = None  # most that was ever allocated
    free: int | None = None
    total: int | None = None
    source: str = ""


@dataclass(frozen=True)
class DeviceReport:
    """One device that the child process has computed on."""

    index: int  # among the visible ones
    name: str
    uuid: str | None = None
    pci: str | None = None
    total: int | None = None
    free: int | None = None
    integrated: bool | None = None
    software: bool = False
    caps: Caps | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # back end's own: capability, gfx name, adapter API, …


@dataclass(frozen=True)
class BackendReport:
    """The result of trying one back end: its devices, or a code and a message why there are none."""

    name: str
    devices: tuple[DeviceReport, ...] = ()
    code: str = ""  # "", or a diagnosis code, or "crashed", "timed-out", "failed", "not-built", "no-device"
    error: str = ""  # the exception's own words
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TorchReport:
    """What the child process found: torch itself, then each back end."""

    version: str | None = None
    import_error: str = ""  # `import torch` failed, even with plug-in autoload off
    autoload_error: str = ""  # `import torch` failed only because of a plug-in
    backends: Mapping[str, BackendReport] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)  # threads, mkldnn_bf16, arch_list, cuinit_code, …
    seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class Facts:
    """The facts a diagnosis may use. `torch` is None if nothing was tried."""

    hardware: Hardware
    torch: TorchReport | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # backend, cpu_dtype, threads as configured


@dataclass(frozen=True)
class Candidate:
    """One device a request may mean, usable or not, with its facts."""

    backend: str  # "rocm"
    torch_type: str  # "cuda": what torch.device calls it
    index: int
    name: str
    state: State
    priority: int  # of its back end; higher is better
    uuid: str | None = None
    pci: str | None = None
    physical_index: int | None = None  # before masks
    total: int | None = None
    free: int | None = None
    integrated: bool | None = None
    software: bool = False
    display: bool = False
    in_use: bool = False  # this process has memory on it
    caps: Caps | None = None
    reasons: tuple[Reason, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The name to ask for it by: "rocm:0"; the CPU is plain "cpu"."""
        return self.backend if self.backend == "cpu" else f"{self.backend}:{self.index}"

    @property
    def torch_name(self) -> str:
        return self.torch_type if self.torch_type == "cpu" else f"{self.torch_type}:{self.index}"


# --- the interface of a back end --------------------------------------------------------------------------------------

# Ours and third-party ones load through the entry-point group `anytorch.backends`. A plug-in names a class (or a function)
# that takes no arguments and returns an object with these attributes and methods. Deriving from
# `anytorch.devices.base.TorchBackend` gives working defaults for all of them but the names; `examples/plugin-backend/` is a
# complete one. A back end whose torch device lives in a module of its own may also have `activate()`, called in the user's
# process when one of its devices has been chosen.


@runtime_checkable
class Backend(Protocol):
    name: str  # what users ask for: "rocm"
    torch_type: str  # what torch.device calls it: "cuda"
    title: str  # "AMD GPU (ROCm)"
    priority: int  # higher wins; ours: CUDA/ROCm 700, NPU 600, XPU 500, MPS 400, WebGPU 300, CPU 100
    aliases: tuple[str, ...]  # other words for it: ("hip", "amd")

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        """The devices that files list. Uses neither torch nor a driver."""

    def try_out(self) -> BackendReport:
        """Use every device for real: allocate, multiply, differentiate, copy. Runs in the child process only."""

    def live(self) -> BackendReport | None:
        """The devices if this very process has already loaded this back end, else None. Must not initialise anything."""

    def caps(self, index: int) -> Caps:
        """What the device can do. May initialise the driver."""

    def memory(self, index: int) -> MemoryUse:
        """Memory figures. Must not initialise a driver that is not initialised yet."""

    def empty_cache(self) -> None:
        """Return cached memory to the system; does nothing if the driver is not initialised."""

    def synchronize(self, index: int) -> None:
        """Wait until the device has finished its work."""

    def seed(self, value: int) -> None:
        """Seed every device of this back end."""
