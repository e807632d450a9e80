"""NVIDIA: the driver (kernel module, libraries, NVML, what cuInit answers), and what is worth knowing about a card."""

from __future__ import annotations

from collections.abc import Iterator

from anytorch.devices.doctor.common import (
    Finding,
    child_fact,
    diagnosis,
    gib,
    in_container,
    installed,
    named,
    report_of,
)
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import cards_of
from anytorch.probe.facts import Gpu

# CUresult values, from cuda.h; EXPLAINED are those with a diagnosis of their own.
STUB_LIBRARY, NO_DEVICE, SYSTEM_NOT_READY, DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED, UNKNOWN = 34, 100, 802, 803, 804, 999
EXPLAINED = (0, STUB_LIBRARY, SYSTEM_NOT_READY, DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED, UNKNOWN)
CUDA_ERRORS = {
    1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 3: "NOT_INITIALIZED", 46: "DEVICE_UNAVAILABLE", NO_DEVICE: "NO_DEVICE",
    101: "INVALID_DEVICE", 304: "OPERATING_SYSTEM", 800: "NOT_PERMITTED",
}  # fmt: skip
NVML_SUCCESS, NVML_DRIVER_NOT_LOADED, NVML_LIB_RM_VERSION_MISMATCH = 0, 9, 18


@diagnosis(
    Level.ERROR,
    "The NVIDIA kernel module is not loaded",
    symptom="`nvidia-smi` says `NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.`; "
    "torch says `Found no NVIDIA driver on your system.`",
    evidence="An NVIDIA card in PCI and no `/proc/driver/nvidia/version`; the card's `driver` link says whether "
    "nouveau holds it.",
    fix="`sudo modprobe nvidia`; after a kernel update `sudo dkms autoinstall && sudo modprobe nvidia`; with Secure "
    "Boot (`mokutil --sb-state`) enrol the module's key. If nouveau holds the card, blacklist it and reboot.",
    background="https://github.com/pytorch/pytorch/issues/16936",
)
def nvidia_module_not_loaded(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    cards, nvidia = cards_of(hardware, "nvidia"), hardware.nvidia
    if hardware.machine.system != "Linux" or hardware.machine.wsl or not cards:
        return
    if nvidia.kernel_version or nvidia.nvml_code == NVML_SUCCESS or hardware.node("/dev/nvidiactl"):
        return
    if in_container(hardware):
        return  # container-without-gpu: the module may well be loaded outside
    if any(gpu.driver == "nouveau" for gpu in cards):
        yield Finding(
            f"nouveau holds {named(cards[0])}, so NVIDIA's own kernel module cannot load",
            "echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/blacklist-nouveau.conf && sudo update-initramfs -u && "
            "sudo reboot",
            f"/sys/bus/pci/devices/{cards[0].pci}/driver is nouveau; /proc/driver/nvidia/version does not exist",
            ("cuda",),
        )
        return
    yield Finding(
        f"{named(cards[0])} is present, but the NVIDIA kernel module is not loaded",
        "sudo modprobe nvidia || (sudo dkms autoinstall && sudo modprobe nvidia)",
        f"/proc/driver/nvidia/version does not exist; the card's kernel driver is {cards[0].driver or 'none'}",
        ("cuda",),
    )


@diagnosis(
    Level.ERROR,
    "The NVIDIA libraries and the loaded kernel module are of different versions",
    symptom="`Failed to initialize NVML: Driver/library version mismatch`.",
    evidence="`nvmlInit_v2` returned 18 (NVML_ERROR_LIB_RM_VERSION_MISMATCH): the driver was updated and the old "
    "module is still loaded.",
    fix="`sudo reboot`, or, with no program using the card, "
    "`sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia`.",
    background="https://github.com/rapidsai/dask-cuda/issues/949 https://github.com/vladmandic/sdnext/issues/1581",
)
def nvml_mismatch(facts: Facts) -> Iterator[Finding]:
    nvidia = facts.hardware.nvidia
    if nvidia.nvml_code == NVML_LIB_RM_VERSION_MISMATCH:
        yield Finding(
            f"the NVIDIA user libraries and the loaded kernel module ({nvidia.kernel_version or 'version unknown'}) "
            "differ",
            "sudo reboot",
            f"nvmlInit_v2 returned 18{': ' + nvidia.nvml_error if nvidia.nvml_error else ''}",
            ("cuda",),
        )


@diagnosis(
    Level.ERROR,
    "The NVIDIA device is there, its driver libraries are not",
    symptom="In a container: `libcuda.so.1: cannot open shared object file`, or `Found no NVIDIA driver on your "
    "system.` although `/dev/nvidia0` exists.",
    evidence="`/dev/nvidiactl` exists, and `libnvidia-ml.so.1` is missing or `nvmlInit_v2` returned 9 "
    "(NVML_ERROR_DRIVER_NOT_LOADED).",
    fix="`docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …`; outside a container install the "
    "driver's library package, such as `libnvidia-compute-580`.",
    background="https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html",
)
def driver_library_missing(facts: Facts) -> Iterator[Finding]:
    hardware, nvidia = facts.hardware, facts.hardware.nvidia
    if hardware.node("/dev/nvidiactl") is None or hardware.machine.system != "Linux":
        return
    if nvidia.nvml_found and nvidia.nvml_code != NVML_DRIVER_NOT_LOADED:
        return
    what = "nvmlInit_v2 returned 9" if nvidia.nvml_found else "libnvidia-ml.so.1 is not found"
    major = (nvidia.kernel_version or "").split(".")[0]
    capabilities = hardware.env.get("NVIDIA_DRIVER_CAPABILITIES")
    fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …"
    if not in_container(hardware):
        fix = f"sudo apt install libnvidia-compute-{major}" if major else "sudo apt install nvidia-driver-full"
    works = nvidia.libcuda is not None and not nvidia.nvml_found  # CUDA without NVML: counts are slower, no more
    yield Finding(
        f"/dev/nvidiactl exists, but {what}, so the driver's libraries are incomplete",
        fix,
        f"libcuda: {nvidia.libcuda or 'not found'}; NVIDIA_DRIVER_CAPABILITIES is {capabilities or 'not set'}",
        () if works else ("cuda",),
        Level.WARNING if works else None,
    )


@diagnosis(
    Level.ERROR,
    "The nvidia_uvm module is missing or broken after a suspend",
    needs="child",
    symptom="`CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero.`, although nobody changed "
    "it and `nvidia-smi` works.",
    evidence="`cuInit` returned 999 (CUDA_ERROR_UNKNOWN), and whether `/dev/nvidia-uvm` exists.",
    fix="`sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm`.",
    background="https://github.com/pytorch/pytorch/issues/88639 https://github.com/pytorch/pytorch/issues/49081",
)
def uvm_broken(facts: Facts) -> Iterator[Finding]:
    if child_fact(facts, "cuinit_code", int) != UNKNOWN:
        return
    uvm = facts.hardware.node("/dev/nvidia-uvm")
    state = "is in a bad state, as after a suspend" if uvm else "is not loaded: /dev/nvidia-uvm does not exist"
    yield Finding(
        f"cuInit returned 999: the kernel module nvidia_uvm {state}",
        "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm",
        f"cuInit returned 999 (CUDA_ERROR_UNKNOWN); /dev/nvidia-uvm {'exists' if uvm else 'is missing'}",
        ("cuda",),
    )


@diagnosis(
    Level.ERROR,
    "The Fabric Manager of an NVSwitch system is not running",
    needs="child",
    symptom="`nvidia-smi` lists the cards, and torch says `CUDA initialization: Unexpected error from "
    "cudaGetDeviceCount()` with `Error 802: system not yet initialized`.",
    evidence="`cuInit` returned 802 (CUDA_ERROR_SYSTEM_NOT_READY), and whether `nv-fabricmanager` runs.",
    fix="`sudo systemctl enable --now nvidia-fabricmanager`; its version must be the driver's.",
    background="https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html",
)
def fabric_manager(facts: Facts) -> Iterator[Finding]:
    if child_fact(facts, "cuinit_code", int) != SYSTEM_NOT_READY:
        return
    running = facts.hardware.nvidia.fabric_manager
    state = {True: "runs but has not finished", False: "is not running", None: "is not known to run"}[running]
    driver = facts.hardware.nvidia.driver or facts.hardware.nvidia.kernel_version or "unknown"
    yield Finding(
        f"cuInit returned 802: this is an NVSwitch system and the Fabric Manager {state}",
        "sudo systemctl enable --now nvidia-fabricmanager",
        f"cuInit returned 802 (CUDA_ERROR_SYSTEM_NOT_READY); driver {driver}",
        ("cuda",),
    )


@diagnosis(
    Level.ERROR,
    "libcuda does not suit the loaded driver or the card",
    needs="child",
    symptom="`Error 803: system has unsupported display driver / cuda driver combination` or `Error 804: forward "
    "compatibility was attempted on non supported HW`.",
    evidence="`cuInit` returned 803 or 804, and the path of the libcuda the loader takes.",
    fix="Remove the `cuda-compat` folder from `LD_LIBRARY_PATH` (`sudo apt purge 'cuda-compat-*'`), or reboot after "
    "a driver update.",
    background="https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html",
)
def driver_library_conflict(facts: Facts) -> Iterator[Finding]:
    code = child_fact(facts, "cuinit_code", int)
    libcuda = facts.hardware.nvidia.libcuda or "libcuda.so.1"
    if code == DRIVER_MISMATCH:
        text = f"cuInit returned 803: {libcuda} is of another version than the loaded kernel module"
        fix = "sudo reboot"
    elif code == COMPAT_NOT_SUPPORTED:
        text = f"cuInit returned 804: {libcuda} is a forward-compatibility library, which this card does not support"
        fix = "sudo apt purge 'cuda-compat-*'  # or take its folder out of LD_LIBRARY_PATH"
    else:
        return
    paths = facts.hardware.env.get("LD_LIBRARY_PATH")
    yield Finding(text, fix, f"libcuda: {libcuda}; LD_LIBRARY_PATH is {paths or 'not set'}", ("cuda",))


@diagnosis(
    Level.ERROR,
    "The toolkit's stub libcuda is found before the driver's",
    symptom="`CUDA error: CUDA driver is a stub library` (code 34).",
    evidence="The libcuda the loader takes lies in a folder named `stubs`, or `cuInit` returned 34 "
    "(CUDA_ERROR_STUB_LIBRARY).",
    fix="Take `…/stubs` out of `LD_LIBRARY_PATH`: stubs are for linking only.",
    background="https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html",
)
def cuda_stub_library(facts: Facts) -> Iterator[Finding]:
    libcuda = facts.hardware.nvidia.libcuda or ""
    code = child_fact(facts, "cuinit_code", int)
    if code != STUB_LIBRARY and "/stubs/" not in libcuda:
        return
    where = libcuda if "/stubs/" in libcuda else libcuda or "libcuda.so.1"
    yield Finding(
        f"the CUDA toolkit's stub library ({where}) is loaded instead of the driver's libcuda",
        "export LD_LIBRARY_PATH=$(echo \"$LD_LIBRARY_PATH\" | tr ':' '\\n' | grep -v /stubs | paste -sd:)",
        f"cuInit returned {code if code is not None else 'nothing yet'}; "
        f"LD_LIBRARY_PATH is {facts.hardware.env.get('LD_LIBRARY_PATH') or 'not set'}",
        ("cuda",),
    )


@diagnosis(
    Level.ERROR,
    "The CUDA driver does not start",
    needs="child",
    symptom="`CUDA initialization: …` followed by an error of the driver.",
    evidence="`cuInit` returned a code that none of the other diagnoses explains (100, CUDA_ERROR_NO_DEVICE, counts "
    "only when a card and its kernel module are there and no mask is set).",
    fix="`sudo dmesg | grep -iE 'nvrm|xid'` tells the driver's side of it; a reboot resets a card that fell off the "
    "bus.",
    background="https://docs.nvidia.com/deploy/xid-errors/index.html",
)
def cuda_init_failed(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    code = child_fact(facts, "cuinit_code", int)
    if code is None or code in EXPLAINED or not cards_of(hardware, "nvidia"):
        return
    masked = "CUDA_VISIBLE_DEVICES" in hardware.env
    if code == NO_DEVICE and (masked or hardware.nvidia.nvml_code != NVML_SUCCESS):
        return  # a mask or a missing driver explains it
    report = report_of(facts, "cuda")
    name = f"CUDA_ERROR_{CUDA_ERRORS[code]}" if code in CUDA_ERRORS else "see cuda.h"
    yield Finding(
        f"cuInit returned {code} ({name}) on {named(cards_of(hardware, 'nvidia')[0])}",
        "sudo dmesg | grep -iE 'nvrm|xid'",
        f"cuInit returned {code}{'; ' + report.error if report and report.error else ''}",
        ("cuda",),
    )


@diagnosis(
    Level.WARNING,
    "WSL does not take the Windows driver's libraries first",
    symptom="In WSL `nvidia-smi` works and torch finds no GPU, or the reverse.",
    evidence="`/dev/dxg` (WSL), and `/usr/lib/wsl/lib` is not the first folder with a libcuda, as when a Linux "
    "driver package is installed beside the Windows driver.",
    fix="Use the Windows driver only: `sudo apt purge 'nvidia-driver-*' 'libnvidia-compute-*'` and "
    "`export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH`.",
    background="https://docs.nvidia.com/cuda/wsl-user-guide/index.html",
)
def wsl_driver(facts: Facts) -> Iterator[Finding]:
    machine, nvidia = facts.hardware.machine, facts.hardware.nvidia
    if machine.wsl and machine.wsl_libraries_first is False:
        yield Finding(
            f"in WSL {nvidia.libcuda or 'another libcuda'} is found before /usr/lib/wsl/lib, the Windows driver's "
            "libraries",
            "sudo apt purge 'nvidia-driver-*' 'libnvidia-compute-*'; export "
            "LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH",
            f"libcuda: {nvidia.libcuda or 'not found'}",
        )


# Jetson (Tegra X1, X2, Xavier, Orin, Thor) and GB10.
UNIFIED_CAPABILITIES = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0), (12, 1)})


@diagnosis(
    Level.NOTE,
    "The GPU shares the system's memory",
    symptom="NVML reports no memory for the card, or reports all of the system's RAM as the card's.",
    evidence="NVML answers NotSupported for the memory of a Jetson or GB10, or a total of at least 90 % of the RAM.",
    fix="Nothing is broken. Read the free memory from the system (`anytorch info` does), not from NVML.",
    background="https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/issues/1073 "
    "https://github.com/XuehaiPan/nvitop/pull/208",
)
def unified_memory(facts: Facts) -> Iterator[Finding]:
    ram, available = facts.hardware.memory.total, facts.hardware.memory.usable_available
    for gpu in cards_of(facts.hardware, "nvidia"):
        if gpu.unified or gpu.integrated or _looks_unified(gpu, ram):
            left = f"{gib(available)} of it are available" if available is not None else "how much is free is not known"
            yield Finding(
                f"{named(gpu)} shares the system's memory: {left}",
                "anytorch info",
                f"NVML total {gpu.total}, system total {ram}",
            )


def _looks_unified(gpu: Gpu, ram: int | None) -> bool:
    """A card of its own may happen to have as much memory as the system, so the size alone proves nothing."""
    if gpu.capability not in UNIFIED_CAPABILITIES:
        return False
    return gpu.total is None or (ram is not None and gpu.total >= 0.9 * ram)


@diagnosis(
    Level.WARNING,
    "bfloat16 is chosen on a card that only emulates it",
    symptom="`torch.cuda.is_bf16_supported()` says True on a T4 or V100, and the model is slow.",
    evidence="The setting `dtype` is bfloat16 and the card's compute capability is below 8.0.",
    fix="Use float16 there: `torch.autocast('cuda', dtype=torch.float16)`, or let `anytorch.autocast()` choose.",
    background="https://github.com/huggingface/diffusers/pull/14129",
)
def bf16_emulated(facts: Facts) -> Iterator[Finding]:
    if facts.settings.get("dtype") not in ("bfloat16", "bf16"):
        return
    for gpu in cards_of(facts.hardware, "nvidia"):
        if gpu.capability is not None and gpu.capability < (8, 0):
            yield Finding(
                f"{named(gpu)} (compute capability {gpu.capability[0]}.{gpu.capability[1]}) only emulates bfloat16",
                "use float16 on this card: torch.autocast('cuda', dtype=torch.float16)",
                "bfloat16 hardware starts with compute capability 8.0",
            )


@diagnosis(
    Level.NOTE,
    "torch.compile does not work on this card",
    symptom="`Found … which is too old to be supported by the triton GPU compiler, which is used as the backend. "
    "Triton only supports devices of CUDA Capability >= 7.0`.",
    evidence="A compute capability below 7.0 and a CUDA wheel.",
    fix="Run eagerly on this card (`TORCH_COMPILE_DISABLE=1`), or compile with `backend='aot_eager'`.",
    background="https://github.com/triton-lang/triton#compatibility",
)
def compile_needs_volta(facts: Facts) -> Iterator[Finding]:
    wheel = facts.hardware.torch
    if wheel is None or wheel.kind != "cuda":
        return
    for gpu in cards_of(facts.hardware, "nvidia"):
        if gpu.capability is not None and gpu.capability < (7, 0):
            yield Finding(
                f"torch.compile needs compute capability 7.0 or above; {named(gpu)} has "
                f"{gpu.capability[0]}.{gpu.capability[1]}",
                "export TORCH_COMPILE_DISABLE=1",
                f"triton {installed(facts.hardware, 'triton') or '(version unknown)'} supports 7.0 and above",
            )
