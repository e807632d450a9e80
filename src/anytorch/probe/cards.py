"""Cards of AMD, Intel and Huawei: what their drivers' files tell about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from anytorch.probe.facts import Ascend, Gpu
from anytorch.probe.pci import DEVICES
from anytorch.probe.tree import Tree, fields, whole

if TYPE_CHECKING:
    import ctypes

# --- AMD, as the kernel's compute driver (KFD) lists them: the order ROCm counts in -----------------------------------

NODES = "/sys/class/kfd/kfd/topology/nodes"
# Integrated graphics, from the "APU" rows of LLVM's AMDGPU processor table.
INTEGRATED = {
    *("gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037", "gfx1103", "gfx1150"),
    *("gfx1151", "gfx1152", "gfx1153"),
}
MI300A = 0x74A0  # the same gfx942 as MI300X, but it shares memory with its CPU cores


def gfx_name(version: int | None) -> str | None:
    """KFD's gfx_target_version as a compiler target: 110000 is gfx1100, 90010 is gfx90a, 90402 is gfx942."""
    if not version or version > 999_999:
        return None
    major, minor, stepping = version // 10_000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def read_amd(tree: Tree) -> list[Gpu]:
    """The GPUs (nodes with SIMD units) in KFD order, with the memory amdgpu reports for them."""
    gpus: list[Gpu] = []
    for node in sorted((n for n in tree.names(NODES) if n.isdecimal() and len(n) < 6), key=int):
        told = fields(tree.text(f"{NODES}/{node}/properties"), " ")
        values = {name: number for name, text in told.items() if (number := whole(text)) is not None}
        if not values.get("simd_count"):
            continue  # a CPU
        arch = gfx_name(values.get("gfx_target_version"))
        device_id = values.get("device_id")
        address = _address(values)
        folder = f"{DEVICES}/{address}"
        total = tree.number(f"{folder}/mem_info_vram_total") if address else None
        used = tree.number(f"{folder}/mem_info_vram_used") if address else None
        integrated = None if arch is None else arch in INTEGRATED or device_id == MI300A
        gpus.append(
            Gpu(
                vendor="amd",
                name=tree.word(f"{folder}/product_name") if address else None,
                pci=address,
                device_id=device_id,
                uuid=f"GPU-{values['unique_id']:016x}" if values.get("unique_id") else None,
                index=len(gpus),
                arch=arch,
                integrated=integrated,
                total=total,
                free=max(0, total - used) if total is not None and used is not None else None,
                unified=True if integrated else None if integrated is None else False,
                sources=("kfd",),
            )
        )
    return gpus


def _address(values: dict[str, int]) -> str | None:
    """location_id is bus << 8 | device << 3 | function."""
    location, domain = values.get("location_id"), values.get("domain", 0)
    if not location or location > 0xFFFF or domain > 0xFFFFFFFF:
        return None
    return f"{domain:04x}:{location >> 8:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


# --- Intel: which are built in, and what Level Zero's system management says when it is asked -------------------------

LEVEL_ZERO_VARIABLE = "ANYTORCH_LEVEL_ZERO_LIBRARY"
SUCCESS = 0  # ZE_RESULT_SUCCESS


def describe_intel(gpus: list[Gpu]) -> list[Gpu]:
    """Intel's integrated graphics always sit at device 2 of the first bus; cards sit on others."""
    described = []
    for gpu in gpus:
        if gpu.vendor == "intel" and gpu.pci is not None:
            integrated = gpu.pci.endswith(":00:02.0") and gpu.pci.startswith("0000:")
            gpu = replace(gpu, integrated=integrated, unified=integrated)
        described.append(gpu)
    return described


def read_level_zero(library: str) -> tuple[int | None, int | None]:
    """(what zesInit returned, number of devices). Never raises; None: not known.

    This loads Intel's compute driver, which takes long and has been seen to crash, so the probe calls it only when
    ANYTORCH_LEVEL_ZERO_LIBRARY names the loader; the child process may call it freely.
    """
    import ctypes

    try:
        loader = ctypes.CDLL(library)
        code = int(loader.zesInit(ctypes.c_uint32(0))) & 0xFFFFFFFF  # ze_result_t zesInit(zes_init_flags_t)
        return code, _devices(loader) if code == SUCCESS else None
    except (OSError, AttributeError):
        return None, None  # no such library, or no Level Zero


def _devices(loader: ctypes.CDLL) -> int | None:
    import ctypes

    count = ctypes.c_uint32(0)
    # ze_result_t zesDriverGet(uint32_t* count, zes_driver_handle_t* drivers)
    if loader.zesDriverGet(ctypes.byref(count), None) != SUCCESS or count.value > 64:
        return None
    drivers = (ctypes.c_void_p * max(1, count.value))()
    if loader.zesDriverGet(ctypes.byref(count), drivers) != SUCCESS:
        return None
    total = 0
    for driver in drivers[: count.value]:
        devices = ctypes.c_uint32(0)
        # ze_result_t zesDeviceGet(zes_driver_handle_t, uint32_t* count, zes_device_handle_t* devices)
        if loader.zesDeviceGet(ctypes.c_void_p(driver), ctypes.byref(devices), None) == SUCCESS:
            total += devices.value
    return total


# --- Huawei: device nodes, and the versions of driver and CANN toolkit ------------------------------------------------

HOME = "/usr/local/Ascend"
# "version=8.3.RC2" in ascend_toolkit_install.info; the driver's version.info writes "Version="
VERSION = r"(?im)^\s*version\s*=\s*\[?([\w.\-]+)"


def read_ascend(tree: Tree, env: Mapping[str, str]) -> Ascend:
    named = env.get("ASCEND_TOOLKIT_HOME") or env.get("ASCEND_HOME_PATH")
    # CANN 8 installs itself below ascend-toolkit, newer ones below cann.
    places = [named] if named else [f"{HOME}/ascend-toolkit/latest", f"{HOME}/cann"]
    toolkit = next((place for place in places if tree.is_folder(place)), None)
    versions = [f"{toolkit}/{machine}-linux/ascend_toolkit_install.info" for machine in ("aarch64", "x86_64")]
    versions += [f"{toolkit}/version.cfg", f"{toolkit}/version.info"]
    return Ascend(
        driver=_version(tree, [f"{HOME}/driver/version.info"]),
        toolkit=_version(tree, versions) if toolkit else None,
        toolkit_path=toolkit,
    )


def _version(tree: Tree, paths: list[str]) -> str | None:
    for path in paths:
        text = tree.text(path)
        match = re.search(VERSION, text) if text else None
        if match:
            return match.group(1)[:100]
    return None


def add_ascend(tree: Tree, gpus: list[Gpu]) -> list[Gpu]:
    """Give each /dev/davinciN to the Nth NPU on the PCI bus; nodes beyond them (no PCI in a sandbox) stand alone."""
    indices = sorted(
        int(n[7:]) for n in tree.names("/dev") if n.startswith("davinci") and n[7:].isdecimal() and len(n) < 11
    )
    places = [i for i, gpu in enumerate(gpus) if gpu.vendor == "huawei"]
    merged = list(gpus)
    for index in indices:
        if index < len(places):
            known = merged[places[index]]
            merged[places[index]] = replace(known, index=index, sources=(*known.sources, "dev"))
        else:
            merged.append(Gpu(vendor="huawei", index=index, sources=("dev",)))
    return merged
