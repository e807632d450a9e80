"""Display adapters of a Windows machine, from the registry: the only place that names them without a driver call."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping

from anytorch.probe.facts import Gpu
from anytorch.probe.pci import NOT_COMPUTE, VENDORS

# The class of display adapters; below it each adapter has a key 0000, 0001, …
CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
PCI_ID = r"(?i)pci\\ven_([0-9a-f]{4})&dev_([0-9a-f]{4})"

Adapters = Callable[[], Iterator[Mapping[str, object]]]  # the values of each adapter's key


def registry_adapters() -> Iterator[Mapping[str, object]]:
    """The values of every adapter key. Yields nothing elsewhere than on Windows."""
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, CLASS) as parent:
            for number in range(64):
                try:
                    key = winreg.OpenKey(parent, f"{number:04d}")
                except OSError:
                    continue  # numbers are not always consecutive
                with key:
                    values: dict[str, object] = {}
                    for at in range(winreg.QueryInfoKey(key)[1]):
                        name, value, _ = winreg.EnumValue(key, at)
                        values[name] = value
                    yield values
    else:
        yield from ()


def read_adapters(adapters: Adapters = registry_adapters) -> list[Gpu]:
    """The physical adapters; remote-desktop and virtual displays have no PCI id or a vendor that does not compute."""
    gpus = []
    for values in adapters():
        match = re.search(PCI_ID, str(values.get("MatchingDeviceId", "")))
        vendor = int(match.group(1), 16) if match else None
        if match is None or vendor is None or vendor in NOT_COMPUTE:
            continue
        size = values.get("HardwareInformation.qwMemorySize")
        if isinstance(size, bytes):  # older drivers store the number as bytes
            size = int.from_bytes(size[:8], "little")
        name = values.get("DriverDesc")
        gpus.append(
            Gpu(
                vendor=VENDORS.get(vendor, f"0x{vendor:04x}"),
                name=name[:200] if isinstance(name, str) and name else None,
                device_id=int(match.group(2), 16),
                total=size if isinstance(size, int) and 0 < size < 2**50 else None,
                sources=("registry",),
            )
        )
    return gpus
