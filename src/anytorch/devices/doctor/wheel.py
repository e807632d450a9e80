"""The installed torch wheel against the cards and the driver of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from anytorch.devices.doctor.common import arch_list, in_container, installed, listed, named
from anytorch.devices.doctor.registry import Finding, diagnosis
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import (
    advise,
    cards_of,
    covers,
    drivable,
    driver_of,
    driver_suffices,
    gfx_name,
    least_driver,
    runs_on,
)
from anytorch.probe.facts import Gpu

INSTALL_PAGE = "https://pytorch.org/get-started/locally/"
KIND_OF = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel"}


@diagnosis(
    "cpu-only-wheel",
    Level.ERROR,
    "An NVIDIA GPU is present, but torch is the CPU-only build",
    number=1,
    symptom="`torch.cuda.is_available()` is False; `.to('cuda')` raises "
    "`AssertionError: Torch not compiled with CUDA enabled`.",
    evidence="An NVIDIA card in PCI (vendor 0x10de, class 03) or in NVML, while `cuda`, `hip` and `xpu` are all None "
    "in `torch/version.py`.",
    fix="`pip install torch==X+cuNNN --index-url https://download.pytorch.org/whl/cuNNN`; the doctor prints the "
    "index that suits this driver and card. With uv: `uv pip install torch --torch-backend=auto`.",
    background=(INSTALL_PAGE, "https://github.com/pytorch/pytorch/issues/85332"),
)
def cpu_only_wheel(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, cards = hardware.torch, cards_of(hardware, "nvidia")
    if wheel is None or wheel.kind != "cpu" or not cards or hardware.machine.system == "Darwin":
        return
    advice = advise(hardware)
    if advice.kind != "cuda":
        return  # no published wheel covers the card: wgpu-missing speaks of the way that is left
    yield Finding(
        f"{named(cards[0])} is present, but torch {wheel.version} is the CPU-only build",
        advice.command,
        f"{wheel.path}: cuda, hip and xpu are None in version.py; {advice.why}",
        ("cuda",),
    )


@diagnosis(
    "wrong-wheel",
    Level.ERROR,
    "The GPU and the torch wheel are of different makers",
    number=2,
    symptom="An AMD or Intel GPU is in the machine and `torch.cuda.is_available()` or `torch.xpu.is_available()` is "
    "False; or `RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
    "installed a driver from http://www.nvidia.com/Download/index.aspx` on a machine without an NVIDIA card.",
    evidence="PCI vendor 0x1002 (with a KFD node whose simd_count is above 0), 0x8086 or 0x10de beside the kind of "
    "wheel that `torch/version.py` names.",
    fix="`pip install torch==X+rocmN --index-url https://download.pytorch.org/whl/rocmN` for AMD, "
    "`pip install torch==X+xpu --index-url https://download.pytorch.org/whl/xpu` for Intel.",
    background=(INSTALL_PAGE, "https://docs.pytorch.org/docs/stable/notes/get_start_xpu.html"),
)
def wrong_wheel(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel = hardware.torch
    if wheel is None or hardware.machine.system == "Darwin" or installed(hardware, "torch-npu"):
        return
    if drivable(hardware, wheel.kind):
        return  # the wheel has a card of its own here
    advice = advise(hardware)
    if advice.kind not in KIND_OF or advice.kind == wheel.kind or (wheel.kind, advice.kind) == ("cpu", "cuda"):
        return
    card = drivable(hardware, advice.kind)[0]
    built = "the CPU-only build" if wheel.kind == "cpu" else f"built for {KIND_OF[wheel.kind]} GPUs"
    yield Finding(
        f"{named(card)} is present, but torch {wheel.version} is {built}",
        advice.command,
        f"{wheel.path}: version.py names a {wheel.kind} wheel; {advice.why}",
        (advice.kind,),
    )


@diagnosis(
    "driver-too-old",
    Level.ERROR,
    "The NVIDIA driver is older than the torch wheel needs",
    number=3,
    symptom="`The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx`.",
    evidence="The driver's version (NVML, `/proc/driver/nvidia/version`) against the least one for the wheel's CUDA: "
    "580 for CUDA 13, 525.60.13 (Windows 528.33) for CUDA 12. A `cuda-compat` libcuda lifts the limit and silences "
    "this.",
    fix="Update the driver, or install the wheel of an older CUDA: "
    "`pip install torch==X+cu126 --index-url https://download.pytorch.org/whl/cu126`.",
    background=(
        "https://docs.nvidia.com/deploy/cuda-compatibility/",
        "https://github.com/pytorch/pytorch/issues/31243",
    ),
)
def driver_too_old(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, driver = hardware.torch, driver_of(hardware)
    if wheel is None or wheel.kind != "cuda" or not wheel.cuda or not driver:
        return
    if "compat" in (hardware.nvidia.libcuda or ""):
        return
    # Inside WSL NVML speaks for the Windows driver.
    system = "Windows" if hardware.machine.wsl else hardware.machine.system
    if driver_suffices(driver, wheel.cuda, system) is not False:
        return
    need = ".".join(str(part) for part in least_driver(wheel.cuda, system) or ())
    advice = advise(hardware)
    older = advice.kind == "cuda" and not advice.needs_driver
    yield Finding(
        f"NVIDIA driver {driver} is too old for torch {wheel.version}: CUDA {wheel.cuda} needs {need} or newer",
        advice.command if older else f"install NVIDIA driver {need} or newer: https://www.nvidia.com/drivers",
        f"driver {driver}; {wheel.path}: cuda = {wheel.cuda!r}; {advice.why}",
        ("cuda",),
    )


def code_for(facts: Facts, gpu: Gpu) -> bool | None:
    """Has the installed CUDA wheel code for this card? By its own list if the child asked it, else by the tables."""
    wheel = facts.hardware.torch
    if wheel is None or not wheel.cuda or gpu.capability is None:
        return None
    number = gpu.capability[0] * 10 + gpu.capability[1]
    listed_codes = [(m.group(1), int(m.group(2))) for m in map(_ARCH.fullmatch, arch_list(facts)) if m]
    if listed_codes:  # compute_90 is PTX, which any newer card compiles at load time
        return any(runs_on(code, number) if kind == "sm" else code <= number for kind, code in listed_codes)
    return covers(wheel.cuda, gpu.capability, facts.hardware.machine.arch, wheel.version)


_ARCH = re.compile(r"(sm|compute)_(\d+)[a-z]?")


@diagnosis(
    "card-not-covered",
    Level.ERROR,
    "The torch wheel has no code for this NVIDIA card",
    number=4,
    symptom="`torch.cuda.is_available()` is True, then the first kernel dies with `CUDA error: no kernel image is "
    "available for execution on the device`; before it a warning `... with CUDA capability sm_120 is not compatible "
    "with the current PyTorch installation.`",
    evidence="The card's compute capability (NVML) against what the wheel was compiled for: "
    "`torch.cuda.get_arch_list()` when torch was tried, else the release table of the wheel's CUDA version.",
    fix="Install the wheel that covers it: `pip install torch==X+cuNNN --index-url "
    "https://download.pytorch.org/whl/cuNNN` (V100, P100 and GTX 10xx need cu126; sm_100 and sm_120 need cu128 or "
    "newer).",
    background=("https://github.com/pytorch/pytorch/issues/150733", "https://github.com/pytorch/pytorch/issues/172352"),
)
def card_not_covered(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, cards = hardware.torch, cards_of(hardware, "nvidia")
    bare = [gpu for gpu in cards if code_for(facts, gpu) is False]
    if wheel is None or not bare:
        return
    advice = advise(hardware)
    others = len(bare) < len(cards)
    for gpu in bare:
        major, minor = gpu.capability or (0, 0)
        yield Finding(
            f"torch {wheel.version} has no code for {named(gpu)} (compute capability {major}.{minor})",
            advice.command if advice.kind == "cuda" else "pip install 'anytorch[webgpu]'",
            f"sm_{major}{minor} is not among what CUDA {wheel.cuda} was compiled for; {advice.why}",
            () if others else ("cuda",),
            Level.WARNING if others else None,
        )


@diagnosis(
    "gfx-not-in-wheel",
    Level.ERROR,
    "The ROCm wheel has no code for this AMD card",
    number=21,
    needs="child",
    symptom="`torch.cuda.is_available()` is True, then `HIP error: invalid device function`.",
    evidence="The card's gfx name (KFD topology) against `torch.cuda.get_arch_list()` of the wheel.",
    fix="Another ROCm wheel: `pip install torch==X+rocmN --index-url https://download.pytorch.org/whl/rocmN`. "
    "Telling HSA that the card is a near relative (`HSA_OVERRIDE_GFX_VERSION=10.3.0`) is an experiment: it can "
    "compute wrongly or hang.",
    background=("https://rocm.docs.amd.com/projects/install-on-linux/en/latest/reference/system-requirements.html",),
)
def gfx_not_in_wheel(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    wheel, cards, codes = hardware.torch, cards_of(hardware, "amd"), arch_list(facts)
    if wheel is None or wheel.kind != "rocm" or not codes:
        return
    bare = [gpu for gpu in cards if gpu.arch and not _gfx_listed(gfx_name(gpu), codes)]
    advice = advise(hardware)
    override = hardware.env.get("HSA_OVERRIDE_GFX_VERSION")
    harmless = len(bare) < len(cards) or override is not None
    for gpu in bare:
        tail = f"; HSA_OVERRIDE_GFX_VERSION={override} passes it off as another" if override else ""
        yield Finding(
            f"torch {wheel.version} has no code for {named(gpu)} ({gfx_name(gpu)}){tail}",
            advice.command
            if advice.kind == "rocm" and wheel.version not in advice.command
            else "pip install 'anytorch[webgpu]'  # no ROCm wheel has code for it",
            f"torch.cuda.get_arch_list() is {listed(codes)}",
            () if harmless else ("rocm",),
            Level.WARNING if harmless else None,
        )


def _gfx_listed(name: str, codes: tuple[str, ...]) -> bool:
    plain = {code.split(":", 1)[0] for code in codes}
    return name in plain or f"{name[:5]}-generic" in plain  # gfx1103 runs gfx11-generic code


@diagnosis(
    "container-without-gpu",
    Level.ERROR,
    "The container was started without the GPU",
    number=8,
    symptom="The host has a GPU and the container does not: `Found no NVIDIA driver on your system`, `No HIP GPUs are "
    "available`, or zero NPUs.",
    evidence="A container (`/.dockerenv`, `/run/.containerenv`, cgroup), the card in `/sys/bus/pci`, and none of its "
    "nodes under `/dev`.",
    fix="`docker run --gpus all …` for NVIDIA, `docker run --device /dev/kfd --device /dev/dri …` for AMD, "
    "`--device /dev/dri` for Intel, `--device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm "
    "--device /dev/hisi_hdc` for Ascend.",
    background=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",),
)
def container_without_gpu(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    if not in_container(hardware) or hardware.machine.wsl:
        return
    for vendor, backend, prefixes, flags in (
        ("nvidia", "cuda", ("/dev/nvidia",), "--gpus all"),
        ("amd", "rocm", ("/dev/kfd",), "--device /dev/kfd --device /dev/dri"),
        ("intel", "xpu", ("/dev/dri/renderD",), "--device /dev/dri"),
        (
            "huawei",
            "npu",
            ("/dev/davinci",),
            "--device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc",
        ),
    ):
        # A processor's small graphics unit is rarely what somebody wants in a container.
        cards = [gpu for gpu in cards_of(hardware, vendor) if not gpu.integrated]
        if cards and not any(node.path.startswith(prefixes) for node in hardware.nodes):
            yield Finding(
                f"{named(cards[0])} is in the host, but this {hardware.machine.container} container has no "
                f"{prefixes[0]}* node",
                f"docker run {flags} …",
                f"PCI lists {listed(named(gpu) for gpu in cards)}; nodes here: "
                f"{listed(node.path for node in hardware.nodes) or 'none'}",
                (backend,),
            )
