"""Accelerators on the PCI bus and the nodes of /dev they are used by; and one list out of what several readers saw."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from anytorch.probe.facts import Gpu, Node
from anytorch.probe.tree import LARGE, Tree, whole

DEVICES = "/sys/bus/pci/devices"
DISPLAY, ACCELERATOR = 0x03, 0x12  # PCI base classes
VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel", 0x19E5: "huawei"}
# Which base classes of those vendors compute. An Intel device of class 12 is an NPU, no XPU; a Huawei display is the
# iBMC's console. MI300X is of class 12, other AMD cards of class 03.
COMPUTE = {
    "nvidia": (DISPLAY, ACCELERATOR),
    "amd": (DISPLAY, ACCELERATOR),
    "intel": (DISPLAY,),
    "huawei": (ACCELERATOR,),
}
# Consoles of virtual machines and management controllers: pictures only, so they are left out.
NOT_COMPUTE = {
    0x1013,  # Cirrus Logic, QEMU's old default
    0x102B,  # Matrox, in server management controllers
    0x1234,  # Bochs / QEMU stdvga
    0x1414,  # Microsoft Hyper-V and WSL
    0x15AD,  # VMware
    0x1A03,  # ASPEED
    0x1AF4,  # virtio-gpu
    0x1B36,  # QXL
    0x5333,  # S3
    0x80EE,  # VirtualBox
}
NAME_FILES = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")
# Patterns in this package are text: compiling one costs up to 1 ms, which a machine without such a card need not pay.
ADDRESS = r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])"


def pci_address(text: str | None) -> str | None:
    """One spelling for an address: "00000000:01:00.0" (NVML) and "01:00.0" become "0000:01:00.0"."""
    match = re.fullmatch(ADDRESS, (text or "").strip().lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}"


def read_pci(tree: Tree) -> list[Gpu]:
    """Every accelerator on the bus, in bus order. Vendors we do not know keep their number ("0x1ed5")."""
    gpus = []
    for entry in tree.names(DEVICES):
        folder = f"{DEVICES}/{entry}"
        kind = tree.number(f"{folder}/class", 16)
        if kind is None or kind >> 16 not in (DISPLAY, ACCELERATOR):
            continue
        address = pci_address(entry)
        vendor = tree.number(f"{folder}/vendor", 16)
        if address is None or vendor is None or vendor in NOT_COMPUTE or vendor > 0xFFFF:
            continue
        name = VENDORS.get(vendor, f"0x{vendor:04x}")
        if kind >> 16 not in COMPUTE.get(name, (DISPLAY, ACCELERATOR)):
            if name == "huawei":
                continue
            name = f"0x{vendor:04x}"
        boot_vga = tree.number(f"{folder}/boot_vga")
        gpus.append(
            Gpu(
                vendor=name,
                pci=address,
                device_id=tree.number(f"{folder}/device", 16),
                driver=tree.link_name(f"{folder}/driver"),
                display=None if boot_vga is None else boot_vga == 1,
                sources=("pci",),
            )
        )
    return gpus


def merge(lists: Iterable[Iterable[Gpu]]) -> list[Gpu]:
    """One entry per card: two of a vendor are the same if PCI address or UUID agree. Later lists know better."""
    merged: list[Gpu] = []
    for gpus in lists:
        for gpu in gpus:
            at = next((i for i, known in enumerate(merged) if _same(known, gpu)), None)
            if at is None:
                merged.append(gpu)
            else:
                merged[at] = _joined(merged[at], gpu)
    return merged


def _same(one: Gpu, other: Gpu) -> bool:
    if one.vendor != other.vendor:
        return False
    if one.pci and other.pci:
        return one.pci == other.pci
    return bool(one.uuid and one.uuid == other.uuid)


def _joined(known: Gpu, newer: Gpu) -> Gpu:
    changes: dict[str, Any] = {}
    for field in fields(Gpu):
        value = getattr(newer, field.name)
        if value is not None and field.name != "sources":
            changes[field.name] = value
    return replace(known, **changes, sources=known.sources + tuple(s for s in newer.sources if s not in known.sources))


def with_names(tree: Tree, gpus: list[Gpu]) -> list[Gpu]:
    """Cards no driver has named get the name the PCI ID database gives them, where one is installed."""
    if all(gpu.name or gpu.device_id is None for gpu in gpus):
        return gpus
    database = next((data for path in NAME_FILES if (data := tree.data(path, LARGE))), b"")
    numbers = {name: number for number, name in VENDORS.items()}
    named = []
    for gpu in gpus:
        vendor = numbers.get(gpu.vendor, whole(gpu.vendor, 16) if gpu.vendor.startswith("0x") else None)
        if gpu.name is None and vendor is not None and gpu.device_id is not None:
            gpu = replace(gpu, name=_name_in(database, vendor, gpu.device_id))
        named.append(gpu)
    return named


def _name_in(database: bytes, vendor: int, device: int) -> str | None:
    # "10de  NVIDIA Corporation\n\t2335  GH100 [H200 SXM 141GB]\n": a vendor's devices follow it, one tab in.
    start = database.find(b"\n%04x  " % vendor)
    if start < 0:
        return None
    end = re.compile(rb"\n[0-9a-fA-F]").search(database, start + 1)
    line = database.find(b"\n\t%04x  " % device, start, end.start() if end else len(database))
    if line < 0:
        return None
    stop = database.find(b"\n", line + 1)
    text = database[line + 8 : stop if stop >= 0 else len(database)]
    return text.decode("utf-8", "replace").strip()[:200] or None


# --- the device nodes compute needs, whether we may use them, and which group owns them -------------------------------

WHOLE = {
    *("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-nvswitchctl", "kfd", "dxg"),
    *("davinci_manager", "hisi_hdc", "devmm_svm"),
}
NUMBERED = ("nvidia", "davinci")
MOST = 512


def read_nodes(tree: Tree) -> tuple[Node, ...]:
    paths = [f"/dev/{name}" for name in tree.names("/dev") if name in WHOLE or _numbered(name, NUMBERED)]
    paths += [f"/dev/dri/{name}" for name in tree.names("/dev/dri") if _numbered(name, ("renderD",))]
    paths.sort(key=_by_number)
    groups = _groups(tree) if paths else {}
    nodes = []
    for path in paths[:MOST]:
        status = tree.status(path)
        if status is not None:
            gid = status.st_gid
            nodes.append(Node(path, tree.allows(path, os.R_OK), tree.allows(path, os.W_OK), groups.get(gid), gid))
    return tuple(nodes)


def _numbered(name: str, stems: tuple[str, ...]) -> bool:
    return any(name.startswith(stem) and name[len(stem) :].isdecimal() for stem in stems)


def _by_number(path: str) -> tuple[str, int]:
    """nvidia2 before nvidia10."""
    stem = path.rstrip("0123456789")
    return stem, whole(path[len(stem) :]) or 0


def _groups(tree: Tree) -> dict[int, str]:
    """Names of groups, from the tree's own /etc/group (a container's differs from its host's)."""
    found: dict[int, str] = {}
    for line in (tree.text("/etc/group", 1024 * 1024) or "").splitlines():
        fields = line.split(":")
        gid = whole(fields[2]) if len(fields) > 2 else None
        if gid is not None:
            found.setdefault(gid, fields[0][:100])
    return found
