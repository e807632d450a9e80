"""One device behind one interface, and all of them behind one manager."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from anytorch import logs
from anytorch.devices.choose import Found, activate, best_device, find, usable_devices
from anytorch.devices.locate import locate
from anytorch.devices.memory import cleanup
from anytorch.devices.types import Backend, Candidate, MemoryUse
from anytorch.errors import AnytorchError, DeviceIndexError, DeviceUnavailable
from anytorch.probe.facts import as_json
from anytorch_compat.lookup import backend_of, find_quietly, gigabytes_of, usable_of

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
log = logs.logger(__name__)


class DeviceBackend:
    """The everyday calls of one device, the same on every kind of device.

    It can be made for a device that is not here (`DeviceBackend("npu:0")`): `is_available()` then says False, the
    memory figures are 0, since nothing of this process can be on it, and `to_device` raises DeviceUnavailable with the
    reason. An `index` is another device of the same kind; left out, it is this one.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        self._backend: Backend
        self._backend, self._index = locate(device)
        # "auto" and a UUID are settled here and now; a name stays the name it was.
        self._text = "cpu" if self._backend.name == "cpu" else f"{self._backend.name}:{self._index}"

    def __repr__(self) -> str:
        return f"DeviceBackend({self._text!r})"

    @property
    def device(self) -> torch.device | str:
        """The `torch.device`; its name as text if this torch cannot make one ("npu:0" without torch_npu)."""
        import torch

        found = find_quietly(self._text)
        if found.device is not None:
            activate(found.device)
        name = self._backend.torch_type if self._backend.torch_type == "cpu" else self._torch_name(self._index)
        try:
            return torch.device(name)
        except RuntimeError:  # "Expected one of cpu, cuda, … device type at start of device string: npu"
            return name

    @property
    def device_type(self) -> str:
        """What torch calls this kind of device: "cuda", "npu", "cpu", …"""
        return self._backend.torch_type

    # --- what it is ------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """True if something was computed on it. `is_available()` of the vendors only says that a driver answered."""
        return self._find(None).device is not None

    def device_count(self) -> int:
        """How many usable devices of this kind there are; the CPU counts as one."""
        if self._backend.name == "cpu":
            return 1 if self.is_available() else 0
        return len(usable_of(self._backend.name))

    def get_device_name(self, index: int | None = None) -> str:
        found = self._find(self._checked(index))
        return found.device.name if found.device else f"{self._backend.title} (not available: {found.why})"

    def get_device_properties(self, index: int | None = None) -> dict[str, Any]:
        """The device's facts as plain values: name, memory, UUID, capabilities, the vendor's facts."""
        found = self._find(self._checked(index))
        if found.device is None:
            return {"name": self.get_device_name(index), "available": False, "reason": found.why}
        device = found.device
        return {
            "name": device.name,
            "available": True,
            "type": device.torch_type,
            "backend": device.backend,
            "index": device.index,
            "total_memory": device.total,
            "uuid": device.uuid,
            "pci": device.pci,
            "integrated": device.integrated,
            "capabilities": as_json(device.caps),
            **{name: as_json(value) for name, value in device.facts.items() if name != "checks"},
        }

    # --- its memory ------------------------------------------------------------------------------------------------
    # The document promises whole numbers. Where a vendor does not keep a figure (MPS keeps no peak), the answer is the
    # nearest one that is certainly not too high; `get_memory_summary` says None.

    def memory_allocated(self, index: int | None = None) -> int:
        """Bytes of this process's tensors on the device."""
        return self._memory(index).allocated or 0

    def memory_reserved(self, index: int | None = None) -> int:
        """Bytes this process's allocator holds, tensors included."""
        use = self._memory(index)
        return use.reserved if use.reserved is not None else use.allocated or 0

    def max_memory_allocated(self, index: int | None = None) -> int:
        """The most bytes of tensors there ever were."""
        use = self._memory(index)
        return use.peak if use.peak is not None else use.allocated or 0

    def empty_cache(self) -> None:
        """Free cached memory; does nothing if this process has not used the device."""
        if "torch" in sys.modules:
            self._backend.empty_cache()

    def get_memory_summary(self) -> dict[str, Any]:
        """The memory figures in GiB (keys `…_gb`) and in bytes, None where unknown, and their source."""
        use = self._memory(None)
        return {
            "device": self._torch_name(self._index) if self.device_type != "cpu" else "cpu",
            "device_type": self.device_type,
            "device_name": self.get_device_name(),
            "available": self.is_available(),
            **gigabytes_of(use),
            "allocated": use.allocated,
            "reserved": use.reserved,
            "max_allocated": use.peak,
            "free": use.free,
            "total": use.total,
        }

    # --- using it --------------------------------------------------------------------------------------------------

    def to_device(self, value: T) -> T:
        """Move a tensor, a module, or containers of them to the device; what cannot be moved is returned as it is.

        Containers are rebuilt, never changed in place. Raises DeviceUnavailable, with the reason, if the device is not
        here.
        """
        found = find(self._text)
        if found.device is None:
            raise DeviceUnavailable(
                f"{self._text!r} cannot be used: {found.why}",
                hint=next((reason.fix for reason in found.reasons if reason.fix), "run `anytorch doctor`"),
                reasons=[reason.code for reason in found.reasons],
            )
        moved: T = _moved(value, self.device)
        return moved

    def synchronize(self, index: int | None = None) -> None:
        """Wait for the device; returns at once if this process has not used it."""
        index = self._checked(index)
        awake = getattr(self._backend, "initialized", None)
        if "torch" in sys.modules and (not callable(awake) or awake()):
            self._backend.synchronize(index)

    # --- ours ------------------------------------------------------------------------------------------------------

    def _find(self, index: int | None) -> Found:
        if self._backend.name == "cpu":
            return find("cpu")
        return find_quietly(self._text if index is None else f"{self._backend.name}:{index}")

    def _checked(self, index: int | None) -> int:
        """The index itself. Its own is not looked up: the memory calls stand in training loops."""
        if index is None or index == self._index:
            return self._index
        if index < 0 or (0 < self.device_count() <= index):
            raise DeviceIndexError(
                f"device {index} of {self._backend.name} does not exist: there are {self.device_count()}",
                hint="indices start at 0; `anytorch info` lists the devices",
            )
        return index

    def _memory(self, index: int | None) -> MemoryUse:
        return self._backend.memory(self._checked(index))

    def _torch_name(self, index: int) -> str:
        return f"{self.device_type}:{index}"


def _moved(value: Any, device: Any) -> Any:
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)  # tensors, modules, packed sequences, tokenizers' batches
    if isinstance(value, Mapping):
        items = {key: _moved(item, device) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, dict):
            return items
        import copy

        rebuilt = copy.copy(value)  # keeps a defaultdict's factory, an OrderedDict's kind
        rebuilt.update(items)
        return rebuilt
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_moved(item, device) for item in value)
    return value


def get_unified_backend(device: str | torch.device | None = None) -> DeviceBackend:
    """The `DeviceBackend` of a device; with none named, of the configured or the best one."""
    return DeviceBackend(device)


class UnifiedDeviceManager:
    """Every usable device of this machine. It keeps no state: each call looks again."""

    def get_all_devices(self) -> list[torch.device]:
        """The usable devices, best first, the CPU last. Software adapters are left out: they are the CPU once more."""
        import torch

        found: dict[str, torch.device] = {}
        for candidate in self._candidates():
            try:
                activate(candidate)
                found.setdefault(candidate.torch_name, torch.device(candidate.torch_name))
            except (ImportError, RuntimeError, AnytorchError) as exc:
                # torch holds one plug-in device type per process; a second one works in a process of its own.
                log.warning("%s works, but not in this process: %s", candidate.id, exc)
        return list(found.values())

    def get_best_device(self, prefer_npu: bool = False) -> torch.device:
        return best_device(prefer_npu=prefer_npu)

    def get_backend(self, device: str | torch.device | None = None) -> DeviceBackend:
        return DeviceBackend(device)

    def get_device_summary(self) -> dict[str, Any]:
        """`total_devices`, `cuda_devices`, `npu_devices`, and under `devices` each one's name and memory."""
        listed = {candidate.torch_name: candidate for candidate in reversed(self._candidates())}
        ordered = dict(reversed(listed.items()))
        return {
            "total_devices": len(ordered),
            "cuda_devices": sum(candidate.torch_type == "cuda" for candidate in ordered.values()),
            "npu_devices": sum(candidate.torch_type == "npu" for candidate in ordered.values()),
            "devices": {name: self._summary(candidate) for name, candidate in ordered.items()},
        }

    def cleanup_all(self) -> None:
        """Collect garbage and give cached memory back on every device."""
        cleanup()

    def _candidates(self) -> list[Candidate]:
        return [candidate for candidate in usable_devices() if not candidate.software]

    def _summary(self, candidate: Candidate) -> dict[str, Any]:
        use = backend_of(candidate).memory(candidate.index)
        return {
            "device_name": candidate.name,
            "device_type": candidate.torch_type,
            "backend": candidate.backend,
            **gigabytes_of(use),
        }


_MANAGER = UnifiedDeviceManager()


def get_device_manager() -> UnifiedDeviceManager:
    """The one manager of this process."""
    return _MANAGER
