"""The NVIDIA driver: what its kernel module says in files, then what NVML says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from anytorch.probe.facts import Gpu, Nvidia
from anytorch.probe.pci import pci_address
from anytorch.probe.tree import Tree, fields, find_library, whole

PROC = "/proc/driver/nvidia"
# NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)
# NVRM version: NVIDIA UNIX x86_64 Kernel Module  375.74  Wed Jun 14 01:39:39 PDT 2017
VERSION = r"NVRM version:.*?Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s"
NVML_VARIABLE = "ANYTORCH_NVML_LIBRARY"
FABRIC_MANAGER = "/var/run/nvidia-fabricmanager/nv-fabricmanager.pid"


def read_nvidia(
    tree: Tree, env: Mapping[str, str], *, system: str = "Linux", arch: str = "", container: bool = False
) -> tuple[Nvidia, list[Gpu]]:
    """The driver's facts, and the cards its files and NVML name.

    With a recorded root NVML is asked only when ANYTORCH_NVML_LIBRARY names one; on the real machine that variable
    replaces the library the loader would find.
    """
    files = _from_files(tree)
    named = env.get(NVML_VARIABLE)
    library = named or find_library(
        tree, env, "nvml.dll" if system == "Windows" else "libnvidia-ml.so.1", system=system, arch=arch
    )
    libcuda = find_library(tree, env, "nvcuda.dll" if system == "Windows" else "libcuda.so.1", system=system, arch=arch)
    kernel_version = tree.word("/sys/module/nvidia/version")
    if kernel_version is None:
        text = tree.text(f"{PROC}/version")
        match = re.match(VERSION, text) if text else None
        kernel_version = match.group(1) if match else None
    nvidia = Nvidia(
        kernel_version=kernel_version,
        nvml_found=library is not None,
        libcuda=libcuda,
        fabric_manager=_fabric_manager(tree, container),
    )
    if library is None or not (tree.real or named):
        return nvidia, files
    from anytorch.probe.nvml import read_nvml  # 2 ms that a machine without the library need not pay

    report = read_nvml(library)
    for problem in report.problems:
        tree.problem(problem)
    nvidia = replace(nvidia, nvml_code=report.code, nvml_error=report.error, driver=report.driver, cuda=report.cuda)
    return nvidia, [*files, *report.gpus]


def _from_files(tree: Tree) -> list[Gpu]:
    """Cards the kernel module lists; they are there even in sandboxes that show no PCI bus."""
    gpus = []
    for entry in tree.names(f"{PROC}/gpus")[:256]:
        found = fields(tree.text(f"{PROC}/gpus/{entry}/information"))
        address = pci_address(found.get("Bus Location")) or pci_address(entry)
        if address is None:
            continue
        uuid = found.get("GPU UUID", "")
        gpus.append(
            Gpu(
                vendor="nvidia",
                name=found.get("Model", "")[:200] or None,
                pci=address,
                driver="nvidia",
                # A card that is not initialised yet shows question marks.
                uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else None,
                minor=whole(found.get("Device Minor"), high=4096),
                sources=("proc",),
            )
        )
    return gpus


def _fabric_manager(tree: Tree, container: bool) -> bool | None:
    """True if the Fabric Manager runs; None if no NVSwitch needs one or the host's is hidden."""
    if tree.exists(FABRIC_MANAGER):
        return True
    if container or not tree.names("/proc/driver/nvidia-nvswitch/devices"):
        return None
    return False
