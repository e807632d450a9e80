"""The way to a GPU without a vendor toolkit: Vulkan, its drivers, and the wgpu package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from anytorch.devices.doctor.common import (
    Finding,
    diagnosis,
    first_line,
    installed,
    listed,
    named,
    real_gpus,
    report_of,
    vendor_path,
    wants_webgpu,
    webgpu_level,
)
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import advise, cards_of
from anytorch.probe.facts import Icd
from anytorch.probe.graphics import is_software_icd

EGL_ICD = '{"file_format_version":"1.0.1","ICD":{"library_path":"libEGL_nvidia.so.0","api_version":"1.4.312"}}'


def uses_vulkan(facts: Facts) -> bool:
    """Only on Linux does wgpu need Vulkan; macOS has Metal and Windows D3D12."""
    return facts.hardware.machine.system == "Linux" and installed(facts.hardware, "wgpu") is not None


def hardware_icds(facts: Facts) -> list[Icd]:
    """The Vulkan drivers of real GPUs whose library is not known to be missing."""
    icds = facts.hardware.graphics.vulkan_icds
    return [icd for icd in icds if icd.found is not False and not is_software_icd(icd)]


def adapters(facts: Facts) -> list[Mapping[str, Any]] | None:
    """What wgpu listed in the child; None when it was not asked."""
    report = report_of(facts, "webgpu")
    found = report.facts.get("adapters") if report is not None else None
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, (list, tuple)) else None


def driver_package(facts: Facts) -> str:
    """The Debian or Ubuntu package with the Vulkan driver for this machine's GPU."""
    if cards_of(facts.hardware, "nvidia"):
        major = (facts.hardware.nvidia.kernel_version or facts.hardware.nvidia.driver or "").split(".")[0]
        return f"libnvidia-gl-{major}" if major else "nvidia-vulkan-icd"
    return "mesa-vulkan-drivers"


@diagnosis(
    Level.NOTE,
    "This GPU can be used through WebGPU, and wgpu is not installed",
    symptom="Only the CPU is usable, although there is a GPU.",
    evidence="A GPU that no published torch wheel drives, or the setting `backend` is webgpu, and no package wgpu.",
    fix="`pip install 'anytorch[webgpu]'`.",
    background="https://github.com/pygfx/wgpu-py",
)
def wgpu_missing(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    gpus = real_gpus(hardware)
    # Where a vendor's wheel exists, installing that is the better advice, and cpu-only-wheel or wrong-wheel gives it.
    alone = bool(gpus) and not vendor_path(facts) and advise(hardware).kind in ("cpu", "none")
    if installed(hardware, "wgpu") or not (alone or wants_webgpu(facts)):
        return
    what = f"no published torch wheel drives {named(gpus[0])}" if alone else "you asked for webgpu"
    yield Finding(
        f"{what}, and the package wgpu, which reaches any GPU through Vulkan, Metal or D3D12, is not installed",
        "pip install 'anytorch[webgpu]'",
        "the distribution wgpu is not installed",
    )


@diagnosis(
    Level.ERROR,
    "The Vulkan loader is not installed",
    symptom="wgpu lists no adapter; `vulkaninfo` is not found or says `libvulkan.so.1: cannot open shared object "
    "file`.",
    evidence="The package wgpu is installed and `libvulkan.so.1` is nowhere on the loader's path. An error where "
    "WebGPU is the way to the GPU, a note where a vendor's device works.",
    fix="`sudo apt install libvulkan1`.",
    background="https://github.com/KhronosGroup/Vulkan-Loader",
)
def vulkan_loader_missing(facts: Facts) -> Iterator[Finding]:
    if uses_vulkan(facts) and facts.hardware.graphics.vulkan_loader is None:
        level = webgpu_level(facts)
        yield Finding(
            "wgpu is installed, but the Vulkan loader libvulkan.so.1 is not",
            f"sudo apt install libvulkan1 {driver_package(facts)}",
            "libvulkan.so.1 is not on the loader's path",
            ("webgpu",),
            level,
        )


@diagnosis(
    Level.ERROR,
    "No Vulkan driver for the GPU is installed",
    symptom="wgpu lists no adapter, or `vulkaninfo` says `Found no drivers!` (ERROR_INCOMPATIBLE_DRIVER).",
    evidence="The loader is there, and no driver file in `/usr/share/vulkan/icd.d`, `/etc/vulkan/icd.d` or "
    "`VK_ICD_FILENAMES` names a library of a real GPU that can be found.",
    fix="`sudo apt install mesa-vulkan-drivers` for AMD and Intel, `sudo apt install libnvidia-gl-<driver>` for "
    "NVIDIA.",
    background="https://github.com/KhronosGroup/Vulkan-Loader/blob/main/docs/LoaderDriverInterface.md",
)
def vulkan_driver_missing(facts: Facts) -> Iterator[Finding]:
    graphics, gpus = facts.hardware.graphics, real_gpus(facts.hardware)
    if not uses_vulkan(facts) or graphics.vulkan_loader is None or not gpus or hardware_icds(facts):
        return
    broken = [f"{icd.path} names {icd.library}, which is missing" for icd in graphics.vulkan_icds if icd.found is False]
    yield Finding(
        f"{named(gpus[0])} has no Vulkan driver here{': ' + broken[0] if broken else ''}",
        f"sudo apt install {driver_package(facts)}",
        f"driver files: {listed(icd.path for icd in graphics.vulkan_icds) or 'none'}",
        ("webgpu",),
        webgpu_level(facts),
    )


@diagnosis(
    Level.WARNING,
    "The only Vulkan adapter is a software renderer",
    needs="child",
    symptom="WebGPU works and is slower than the CPU: the adapter is called llvmpipe or SwiftShader.",
    evidence="Every adapter wgpu lists is of type CPU. It ranks below the CPU device and is used only when asked for "
    "by name.",
    fix="Install the GPU's Vulkan driver (`sudo apt install mesa-vulkan-drivers`), or use the CPU device.",
    background="https://github.com/xCollateral/VulkanMod/issues/56 https://github.com/rerun-io/rerun/issues/3089",
)
def software_vulkan_only(facts: Facts) -> Iterator[Finding]:
    found = adapters(facts)
    if not found or any(adapter.get("type") != "CPU" for adapter in found):
        return
    gpus = real_gpus(facts.hardware)
    beside = f", although {named(gpus[0])} is present" if gpus else ""
    yield Finding(
        f"the only adapter wgpu finds is {found[0].get('name')}, a software renderer{beside}",
        f"sudo apt install {driver_package(facts)}"
        if gpus
        else "use the cpu device: a software renderer is the CPU, only slower",
        f"adapters: {listed(str(adapter.get('name')) for adapter in found)}",
        (),
        None if gpus else Level.NOTE,
    )


@diagnosis(
    Level.ERROR,
    "Vulkan on an NVIDIA machine without a display needs another driver file",
    needs="child",
    symptom="The loader says `Could not get 'vkCreateInstance' via 'vk_icdGetInstanceProcAddr'`, and wgpu lists no "
    "NVIDIA adapter on a server.",
    evidence="An NVIDIA card whose `nvidia_icd.json` names `libGLX_nvidia.so.0`, which needs X, no driver file that "
    "names `libEGL_nvidia.so.0`, and no NVIDIA adapter among those wgpu listed.",
    fix=f"`echo '{EGL_ICD}' > ~/nvidia_egl_icd.json; export VK_ICD_FILENAMES=~/nvidia_egl_icd.json "
    "VK_DRIVER_FILES=~/nvidia_egl_icd.json`, with libegl1, libx11-6 and libxext6 installed and `XDG_RUNTIME_DIR` set.",
    background="https://github.com/KhronosGroup/Vulkan-Loader/blob/main/docs/LoaderDriverInterface.md",
)
def headless_nvidia_vulkan(facts: Facts) -> Iterator[Finding]:
    cards, report = cards_of(facts.hardware, "nvidia"), report_of(facts, "webgpu")
    if not uses_vulkan(facts) or facts.hardware.graphics.vulkan_loader is None or not cards or report is None:
        return
    found = adapters(facts) or []
    if any(adapter.get("type") != "CPU" and "nvidia" in str(adapter.get("name")).lower() for adapter in found):
        return
    libraries = {icd.path: icd.library or "" for icd in facts.hardware.graphics.vulkan_icds}
    glx = [path for path, library in libraries.items() if "libGLX_nvidia" in library]
    if not glx or any("libEGL_nvidia" in library for library in libraries.values()):
        return
    yield Finding(
        f"{glx[0]} names libGLX_nvidia, which needs a display, so {named(cards[0])} is invisible to Vulkan here",
        f"echo '{EGL_ICD}' > ~/nvidia_egl_icd.json; "
        "export VK_ICD_FILENAMES=~/nvidia_egl_icd.json VK_DRIVER_FILES=~/nvidia_egl_icd.json",
        f"{glx[0]}: {libraries[glx[0]]}{'; ' + first_line(report.error) if report.error else ''}",
        ("webgpu",),
        webgpu_level(facts),
    )
