"""Machines to diagnose: six healthy ones, and `change` to break them one fact at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anytorch.devices.types import BackendReport, DeviceReport, Facts, TorchReport
from anytorch.probe.facts import (
    Cpu,
    EntryPoint,
    Gpu,
    Graphics,
    Hardware,
    Icd,
    Machine,
    Memory,
    Node,
    Nvidia,
    Packages,
    TorchWheel,
)

GIB = 1024**3
SITE = "/venv/lib/python3.11/site-packages/torch"

# An EPYC host as the research machine reports itself (research/devices.md, head): AVX2, no avx512_bf16.
EPYC = Cpu("AMD EPYC", "AuthenticAMD", 16, 16, 16, None, features=frozenset({"avx", "avx2", "fma", "f16c"}))
RAM = Memory(total=128 * GIB, available=100 * GIB, limit=None, limit_used=None, shm=64 * GIB)
LINUX = Machine("Linux", "6.1.0", "x86_64", "3.11.7", executable="/venv/bin/python", boot_id="b")

# nvidia_icd.json of driver 580.159.04 (research/vulkan-on-headless-nvidia.md).
GLX_ICD = Icd("/usr/share/vulkan/icd.d/nvidia_icd.json", "libGLX_nvidia.so.0", True)
EGL_ICD = Icd("/etc/vulkan/icd.d/nvidia_egl.json", "libEGL_nvidia.so.0", True)
LAVAPIPE_ICD = Icd("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json", "libvulkan_lvp.so", True)
RADEON_ICD = Icd("/usr/share/vulkan/icd.d/radeon_icd.x86_64.json", "libvulkan_radeon.so", True)
# What wgpu lists on the research machine and on the H200 (research/devices.md §0, vulkan-on-headless-nvidia.md).
LLVMPIPE = {"name": "llvmpipe (LLVM 15.0.6, 256 bits)", "api": "Vulkan", "type": "CPU"}
H200_ADAPTER = {"name": "NVIDIA H200", "api": "Vulkan", "type": "DiscreteGPU"}


def node(path: str, readable: bool = True, writable: bool = True, group: str | None = None, gid: int = 0) -> Node:
    return Node(path, readable, writable, group, gid)


def wheel(tag: str, version: str = "2.13.0", **more: Any) -> TorchWheel:
    """A wheel as its version.py describes it: wheel("cu130"), wheel("rocm7.2"), wheel("xpu"), wheel("cpu")."""
    kind: dict[str, str] = {}
    if tag.startswith("cu"):
        kind["cuda"] = f"{tag[2:-1]}.{tag[-1]}"
    elif tag.startswith("rocm"):
        kind["hip"] = tag[4:]
    elif tag == "xpu":
        kind["xpu"] = "20250302"
    return TorchWheel(f"{version}+{tag}" if tag else version, SITE, **{**kind, **more})


H200 = Gpu(
    "nvidia", "NVIDIA H200", "0000:01:00.0", 0x2335, "nvidia", "GPU-aaaaaaaa-0000-0000-0000-000000000000", 0,
    capability=(9, 0), integrated=False, total=141 * GIB, free=140 * GIB, sources=("pci", "nvml"),
)  # fmt: skip
RX7900 = Gpu(
    "amd", "Radeon RX 7900 XTX", "0000:03:00.0", 0x744C, "amdgpu", "GPU-00000000744c", 0,
    arch="gfx1100", integrated=False, total=24 * GIB, free=23 * GIB, sources=("pci", "kfd"),
)  # fmt: skip
ARC = Gpu(
    "intel", "Intel Arc A770", "0000:03:00.0", 0x56A0, "i915",
    integrated=False, total=16 * GIB, free=15 * GIB, sources=("pci",),
)  # fmt: skip
ASCEND = Gpu(
    "huawei", "Ascend 910B", "0000:c1:00.0", 0xD802, "devdrv", index=0, total=64 * GIB, sources=("pci", "nodes")
)
M2 = Gpu("apple", "Apple M2 Pro", integrated=True, unified=True, sources=("sysctl",))


def tried(*reports: BackendReport, version: str = "2.13.0", **facts: Any) -> TorchReport:
    return TorchReport(version, backends={report.name: report for report in reports}, facts=facts)


def used(backend: str, name: str, total: int | None = None) -> BackendReport:
    return BackendReport(backend, (DeviceReport(0, name, total=total),))


def cuda_box() -> Facts:
    hardware = Hardware(
        LINUX,
        EPYC,
        RAM,
        (H200,),
        Nvidia("580.159.04", True, 0, None, "580.159.04", (13, 0), "/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
        nodes=tuple(node(path) for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")),
        torch=wheel("cu130"),
        packages=Packages({"torch": "2.13.0+cu130", "nvidia-ml-py": "13.615.71"}),
    )
    child = tried(
        used("cuda", "NVIDIA H200", 141 * GIB),
        cuinit_code=0,
        arch_list=["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
        threads=16,
        cuda_spoofed=False,
        cuda_initialized_before=False,
        mask_at_import=None,
        mask_now=None,
        start_method="fork",
        torch_cuda_version="13.0",
    )
    return Facts(hardware, child)


def amd_box() -> Facts:
    hardware = Hardware(
        LINUX,
        EPYC,
        RAM,
        (RX7900,),
        nodes=(node("/dev/kfd", group="render", gid=109), node("/dev/dri/renderD128", group="render", gid=109)),
        torch=wheel("rocm7.2"),
        packages=Packages({"torch": "2.13.0+rocm7.2"}),
    )
    return Facts(
        hardware, tried(used("rocm", "Radeon RX 7900 XTX", 24 * GIB), arch_list=["gfx90a", "gfx942", "gfx1100"])
    )


def intel_box() -> Facts:
    hardware = Hardware(
        LINUX,
        EPYC,
        RAM,
        (ARC,),
        nodes=(node("/dev/dri/renderD128", group="render", gid=109),),
        graphics=Graphics(
            level_zero_loader="/usr/lib/x86_64-linux-gnu/libze_loader.so.1",
            level_zero_driver="/usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1",
            level_zero_code=0,
            level_zero_devices=1,
        ),
        torch=wheel("xpu"),
        packages=Packages({"torch": "2.13.0+xpu"}),
    )
    return Facts(hardware, tried(used("xpu", "Intel Arc A770", 16 * GIB)))


def ascend_box() -> Facts:
    hardware = Hardware(
        replace(LINUX, arch="aarch64"),
        replace(EPYC, model="Kunpeng-920", vendor="HiSilicon", features=frozenset({"fphp", "asimdhp"})),
        RAM,
        (ASCEND,),
        nodes=(node("/dev/davinci0"), node("/dev/davinci_manager")),
        torch=wheel("cpu"),
        packages=Packages(
            {"torch": "2.13.0+cpu", "torch-npu": "2.13.0"},
            (EntryPoint("torch.backends", "torch_npu", "torch_npu:_autoload", "torch-npu"),),
        ),
        env={"ASCEND_HOME_PATH": "/usr/local/Ascend/ascend-toolkit/latest"},
    )
    return Facts(hardware, tried(used("npu", "Ascend 910B", 64 * GIB), privateuse1="npu", cuda_spoofed=False))


def apple_box() -> Facts:
    hardware = Hardware(
        Machine("Darwin", "23.5.0", "arm64", "3.12.4", "/opt/homebrew/bin/python3", macos="14.5"),
        Cpu("Apple M2 Pro", "Apple", 10, 10, None, None, 6, 4, frozenset({"hw.optional.arm.feat_bf16"})),
        Memory(16 * GIB, 9 * GIB, None, None),
        (M2,),
        torch=wheel("", others=()),
        packages=Packages({"torch": "2.13.0"}),
        env={"PYTORCH_ENABLE_MPS_FALLBACK": "1"},
    )
    return Facts(hardware, tried(used("mps", "Apple M2 Pro"), mps_built=True, mps_available=True, threads=6))


def cpu_box() -> Facts:
    hardware = Hardware(LINUX, EPYC, RAM, torch=wheel("cpu"), packages=Packages({"torch": "2.13.0+cpu"}))
    return Facts(hardware, tried(used("cpu", "AMD EPYC"), threads=16, mkldnn_bf16=False))


HEALTHY = {
    "cuda": cuda_box,
    "amd": amd_box,
    "intel": intel_box,
    "ascend": ascend_box,
    "apple": apple_box,
    "cpu": cpu_box,
}


def change(
    facts: Facts,
    *,
    machine: Mapping[str, Any] | None = None,
    cpu: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
    nvidia: Mapping[str, Any] | None = None,
    graphics: Mapping[str, Any] | None = None,
    packages: Mapping[str, str | None] | None = None,
    env: Mapping[str, str | None] | None = None,
    hardware: Mapping[str, Any] | None = None,
    child: Mapping[str, Any] | None = None,
    report: BackendReport | None = None,
    settings: Mapping[str, Any] | None = None,
    **torch: Any,
) -> Facts:
    """The same machine with other facts. None removes a package or variable; further keywords go to TorchReport."""
    seen = facts.hardware
    for name, changes in (
        ("machine", machine),
        ("cpu", cpu),
        ("memory", memory),
        ("nvidia", nvidia),
        ("graphics", graphics),
    ):
        if changes:
            seen = replace(seen, **{name: replace(getattr(seen, name), **changes)})
    if packages:
        merged = {**seen.packages.versions, **packages}
        versions = {name: version for name, version in merged.items() if version is not None}
        seen = replace(seen, packages=replace(seen.packages, versions=versions))
    if env:
        seen = replace(seen, env={name: value for name, value in {**seen.env, **env}.items() if value is not None})
    if hardware:
        seen = replace(seen, **hardware)
    found = facts.torch
    if found is not None:
        if child:
            found = replace(found, facts={**found.facts, **child})
        if report is not None:
            found = replace(found, backends={**found.backends, report.name: report})
        if torch:
            found = replace(found, **torch)
    return Facts(seen, found, {**facts.settings, **(settings or {})})


def untried(facts: Facts) -> Facts:
    """The same machine before anybody imported torch."""
    return replace(facts, torch=None)
