"""Recorded machines as small folders. Every recorded content names its source where it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Build = Callable[[Mapping[str, str | bytes]], Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """`build({"/proc/cpuinfo": text, "/sys/…/driver": "-> ../drivers/nouveau"})` → the root that holds them."""
    root = tmp_path / "root"
    root.mkdir()

    def write(files: Mapping[str, str | bytes]) -> Path:
        for name, content in files.items():
            path = root / name.lstrip("/")
            if name.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content.startswith("-> "):
                path.symlink_to(content[3:])
            else:
                path.write_text(content, encoding="utf-8")
        return root

    return write


def pci(
    address: str, kind: str, vendor: str, device: str, driver: str | None = None, **others: str
) -> dict[str, str | bytes]:
    """The files of one PCI device as the kernel writes them (Documentation/PCI/sysfs-pci.rst)."""
    folder = f"/sys/bus/pci/devices/{address}"
    files: dict[str, str | bytes] = {
        f"{folder}/class": kind + "\n",
        f"{folder}/vendor": vendor + "\n",
        f"{folder}/device": device + "\n",
        **{f"{folder}/{name}": value for name, value in others.items()},
    }
    if driver:
        files[f"{folder}/driver"] = f"-> ../../../../bus/pci/drivers/{driver}"
    return files


@pytest.fixture(name="pci")
def pci_fixture() -> Callable[..., dict[str, str | bytes]]:
    return pci
