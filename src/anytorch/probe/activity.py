"""How busy the machine is right now: CPU, and the cards that say so. Cheap enough to ask every second; no torch.

A card is named by its UUID or PCI address, whichever its driver tells. What cannot be known is left out, never 0.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from anytorch.probe.nvidia import NVML_VARIABLE, SUCCESS, handles, memory, text
from anytorch.probe.pci import DEVICES, pci_address
from anytorch.probe.tree import Tree, find_library, whole


class CardActivity(NamedTuple):
    utilisation: float | None  # 0 to 1
    used: int | None
    total: int | None
    source: str


class Activity:
    """Keeps what the next look is compared with: CPU time is counted since boot, a share is of the time between two."""

    def __init__(self, tree: Tree | None = None, env: Mapping[str, str] | None = None) -> None:
        import os

        self._tree = tree or Tree()
        self._env = os.environ if env is None else env
        self._before: tuple[int, int] | None = None
        self._nvml: Any = None
        self._nvml_sought = False
        self._lock = threading.Lock()
        self.cpu_share()

    def cpu_share(self) -> float | None:
        """The busy share of all cores since the last call; None at the first call or where it is unknown."""
        line = (self._tree.text("/proc/stat") or "").partition("\n")[0].split()
        numbers = [number for word in line[1:9] if (number := whole(word)) is not None]
        if not line or line[0] != "cpu" or len(numbers) < 5:
            return None
        idle, total = numbers[3] + numbers[4], sum(numbers)
        before, self._before = self._before, (idle, total)
        if before is None or total <= before[1]:
            return None
        return min(1.0, max(0.0, 1 - (idle - before[0]) / (total - before[1])))

    def other_cores(self, own_s: float, wall_s: float) -> float | None:
        """How many cores others kept busy since the last call, in which this process used `own_s` seconds of them."""
        import os

        share, cores = self.cpu_share(), os.cpu_count()
        if share is None or not cores or not wall_s > 0:
            return None
        return max(0.0, share * cores - own_s / wall_s)

    def cards(self) -> dict[str, CardActivity]:
        """By UUID and by PCI address; a card that tells neither is left out."""
        with self._lock:
            return {**self._amd(), **self._nvidia()}

    def _amd(self) -> dict[str, CardActivity]:
        found = {}
        for name in self._tree.names(DEVICES):
            folder = f"{DEVICES}/{name}"
            busy = whole(self._tree.word(f"{folder}/gpu_busy_percent"), high=100)
            used = whole(self._tree.word(f"{folder}/mem_info_vram_used"))
            if busy is None and used is None:
                continue
            total = whole(self._tree.word(f"{folder}/mem_info_vram_total"))
            address = pci_address(name)
            if address is not None:
                found[address] = CardActivity(None if busy is None else busy / 100, used, total, "amdgpu driver")
        return found

    def _nvidia(self) -> dict[str, CardActivity]:
        library = self._library()
        if library is None:
            return {}
        import ctypes

        class Utilization(ctypes.Structure):  # nvmlUtilization_t
            _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))

        found = {}
        for _, handle in handles(library, []):
            uuid, rates = text(library, "nvmlDeviceGetUUID", handle), Utilization()
            if uuid is None:
                continue
            busy = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == SUCCESS
            total, free, _ = memory(library, handle)
            used = total - free if total is not None and free is not None else None
            found[uuid] = CardActivity(min(1.0, rates.gpu / 100) if busy else None, used, total, "NVML")
        return found

    def _library(self) -> Any:
        """NVML, initialised once and kept: starting it takes longer than asking it."""
        if self._nvml_sought:
            return self._nvml
        self._nvml_sought = True
        named = self._env.get(NVML_VARIABLE)
        path = named or (find_library(self._tree, self._env, "libnvidia-ml.so.1") if self._tree.real else None)
        if path is None:
            return None
        import ctypes

        try:
            library = ctypes.CDLL(path)
            if library.nvmlInit_v2() == SUCCESS and hasattr(library, "nvmlDeviceGetUtilizationRates"):
                self._nvml = library
        except (OSError, AttributeError):  # no such library, or one without these functions
            self._nvml = None
        return self._nvml
