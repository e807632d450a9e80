"""What a diagnosis is, the list of all of them, and small functions on the facts that several share.

A diagnosis is one small pure function over `Facts` that yields `Finding`s. `@diagnosis(...)` puts it on the list under the
function's name, together with the text of its page (docs/doctor/<code>.md is written from it), so that code and page
cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

from anytorch.devices.types import BackendReport, Facts, Level
from anytorch.devices.wheels import cards_of, covers, driver_suffices, gfx_name, is_xpu
from anytorch.probe.facts import Gpu, Hardware
from anytorch.values import dataclass

T = TypeVar("T")


class Finding(NamedTuple):
    """One thing that is wrong. `level` is only given where it differs from the diagnosis' own."""

    text: str  # one sentence with the facts in it
    fix: str = ""  # what to type
    evidence: str = ""
    backends: tuple[str, ...] = ()
    level: Level | None = None


Check = Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True)
class Diagnosis:
    code: str
    level: Level
    title: str
    check: Check
    symptom: str  # what the user sees, verbatim where a message is known
    evidence: str  # what we look at
    fix: str  # the command, in general terms
    needs: Literal["files", "child"] = "files"  # can the probe alone tell, or must torch have been tried?
    background: str = ""  # links, with spaces between


_registered: dict[str, Diagnosis] = {}


def diagnosis(level: Level, title: str, **page: Any) -> Callable[[Check], Check]:
    """Put a check on the list. `def nvml_mismatch` has the code "nvml-mismatch"; registration gives the list's order."""

    def register(check: Check) -> Check:
        code = check.__name__.replace("_", "-")
        if code in _registered:
            raise ValueError(f"two diagnoses are called {code!r}")
        _registered[code] = Diagnosis(code, level, title, check, **page)
        return check

    return register


def registered() -> tuple[Diagnosis, ...]:
    return tuple(_registered.values())


# --- facts -----------------------------------------------------------------------------------------------------------

TORCH_BACKENDS = ("cuda", "rocm", "npu", "xpu", "mps", "webgpu", "cpu")
VENDOR_BACKEND = {"nvidia": "cuda", "amd": "rocm", "huawei": "npu", "intel": "xpu", "apple": "mps"}
GIB = 1024**3


def named(gpu: Gpu) -> str:
    """ "NVIDIA H200 at 0000:01:00.0"."""
    name = gpu.name or f"{gpu.vendor.upper() if gpu.vendor == 'amd' else gpu.vendor.capitalize()} GPU"
    return f"{name} at {gpu.pci}" if gpu.pci else name


def listed(items: Iterable[str]) -> str:
    return ", ".join(items)


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB"


def one_line(text: str) -> str:
    """The text on one line, without the control characters that files and drivers may bring along."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def first_line(text: str, limit: int = 300) -> str:
    """The message without its traceback's tail: enough to recognise, short enough for one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:limit].rstrip(".") if lines else ""


def true_cause(error: str) -> str:
    """The last link of an exception chain as the child writes it: "RuntimeError: … ← ImportError: libhccl.so: …"."""
    return first_line(error.rsplit(" ← ", 1)[-1])


def report_of(facts: Facts, backend: str) -> BackendReport | None:
    return facts.torch.backends.get(backend) if facts.torch is not None else None


def reports(facts: Facts) -> tuple[BackendReport, ...]:
    return tuple(facts.torch.backends.values()) if facts.torch is not None else ()


def child_fact(facts: Facts, key: str, kind: type[T]) -> T | None:
    """What the child reported under this name; None when it did not, or reported something of another kind."""
    value = facts.torch.facts.get(key) if facts.torch is not None else None
    return value if type(value) is kind else None


def arch_list(facts: Facts) -> tuple[str, ...]:
    """What torch.cuda.get_arch_list() said in the child; () when it was not asked."""
    return tuple(item for item in child_fact(facts, "arch_list", list) or () if isinstance(item, str))


def in_container(hardware: Hardware) -> bool:
    return hardware.machine.container is not None


def installed(hardware: Hardware, name: str) -> str | None:
    return hardware.packages.versions.get(name)


def wants_webgpu(facts: Facts) -> bool:
    asked = facts.settings.get("backend")
    return isinstance(asked, str) and asked.split(":")[0] in ("webgpu", "vulkan", "wgpu")


def vendor_path(facts: Facts) -> bool:
    """True if the installed torch drives at least one GPU here, as far as files and the child process can tell."""
    for backend in ("cuda", "rocm", "npu", "xpu", "mps"):
        report = report_of(facts, backend)
        if report is not None and report.devices:
            return True
    hardware = facts.hardware
    wheel, machine = hardware.torch, hardware.machine
    if wheel is None:
        return False
    if machine.system == "Darwin":
        return machine.arch == "arm64" and not machine.rosetta
    if wheel.kind == "cuda" and wheel.cuda:
        driver = hardware.nvidia.driver or hardware.nvidia.kernel_version
        return any(
            (gpu.capability is None or covers(wheel.cuda, gpu.capability, machine.arch, wheel.version) is not False)
            and (driver is not None and driver_suffices(driver, wheel.cuda, machine.system) is not False)
            for gpu in cards_of(hardware, "nvidia")
        )
    if wheel.kind == "rocm":
        names = arch_list(facts)
        return any(not names or gfx_name(gpu) in names for gpu in cards_of(hardware, "amd"))
    if wheel.kind == "xpu":
        return any(is_xpu(gpu) for gpu in cards_of(hardware, "intel"))
    return bool(cards_of(hardware, "huawei")) and installed(hardware, "torch-npu") is not None


def real_gpus(hardware: Hardware) -> tuple[Gpu, ...]:
    """Cards a graphics API could drive: not NPUs, not cards handed to a virtual machine."""
    return tuple(gpu for gpu in hardware.gpus if gpu.vendor != "huawei" and gpu.driver != "vfio-pci")


def webgpu_level(facts: Facts) -> Level:
    """How bad a broken Vulkan is: an error where WebGPU is the way to the GPU or the user asks for it, a note otherwise."""
    if wants_webgpu(facts) or (real_gpus(facts.hardware) and not vendor_path(facts)):
        return Level.ERROR
    return Level.NOTE
