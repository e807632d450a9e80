"""Which torch wheel suits this machine: tables of what PyTorch publishes, and `advise`, which reads them.

Pure: nothing here looks at the machine or imports torch. Sources of the tables:

* compute capabilities per CUDA wheel: `torch.cuda.PYTORCH_RELEASES_CODE_CC` and `DEVICE_REQUIREMENT` of the 2.13.0
  wheel (a test compares them); CUDA 12.8 from pytorch#175253 (Volta left it with 2.11);
* which index serves which release: the compatibility matrix in PyTorch's RELEASE.md;
* least driver per CUDA major version: table 2 of NVIDIA's CUDA release notes (minor-version compatibility);
* gfx names per ROCm wheel: the build lists uv keeps in crates/uv-torch/src/backend.rs (2026-08-21).
"""

from __future__ import annotations

import re
from dataclasses import replace

from anytorch.probe.facts import Gpu, Hardware
from anytorch.values import dataclass

INDEX_ROOT = "https://download.pytorch.org/whl"
TESTED = "2.13.0"  # what we advise where no torch is installed: the newest version this project is tested with

Version = tuple[int, ...]


@dataclass(frozen=True)
class WheelAdvice:
    """The torch wheel for a machine.

    `kind` is what it drives: "cuda", "rocm", "xpu", "npu" (the CPU wheel plus torch_npu), "mps", "cpu", or "none" when
    PyTorch publishes nothing for this machine. `index` is "" where the default package index is right.
    """

    kind: str
    index: str
    command: str
    why: str
    needs_driver: str = ""  # the NVIDIA driver that must be installed first; "" when the present one will do


@dataclass(frozen=True)
class Release:
    """What was published of one torch minor version. The first CUDA is the one PyTorch calls its default."""

    cuda: tuple[str, ...]
    rocm: tuple[str, ...]
    newest: str  # the newest patch release


RELEASES: dict[tuple[int, int], Release] = {
    (2, 15): Release(("13.0", "13.4", "13.2", "12.6"), (), "2.15.0"),
    (2, 14): Release(("13.0", "13.2", "12.6"), (), "2.14.1"),
    (2, 13): Release(("13.0", "13.2", "12.6"), ("7.2", "7.1"), "2.13.0"),
    (2, 12): Release(("13.0", "13.2", "12.6"), ("7.2", "7.1"), "2.12.1"),
    (2, 11): Release(("13.0", "12.8", "12.6"), ("7.2", "7.1"), "2.11.0"),
    (2, 10): Release(("12.8", "13.0", "12.6"), ("7.1", "7.0"), "2.10.0"),
    (2, 9): Release(("12.8", "13.0", "12.6"), ("6.4", "6.3"), "2.9.1"),
    (2, 8): Release(("12.8", "12.9", "12.6"), ("6.4", "6.3"), "2.8.0"),
    (2, 7): Release(("12.6", "12.8", "11.8"), ("6.3",), "2.7.1"),
}

# Code compiled for a compute capability runs on the same major version from that minor on, except on the Jetson chips
# between (DEVICE_REQUIREMENT). These capabilities run only where they are named.
JETSON: dict[int, set[int]] = {53: {53}, 62: {62}, 72: {72}, 87: {87}, 101: {101, 110}}
JETSON_EXCLUDED: dict[int, int] = {50: 53, 52: 53, 60: 62, 61: 62, 70: 72, 80: 87, 86: 87, 100: 101}

COMPILED_FOR: dict[str, dict[str, frozenset[int]]] = {
    "11.8": {"x86_64": frozenset({50, 60, 70, 75, 80, 86, 90}), "aarch64": frozenset()},
    "12.6": {"x86_64": frozenset({50, 60, 70, 75, 80, 86, 90}), "aarch64": frozenset({80, 90})},
    "12.8": {"x86_64": frozenset({75, 80, 86, 90, 100, 120}), "aarch64": frozenset({80, 90, 100, 120})},
    "12.9": {"x86_64": frozenset({75, 80, 86, 90, 100, 120}), "aarch64": frozenset({80, 90, 100, 120})},
    "13.0": {"x86_64": frozenset({75, 80, 86, 90, 100, 120}), "aarch64": frozenset({80, 90, 100, 110, 120})},
    "13.2": {"x86_64": frozenset({75, 80, 86, 90, 100, 120}), "aarch64": frozenset({80, 90, 100, 110, 120})},
    "13.4": {"x86_64": frozenset({75, 80, 86, 90, 100, 120}), "aarch64": frozenset({80, 90, 100, 110, 120})},
}
VOLTA_IN_CUDA_12_8_UNTIL = (2, 10)  # torch 2.8, 2.9 and 2.10 still had sm_70 in cu128 and cu129

LEAST_DRIVER: dict[str, dict[int, Version]] = {
    "Linux": {13: (580,), 12: (525, 60, 13), 11: (450, 80, 2)},
    "Windows": {13: (580,), 12: (528, 33), 11: (452, 39)},
}

_OLD_GFX = frozenset({"gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1101", "gfx1102"})
ROCM_GFX: dict[str, frozenset[str]] = {
    "6.3": _OLD_GFX | {"gfx1200", "gfx1201"},
    "6.4": _OLD_GFX | {"gfx1200", "gfx1201"},
    "7.0": _OLD_GFX | {"gfx950", "gfx1200", "gfx1201"},
    "7.1": _OLD_GFX | {"gfx950", "gfx1200", "gfx1201"},
    "7.2": _OLD_GFX | {"gfx950", "gfx1150", "gfx1151", "gfx1200", "gfx1201"},
}

# PCI device ids of the Intel GPUs PyTorch lists as supported: Max (Ponte Vecchio), Arc A (DG2, Flex), Arc B,
# Meteor, Arrow, Lunar and Panther Lake. From drm/intel/pciids.h in Linux. Older integrated GPUs have no XPU support.
XPU_DEVICE_IDS: tuple[range, ...] = (
    range(0x0BD0, 0x0BDC),
    range(0x5690, 0x56C3),
    range(0xE202, 0xE224),
    range(0x7D40, 0x7DD6),
    range(0x6420, 0x6421),
    range(0x64A0, 0x64B1),
    range(0xB080, 0xB0C0),
)


def parse_version(text: str) -> Version:
    """The leading numbers of a version: "580.159.04" → (580, 159, 4); () when there are none."""
    match = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def base_version(text: str) -> str:
    """ "2.13.0+cu130" → "2.13.0"."""
    return text.split("+", 1)[0]


def local_tag(text: str) -> str:
    """ "2.13.0+cu130" → "cu130"; "" when there is none."""
    return text.split("+", 1)[1] if "+" in text else ""


def cuda_tag(cuda: str) -> str:
    """ "13.0" → "cu130"."""
    return "cu" + cuda.replace(".", "")


def least_driver(cuda: str, system: str = "Linux") -> Version | None:
    """The oldest NVIDIA driver that runs a wheel of that CUDA version; None when we do not know it."""
    version = parse_version(cuda)
    return LEAST_DRIVER.get(system, LEAST_DRIVER["Linux"]).get(version[0]) if version else None


def driver_suffices(driver: str, cuda: str, system: str = "Linux") -> bool | None:
    """None when the driver or the CUDA version is not understood."""
    have, need = parse_version(driver), least_driver(cuda, system)
    return have >= need if have and need is not None else None


def compiled_for(cuda: str, arch: str, torch: str = TESTED) -> frozenset[int] | None:
    """The capabilities (sm_90 is 90) the wheel carries code for; None when the table does not know that wheel."""
    by_arch = COMPILED_FOR.get(".".join(cuda.split(".")[:2]))
    if by_arch is None:
        return None
    codes = by_arch["aarch64" if arch == "aarch64" else "x86_64"]
    minor = parse_version(torch)[:2]
    if cuda.startswith(("12.8", "12.9")) and (2, 8) <= minor <= VOLTA_IN_CUDA_12_8_UNTIL and arch != "aarch64":
        codes = codes | {70}
    return codes


def runs_on(code: int, capability: int) -> bool:
    """True if machine code compiled for `code` runs on a card of that capability (torch's DEVICE_REQUIREMENT)."""
    if code in JETSON:
        return capability in JETSON[code]
    return code // 10 == capability // 10 and code <= capability and capability != JETSON_EXCLUDED.get(code)


def covers(cuda: str, capability: tuple[int, int], arch: str, torch: str = TESTED) -> bool | None:
    """True if the CUDA wheel has code for that card; None if the table does not list the wheel."""
    codes = compiled_for(cuda, arch, torch)
    number = capability[0] * 10 + capability[1]
    return None if codes is None else any(runs_on(code, number) for code in codes)


def is_xpu(gpu: Gpu) -> bool:
    """True if PyTorch's XPU wheel supports this Intel GPU."""
    if gpu.vendor != "intel":
        return False
    if gpu.device_id is None:
        return gpu.integrated is False
    return any(gpu.device_id in ids for ids in XPU_DEVICE_IDS)


def cards_of(hardware: Hardware, vendor: str) -> tuple[Gpu, ...]:
    """The vendor's cards, without those handed to a virtual machine."""
    return tuple(gpu for gpu in hardware.gpus_of(vendor) if gpu.driver != "vfio-pci")


def drivable(hardware: Hardware, kind: str) -> tuple[Gpu, ...]:
    """The cards that a wheel of this kind ("cuda", "rocm", "xpu") could drive at all, whatever its version."""
    if kind == "xpu":
        return tuple(gpu for gpu in cards_of(hardware, "intel") if is_xpu(gpu))
    if kind == "rocm":
        known = frozenset().union(*ROCM_GFX.values())
        cards = cards_of(hardware, "amd")
        return tuple(gpu for gpu in cards if (gfx_name(gpu) in known if gpu.arch else not gpu.integrated))
    return cards_of(hardware, "nvidia") if kind == "cuda" else ()


def driver_of(hardware: Hardware) -> str | None:
    return hardware.nvidia.driver or hardware.nvidia.kernel_version


def advise(hardware: Hardware) -> WheelAdvice:
    """The torch to install here, as the command to type. Keeps the installed version where the right index has it."""
    machine = hardware.machine
    if machine.system == "Darwin":
        return _advise_mac(hardware)
    for vendor, advise_vendor in (("nvidia", _advise_nvidia), ("amd", _advise_amd), ("huawei", advise_ascend)):
        if cards_of(hardware, vendor) and (advice := advise_vendor(hardware)) is not None:
            return advice
    xpus = drivable(hardware, "xpu")
    if xpus and machine.arch in ("x86_64", "AMD64", "amd64"):
        version = _kept_version(hardware)
        return _advice(
            hardware, "xpu", "xpu", version, f"{xpus[0].name or 'an Intel GPU'} is driven by PyTorch's own XPU wheel"
        )
    return _advice(hardware, "cpu", "cpu", _kept_version(hardware), "no GPU here has a published PyTorch wheel")


def advise_ascend(hardware: Hardware) -> WheelAdvice:
    """torch_npu wants the CPU wheel of the same minor version beside it."""
    version = _kept_version(hardware)
    advice = _advice(hardware, "npu", "cpu", version, "torch_npu works only beside the CPU wheel of the same version")
    minor = ".".join(version.split(".")[:2])
    return replace(advice, command=f"{advice.command} && pip install 'torch-npu=={minor}.*'")


def _advise_mac(hardware: Hardware) -> WheelAdvice:
    version = _kept_version(hardware)
    command = f"pip install torch=={version}"
    if hardware.machine.arch == "arm64" or hardware.machine.rosetta:
        where = " with an arm64 Python" if hardware.machine.rosetta else ""
        return WheelAdvice("mps", "", command, f"the macOS wheel has MPS built in; install it{where}")
    return WheelAdvice("none", "", "", "PyTorch publishes no wheel for Macs with an Intel processor since 2.3")


def _advise_nvidia(hardware: Hardware) -> WheelAdvice | None:
    """None when no published wheel has code for any of the cards, or none exists for this processor."""
    machine, driver = hardware.machine, driver_of(hardware)
    if machine.arch not in ("x86_64", "AMD64", "amd64", "aarch64"):
        return None
    arch = "aarch64" if machine.arch == "aarch64" else "x86_64"
    known = [gpu.capability for gpu in cards_of(hardware, "nvidia") if gpu.capability is not None]

    def covered(cuda: str, torch: str) -> int:
        return sum(bool(covers(cuda, capability, arch, torch)) for capability in known)

    choices = [(cuda, version) for version, release in _releases(hardware) for cuda in release.cuda]
    fitting = [(cuda, version) for cuda, version in choices if not known or covered(cuda, version)]
    if not fitting:
        return None
    runnable = [
        (cuda, version) for cuda, version in fitting if not driver or driver_suffices(driver, cuda, machine.system)
    ]
    # The most cards first, then the installed version, then the release's own order: `choices` has the last two.
    cuda, version = max(runnable or fitting, key=lambda choice: covered(*choice))
    name = cards_of(hardware, "nvidia")[0].name or "the NVIDIA card"
    need = ".".join(str(part) for part in least_driver(cuda, machine.system) or ())
    if not runnable:
        why = f"install NVIDIA driver {need} or newer first: driver {driver} runs no PyTorch wheel that covers {name}"
    elif driver:
        why = f"CUDA {cuda} runs on driver {driver} (it needs {need}) and covers {name}"
    else:
        why = f"CUDA {cuda} covers {name}; it needs driver {need} or newer"
    advice = _advice(hardware, "cuda", cuda_tag(cuda), version, why)
    return advice if runnable else replace(advice, needs_driver=need)


def _advise_amd(hardware: Hardware) -> WheelAdvice | None:
    """None when PyTorch publishes no ROCm wheel for these cards or this system (ROCm wheels are for Linux x86_64)."""
    if hardware.machine.system != "Linux" or hardware.machine.arch != "x86_64":
        return None
    cards = cards_of(hardware, "amd")
    names = {gfx_name(gpu) for gpu in cards if gpu.arch}
    if not names and all(gpu.integrated for gpu in cards):
        return None
    for version, release in _releases(hardware):
        for rocm in release.rocm:
            found = sorted(names & ROCM_GFX.get(rocm, frozenset()))
            if found or not names:
                why = f"ROCm {rocm} has code for {', '.join(found)}" if found else f"ROCm {rocm} is the newest"
                return _advice(hardware, "rocm", f"rocm{rocm}", version, why)
    return None


def gfx_name(gpu: Gpu) -> str:
    """ "gfx90a:sramecc+:xnack-" → "gfx90a"; "" when unknown."""
    return (gpu.arch or "").split(":", 1)[0]


def _kept_version(hardware: Hardware) -> str:
    """The installed version when it is a published release, else the one we are tested with."""
    installed = base_version(hardware.torch.version) if hardware.torch else ""
    return installed if re.fullmatch(r"2\.\d+\.\d+", installed) else TESTED


def _releases(hardware: Hardware) -> list[tuple[str, Release]]:
    """The installed version first, then the newest of every minor version from the tested one down, then newer ones."""
    kept = _kept_version(hardware)
    minor = parse_version(kept)[:2]
    tested = parse_version(TESTED)[:2]
    rest = sorted(RELEASES, key=lambda key: (key > tested, -key[0], -key[1]))
    ordered = [(kept, release) for key, release in RELEASES.items() if key == minor]
    return ordered + [(RELEASES[key].newest, RELEASES[key]) for key in rest if key != minor]


def _advice(hardware: Hardware, kind: str, tag: str, version: str, why: str) -> WheelAdvice:
    """The command names the build (`torch==2.13.0+cu130`): pip takes +cpu for the same version and would do nothing."""
    index = f"{INDEX_ROOT}/{tag}"
    kept = hardware.torch is not None and base_version(hardware.torch.version) == version
    if hardware.torch is not None and not kept:
        why += f"; torch {base_version(hardware.torch.version)} is not published there, {version} is"
    wanted = [f"torch=={version}+{tag}"]
    for name in ("torchvision", "torchaudio"):
        installed = hardware.packages.versions.get(name)
        if installed:  # they are compiled against one torch build: move them with it
            wanted.append(f"{name}=={base_version(installed)}+{tag}" if kept else name)
    return WheelAdvice(kind, index, f"pip install {' '.join(wanted)} --index-url {index}", why)
