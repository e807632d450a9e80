"""All readers, one after the other, each in its own safety net."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from anytorch.probe import apple
from anytorch.probe.cards import LEVEL_ZERO_VARIABLE, add_ascend, describe_intel, read_amd, read_ascend, read_level_zero
from anytorch.probe.cpu import read_cpu
from anytorch.probe.facts import Ascend, Cpu, Gpu, Graphics, Hardware, Machine, Memory, Nvidia, Packages
from anytorch.probe.graphics import read_graphics
from anytorch.probe.memory import Limits, read_cgroup, read_memory, read_windows_memory
from anytorch.probe.nvidia import read_nvidia
from anytorch.probe.packages import read_packages, read_wheel
from anytorch.probe.pci import merge, read_nodes, read_pci, with_names
from anytorch.probe.tree import Tree, clean, find_library

T = TypeVar("T")

# Chips without memory of their own whose NVML may still answer with the system's RAM (XuehaiPan/nvitop pull 208).
SHARES_MEMORY = r"\b(GB10|Orin|Thor|Xavier|Tegra)\b"


def collect(
    root: str | Path,
    env: Mapping[str, str] | None,
    *,
    sys_path: Sequence[str] | None = None,
    system: str | None = None,
    arch: str | None = None,
    sysctl: apple.Sysctl | None = None,
) -> Hardware:
    """See `anytorch.probe.snapshot`."""
    tree = Tree(root)
    variables = {clean(k): clean(v) for k, v in (os.environ if env is None and tree.real else env or {}).items()}
    paths = [clean(str(p)) for p in (sys.path if sys_path is None and tree.real else sys_path or ())]

    def attempt(name: str, default: T, reader: Callable[[], T]) -> T:
        try:
            return reader()
        except Exception as exc:  # noqa: BLE001  (the contract: whatever is broken becomes a problem, never a crash)
            tree.problem(f"reading {name} failed: {type(exc).__name__}: {exc}")
            return default

    system = system or attempt("the system's name", "Linux", lambda: _system(tree))
    if sysctl is None:
        unknown: apple.Sysctl = lambda name: None  # noqa: E731
        ask = tree.real and system == "Darwin"
        sysctl = attempt("sysctl", unknown, apple.system_sysctl) if ask else unknown
    known_sysctl = sysctl
    arch = arch or attempt("the architecture", "", lambda: _arch(tree, variables))
    container = attempt("container marks", None, lambda: read_container(tree, variables))
    limits = attempt("control groups", Limits(), lambda: read_cgroup(tree))
    machine = Machine(system, "", arch, "{}.{}.{}".format(*sys.version_info[:3]), clean(sys.executable or ""))
    machine = attempt(
        "the machine",
        machine,
        lambda: _machine(tree, variables, machine, container=container, sysctl=known_sysctl),
    )
    cpu = attempt("the CPU", _no_cpu(tree, limits), lambda: _cpu(tree, variables, system, limits, known_sysctl))
    memory = attempt("memory", Memory(None, None, None, None), lambda: _memory(tree, system, limits, known_sysctl))
    no_gpus: list[Gpu] = []
    nvidia, nvidia_gpus = attempt(
        "the NVIDIA driver",
        (Nvidia(), no_gpus),
        lambda: read_nvidia(tree, variables, system=system, arch=arch, container=container is not None),
    )
    lists = [
        attempt("the PCI bus", no_gpus, lambda: read_pci(tree)),
        attempt("display adapters", no_gpus, _adapters) if tree.real and system == "Windows" else no_gpus,
        nvidia_gpus,
        attempt("KFD", no_gpus, lambda: read_amd(tree)),
    ]
    gpus = attempt("the list of GPUs", no_gpus, lambda: _gpus(tree, lists))
    if system == "Darwin":
        gpus = gpus + attempt("the Apple GPU", no_gpus, lambda: apple.read_apple_gpu(known_sysctl, arch))
    graphics = attempt("graphics drivers", Graphics(), lambda: _graphics(tree, variables, system=system, arch=arch))
    return Hardware(
        machine=machine,
        cpu=cpu,
        memory=memory,
        gpus=tuple(gpus),
        nvidia=nvidia,
        ascend=attempt("Ascend", Ascend(), lambda: read_ascend(tree, variables)),
        nodes=attempt("device nodes", (), lambda: read_nodes(tree)),
        graphics=graphics,
        torch=attempt("the torch wheel", None, lambda: read_wheel(tree, paths)),
        packages=attempt("installed packages", Packages(), lambda: read_packages(tree, paths)),
        env=read_environment(variables),
        problems=tuple(tree.problems),
    )


def _system(tree: Tree) -> str:
    if tree.real:
        return {"darwin": "Darwin", "win32": "Windows"}.get(sys.platform, "Linux")
    return "Darwin" if tree.is_file(apple.SYSTEM_VERSION) else "Linux"


def _arch(tree: Tree, env: Mapping[str, str]) -> str:
    if tree.real:
        # os.uname, not the platform module: importing that costs 5 ms.
        return os.uname().machine if hasattr(os, "uname") else env.get("PROCESSOR_ARCHITECTURE", "")
    named = tree.word("/proc/sys/kernel/arch")  # since Linux 6.1
    if named:
        return named[:40]
    text = tree.text("/proc/cpuinfo") or ""
    if "CPU implementer" in text:
        return "aarch64"
    return "x86_64" if re.search(r"^flags\s*:.*\blm\b", text, re.MULTILINE) else ""


def _machine(
    tree: Tree, env: Mapping[str, str], machine: Machine, *, container: str | None, sysctl: apple.Sysctl
) -> Machine:
    release = tree.word("/proc/sys/kernel/osrelease")
    if release is None and tree.real and hasattr(os, "uname"):
        release = os.uname().release
    wsl = machine.system == "Linux" and read_wsl(tree)
    return replace(
        machine,
        release=release or "",
        macos=apple.read_macos(tree) if machine.system == "Darwin" else None,
        rosetta=machine.system == "Darwin" and apple.is_rosetta(sysctl),
        boot_id=tree.word("/proc/sys/kernel/random/boot_id") or sysctl("kern.bootsessionuuid"),
        container=container,
        wsl=wsl,
        wsl_libraries_first=wsl_libraries_first(tree, env, arch=machine.arch) if wsl else None,
    )


def _no_cpu(tree: Tree, limits: Limits) -> Cpu:
    return Cpu(None, None, (os.cpu_count() if tree.real else None) or 1, None, None, limits.cpus)


def _cpu(tree: Tree, env: Mapping[str, str], system: str, limits: Limits, sysctl: apple.Sysctl) -> Cpu:
    if system == "Darwin":
        return apple.read_mac_cpu(sysctl)
    if system == "Windows":
        return replace(_no_cpu(tree, limits), model=env.get("PROCESSOR_IDENTIFIER"))
    return read_cpu(tree, quota=limits.cpus)


def _memory(tree: Tree, system: str, limits: Limits, sysctl: apple.Sysctl) -> Memory:
    if system == "Darwin":
        return apple.read_mac_memory(sysctl)
    if system == "Windows" and tree.real:
        return read_windows_memory()
    return read_memory(tree, limits)


def _adapters() -> list[Gpu]:
    from anytorch.probe.windows import read_adapters

    return read_adapters()


def _gpus(tree: Tree, lists: Sequence[Sequence[Gpu]]) -> list[Gpu]:
    gpus = with_names(tree, describe_intel(add_ascend(tree, merge(lists))))
    described = []
    for gpu in gpus:
        if gpu.vendor == "nvidia" and (gpu.unified or re.search(SHARES_MEMORY, gpu.name or "")):
            gpu = replace(gpu, unified=True, integrated=True)
        elif gpu.vendor == "nvidia" and gpu.total is not None:
            gpu = replace(gpu, unified=False, integrated=False)
        described.append(gpu)
    # Each vendor's cards in the order its own software counts them; vendors in the order they were met.
    vendors = list(dict.fromkeys(gpu.vendor for gpu in described))
    return sorted(
        described,
        key=lambda gpu: (vendors.index(gpu.vendor), sys.maxsize if gpu.index is None else gpu.index, gpu.pci or ""),
    )


def _graphics(tree: Tree, env: Mapping[str, str], *, system: str, arch: str) -> Graphics:
    graphics = read_graphics(tree, env, system=system, arch=arch)
    named = env.get(LEVEL_ZERO_VARIABLE)
    if not named:
        return graphics
    code, devices = read_level_zero(named)
    return replace(graphics, level_zero_loader=named, level_zero_code=code, level_zero_devices=devices)


# --- the environment variables that hide, reorder or steer devices; those that are set are kept -----------------------

NAMES = (
    # NVIDIA
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_HOME"),
    *("CUDA_PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    # AMD: ROCR_ is applied below HIP_, which numbers what ROCR_ has left
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HSA_OVERRIDE_GFX_VERSION"),
    *("HSA_ENABLE_SDMA", "ROCM_PATH", "ROCM_HOME"),
    # Huawei
    *("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"),
    "ASCEND_OPP_PATH",
    # Intel
    *("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER", "ONEAPI_DEVICE_SELECTOR"),
    "SYCL_DEVICE_FILTER",
    # Apple
    *("PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"),
    # threads
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "GOMP_CPU_AFFINITY"),
    *("KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES"),
    # torch
    *("TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_CUDA_ARCH_LIST", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    # loaders
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "XDG_DATA_DIRS", "WGPU_BACKEND_TYPE"),
    "WGPU_ADAPTER_NAME",
)
PREFIXES = ("VK_", "OCL_ICD_", "MESA_", "LIBGL_", "ANYTORCH_")
LONGEST = 4096  # of one value; nobody reads further


def read_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of `NAMES` and `PREFIXES` that are set, in alphabetical order; an empty value is kept: it masks."""
    return {
        clean(name): clean(env[name])[:LONGEST] for name in sorted(env) if name in NAMES or name.startswith(PREFIXES)
    }


# --- containers, their kind, and WSL ----------------------------------------------------------------------------------

WSL_LIBRARIES = "/usr/lib/wsl/lib"


def read_container(tree: Tree, env: Mapping[str, str]) -> str | None:
    """ "kubernetes", "docker", "podman", "lxc", "apptainer", …; None outside a container."""
    if env.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if env.get("APPTAINER_CONTAINER") or env.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if tree.exists("/run/.containerenv"):
        return "podman"
    if tree.exists("/.dockerenv"):
        return "docker"
    # systemd's convention (systemd.io/CONTAINER_INTERFACE): the manager says its name in $container.
    named = env.get("container") or tree.word("/run/systemd/container")
    if named:
        return named[:40]
    groups = tree.text("/proc/self/cgroup") or ""
    for mark, kind in (("kubepods", "kubernetes"), ("libpod", "podman"), ("docker", "docker"), ("/lxc", "lxc")):
        if mark in groups:
            return kind
    return None


def read_wsl(tree: Tree) -> bool:
    """Linux below Windows: the paravirtual GPU node, or Microsoft's kernel ("5.15.167.4-microsoft-standard-WSL2")."""
    return tree.exists("/dev/dxg") or "microsoft" in (tree.word("/proc/sys/kernel/osrelease") or "").lower()


def wsl_libraries_first(tree: Tree, env: Mapping[str, str], *, arch: str = "") -> bool | None:
    """Whether the loader would take libcuda from Windows' driver. None: it would find none at all."""
    found = find_library(tree, env, "libcuda.so.1", arch=arch)
    return None if found is None else found.startswith(WSL_LIBRARIES + "/")
