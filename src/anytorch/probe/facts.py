"""What can be known about a machine without torch: plain, frozen values that `anytorch.probe` fills in.

None always means "not known", never "zero". Sizes are bytes. Everything here turns into JSON with `as_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from enum import Enum
from typing import Any

from anytorch.values import dataclass


@dataclass(frozen=True)
class Machine:
    """The operating system and the Python that runs on it."""

    system: str  # "Linux", "Darwin", "Windows"
    release: str
    arch: str  # "x86_64", "aarch64", "arm64"
    python: str  # "3.11.7"
    executable: str = ""
    macos: str | None = None  # "14.5"
    rosetta: bool = False  # an x86_64 Python translated on an arm64 Mac
    boot_id: str | None = None
    container: str | None = None  # "docker", "podman", "kubernetes", "lxc", …
    wsl: bool = False
    wsl_libraries_first: bool | None = None  # is /usr/lib/wsl/lib the first folder with a libcuda?


@dataclass(frozen=True)
class Cpu:
    model: str | None
    vendor: str | None
    logical: int  # what the kernel shows
    physical: int | None
    affinity: int | None  # how many of them this process may run on
    quota: float | None  # cgroup CPU limit, in cores
    performance_cores: int | None = None  # physical; None unless the CPU is hybrid
    efficiency_cores: int | None = None
    features: frozenset[str] = frozenset()  # lower case, as /proc/cpuinfo or sysctl writes them

    @property
    def hybrid(self) -> bool:
        return bool(self.performance_cores and self.efficiency_cores)

    @property
    def usable(self) -> int:
        """Threads that can really run at once: the smallest of logical, affinity and the quota rounded down."""
        limit = min(self.logical, self.affinity or self.logical)
        if self.quota is not None:
            limit = min(limit, int(self.quota))
        return max(1, limit)

    @property
    def good_threads(self) -> int:
        """A sane number of compute threads: physical cores (performance cores of a hybrid CPU) within `usable`."""
        cores = self.performance_cores if self.hybrid else self.physical
        return max(1, min(self.usable, cores or self.usable))


@dataclass(frozen=True)
class Memory:
    total: int | None
    available: int | None
    limit: int | None  # cgroup memory limit, None when there is none
    limit_used: int | None  # of that limit
    shm: int | None = None  # size of /dev/shm

    @property
    def usable_total(self) -> int | None:
        known = [n for n in (self.total, self.limit) if n is not None]
        return min(known) if known else None

    @property
    def usable_available(self) -> int | None:
        """min(MemAvailable, what the cgroup still allows)."""
        known = [self.available] if self.available is not None else []
        if self.limit is not None and self.limit_used is not None:
            known.append(max(0, self.limit - self.limit_used))
        return min(known) if known else None


@dataclass(frozen=True)
class Gpu:
    """One accelerator seen by any reader (PCI, NVML, KFD, device nodes); the same card is listed once."""

    vendor: str  # "nvidia", "amd", "intel", "apple", "huawei", or the PCI vendor id as "0x1234"
    name: str | None = None
    pci: str | None = None  # "0000:01:00.0"
    device_id: int | None = None
    driver: str | None = None  # kernel driver bound to it: "nvidia", "nouveau", "amdgpu", "xe", "vfio-pci"; None: none
    uuid: str | None = None
    index: int | None = None  # the vendor's own index, before any mask: NVML index, KFD order, /dev/davinciN
    capability: tuple[int, int] | None = None  # NVIDIA compute capability
    arch: str | None = None  # AMD "gfx1100"
    integrated: bool | None = None
    display: bool | None = None  # drives the console (boot_vga)
    total: int | None = None
    free: int | None = None
    unified: bool | None = None  # shares the system's RAM
    minor: int | None = None  # N of /dev/nvidiaN
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nvidia:
    """The NVIDIA driver as its own files and NVML tell it."""

    kernel_version: str | None = None  # of the loaded kernel module
    nvml_found: bool = False
    nvml_code: int | None = None  # what nvmlInit_v2 returned; 0 is success
    nvml_error: str | None = None
    driver: str | None = None  # as NVML reports it
    cuda: tuple[int, int] | None = None  # newest CUDA the driver supports, from NVML
    libcuda: str | None = None  # the path the dynamic loader would take
    fabric_manager: bool | None = None


@dataclass(frozen=True)
class Ascend:
    """Huawei's software, as its version files tell it."""

    driver: str | None = None
    toolkit: str | None = None  # CANN
    toolkit_path: str | None = None


@dataclass(frozen=True)
class Node:
    """A device node that compute needs."""

    path: str  # "/dev/kfd"
    readable: bool
    writable: bool
    group: str | None = None
    gid: int | None = None


@dataclass(frozen=True)
class Icd:
    """A driver file of the Vulkan or OpenCL loader."""

    path: str
    library: str | None
    found: bool | None  # could the library be found? None: not looked for


@dataclass(frozen=True)
class Graphics:
    """What a GPU path without a vendor toolkit needs."""

    vulkan_loader: str | None = None
    vulkan_icds: tuple[Icd, ...] = ()
    opencl_loader: str | None = None
    opencl_icds: tuple[Icd, ...] = ()
    level_zero_loader: str | None = None
    level_zero_driver: str | None = None
    level_zero_code: int | None = None  # what zeInit/zesInit returned
    level_zero_devices: int | None = None


@dataclass(frozen=True)
class TorchWheel:
    """The torch this Python would import, read as text from its version.py."""

    version: str  # "2.13.0+cpu"
    path: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None
    others: tuple[str, ...] = ()  # further torch installs later on sys.path

    @property
    def kind(self) -> str:
        """ "cuda", "rocm", "xpu" or "cpu". A macOS wheel says "cpu" here and has MPS all the same."""
        if self.hip:
            return "rocm"
        if self.cuda:
            return "cuda"
        return "xpu" if self.xpu else "cpu"


@dataclass(frozen=True)
class EntryPoint:
    group: str
    name: str
    value: str
    distribution: str


@dataclass(frozen=True)
class Packages:
    """Installed distributions that matter to a device, by normalised name ("torch-npu"): version."""

    versions: Mapping[str, str] = field(default_factory=dict)
    entry_points: tuple[EntryPoint, ...] = ()  # of the groups torch.backends and anytorch.backends


@dataclass(frozen=True)
class Hardware:
    """One look at the machine. `problems` are readers that failed: they never raise."""

    machine: Machine
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...] = ()
    nvidia: Nvidia = Nvidia()
    ascend: Ascend = Ascend()
    nodes: tuple[Node, ...] = ()
    graphics: Graphics = Graphics()
    torch: TorchWheel | None = None
    packages: Packages = Packages()
    env: Mapping[str, str] = field(default_factory=dict)  # the variables that mask or steer devices, when set
    problems: tuple[str, ...] = ()

    def gpus_of(self, vendor: str) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.vendor == vendor)

    def node(self, path: str) -> Node | None:
        return next((node for node in self.nodes if node.path == path), None)


def as_json(value: Any) -> Any:
    """Dataclasses, enums, tuples and sets as plain JSON values."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(as_json(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return value
