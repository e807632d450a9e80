"""AMD cards as the kernel's compute driver (KFD) lists them: the order ROCm counts in."""

from __future__ import annotations

from anytorch.probe.facts import Gpu
from anytorch.probe.pci import DEVICES
from anytorch.probe.tree import Tree, whole

NODES = "/sys/class/kfd/kfd/topology/nodes"
# Integrated graphics, from the "APU" rows of LLVM's AMDGPU processor table.
INTEGRATED = frozenset(
    (
        "gfx902",
        "gfx909",
        "gfx90c",
        "gfx1013",
        "gfx1033",
        "gfx1035",
        "gfx1036",
        "gfx1037",
        "gfx1103",
        "gfx1150",
        "gfx1151",
        "gfx1152",
        "gfx1153",
    )
)
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
        values: dict[str, int] = {}
        for line in (tree.text(f"{NODES}/{node}/properties") or "").splitlines():
            key, _, text = line.partition(" ")
            number = whole(text)
            if number is not None:
                values[key] = number
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
