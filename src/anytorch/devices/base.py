"""The defaults of a back end whose device module follows torch's habits (`torch.cuda`, `torch.xpu`, `torch.npu`, …).

Every vendor call is looked up with `getattr`: the modules differ between vendors and torch versions, and a missing
function means "not known", never a crash.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from anytorch.devices.types import BackendReport, Candidate, Caps, DeviceReport, MemoryUse, State
from anytorch.probe import snapshot
from anytorch.probe.facts import Gpu, Hardware


class TorchBackend:
    """A complete back end over `torch.<torch_type>`. Subclasses state their names and correct what differs."""

    name: str = ""
    torch_type: str = ""
    title: str = ""
    priority: int = 350
    aliases: tuple[str, ...] = ()

    # What the documentation promises of this kind of device (requirement A1, A4); shown by `anytorch info`.
    chips: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("float32",)
    quantizations: tuple[str, ...] = ()
    least_gb: int = 2
    advised_gb: int = 4

    # What its libraries want to find in the environment before they compute repeatably (`repeat.repeatable`).
    repeatable_environment: Mapping[str, str] = MappingProxyType({})

    # --- without torch ---------------------------------------------------------------------------------------------

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        """The devices seen without trying them; none by default: the child process finds them."""
        return ()

    def candidate(self, index: int, gpu: Gpu, **more: Any) -> Candidate:
        """A `Candidate` for a card that a probe has seen."""
        return Candidate(
            backend=self.name,
            torch_type=self.torch_type,
            index=index,
            name=gpu.name or self.title,
            state=State.SEEN,
            priority=self.priority,
            uuid=gpu.uuid,
            pci=gpu.pci,
            physical_index=gpu.index,
            total=gpu.total,
            free=gpu.free,
            integrated=gpu.integrated,
            display=bool(gpu.display),
            **more,
        )

    # --- in the child ----------------------------------------------------------------------------------------------

    def try_out(self) -> BackendReport:
        module = self.module()
        if module is None:
            return BackendReport(self.name, code="not-built", error=f"this torch has no torch.{self.torch_type}")
        if not module.is_available():
            return BackendReport(self.name, code="no-device", error=f"torch.{self.torch_type}.is_available() is False")
        return self.try_each(int(module.device_count()))

    def try_each(self, count: int) -> BackendReport:
        """Exercise devices 0 … count-1. One broken card must not hide the others: its error is kept under `broken`."""
        from anytorch.devices.exercise import exercise  # needed in the child alone

        devices, broken = [], {}
        for index in range(count):
            try:
                checks = exercise(f"{self.torch_type}:{index}")
            except Exception as exc:  # noqa: BLE001  (drivers raise anything; the words are kept)
                broken[str(index)] = f"{type(exc).__name__}: {exc}"
                continue
            report = self.describe(index)
            devices.append(replace(report, facts={**report.facts, "checks": [asdict(check) for check in checks]}))
        facts = {**self.facts(), **({"broken": broken} if broken else {})}
        if devices:
            return BackendReport(self.name, tuple(devices), facts=facts)
        if broken:
            return BackendReport(self.name, code="failed", error=broken[min(broken)], facts=facts)
        return BackendReport(
            self.name, code="no-device", error=f"torch.{self.torch_type} counts 0 devices", facts=facts
        )

    def describe(self, index: int) -> DeviceReport:
        properties = self.properties(index)
        use = self.memory(index)
        return DeviceReport(
            index=index,
            name=self.device_name(index),
            uuid=properties.get("uuid"),
            pci=properties.get("pci"),
            total=use.total,
            free=use.free,
            integrated=properties.get("integrated"),
            caps=self.caps(index),
            facts={key: value for key, value in properties.items() if key not in ("uuid", "pci", "integrated")},
        )

    def facts(self) -> dict[str, Any]:
        """Facts about the back end as a whole, for the doctor."""
        return {}

    # --- in this process -------------------------------------------------------------------------------------------

    def module(self) -> Any | None:
        """`torch.<torch_type>`, or None if this torch has none. (`torch.get_device_module()` bare poisons fork on CUDA.)"""
        import torch

        return getattr(torch, self.torch_type, None)

    def live(self) -> BackendReport | None:
        """The devices this process has loaded, else None; only a PrivateUse1 device can be hidden from the child process."""
        torch = sys.modules.get("torch")
        if torch is None or self.torch_type in BUILT_IN_TYPES:
            return None
        if torch._C._get_privateuse1_backend_name() != self.torch_type:
            return None
        module = self.module()
        if module is None or not module.is_available():
            return None
        devices = tuple(self.describe(index) for index in range(int(module.device_count())))
        return BackendReport(self.name, devices, facts=self.facts())

    def initialized(self) -> bool:
        """True if this process has initialised the driver, or if the module cannot tell."""
        if "torch" not in sys.modules:
            return False
        module = self.module()
        asked = getattr(module, "is_initialized", None)
        return module is not None and (bool(asked()) if callable(asked) else True)

    def current_index(self) -> int | None:
        """The card that torch means when no number is given. None: there is one, or nothing has woken the driver."""
        module: Any = self.module() if self.initialized() else None
        several = callable(getattr(module, "current_device", None)) and module.device_count() > 1
        return int(module.current_device()) if several else None

    def device_name(self, index: int) -> str:
        named = getattr(self.module(), "get_device_name", None)
        return str(named(index)) if callable(named) else f"{self.title} {index}"

    def properties(self, index: int) -> dict[str, Any]:
        """JSON-able facts of one device; `uuid`, `pci` and `integrated` become fields of its report."""
        return {}

    def caps(self, index: int) -> Caps:
        return Caps(
            dtypes=("float32", "float16", "bfloat16"),
            fast_dtypes=("float32",),
            autocast_dtype=None,
            quantizations=self.quantizations,
        )

    def memory(self, index: int) -> MemoryUse:
        """A device's memory, from the vendor's module once its driver is initialised, before that from files."""
        if self.initialized():
            return torch_memory(self.torch_type, self.module(), index)
        return self.sleeping_memory(index)

    def sleeping_memory(self, index: int) -> MemoryUse:
        """The memory of a device that this process has not used yet, so nothing of ours is allocated on it."""
        device = next((seen for seen in self.seen(snapshot()) if seen.index == index), None)
        if device is None:
            return MemoryUse(0, 0, 0, source="not initialised, and not seen by the probes")
        return MemoryUse(0, 0, 0, device.free, device.total, "probe (driver not initialised)")

    def empty_cache(self) -> None:
        function = getattr(self.module(), "empty_cache", None)
        if callable(function) and self.initialized():
            function()

    def synchronize(self, index: int) -> None:
        function = getattr(self.module(), "synchronize", None)
        if callable(function):
            function(index)

    def seed(self, value: int) -> None:
        function = getattr(self.module(), "manual_seed_all", None)
        if callable(function):
            function(value)

    def random_states(self) -> list[Any] | None:
        """The state of every device's random generator; None where the driver is not initialised yet."""
        module = self.module()
        if not self.initialized():
            return None
        if callable(of_all := getattr(module, "get_rng_state_all", None)):
            return list(of_all())
        return [of_one()] if callable(of_one := getattr(module, "get_rng_state", None)) else None

    def restore_random_states(self, states: list[Any]) -> None:
        """Restore the states that `random_states` returned."""
        module: Any = self.module()
        if callable(of_all := getattr(module, "set_rng_state_all", None)):
            of_all(states)
        else:
            module.set_rng_state(states[0])


BUILT_IN_TYPES = frozenset({"cpu", "cuda", "xpu", "mps"})


def torch_memory(torch_type: str, module: Any, index: int) -> MemoryUse:
    """Memory of one device from the vendor's own functions; free and total from the first source that answers.

    `torch.accelerator` is asked second: it names one type per process, raises an internal assert for a PrivateUse1
    device without a DeviceAllocator, and raises on Intel integrated GPUs (pytorch#164429).
    """
    figures: dict[str, int | None] = {}
    for figure, function_name in (
        ("allocated", "memory_allocated"),
        ("reserved", "memory_reserved"),
        ("peak", "max_memory_allocated"),
    ):
        function = getattr(module, function_name, None)
        figures[figure] = int(function(index)) if callable(function) else None
    free: int | None = None
    total: int | None = None
    source = f"torch.{torch_type}"
    for owner, function_name in (("vendor", "mem_get_info"), ("accelerator", "get_memory_info")):
        try:
            if owner == "vendor":
                function = getattr(module, function_name, None)
                answer = function(index) if callable(function) else None
            else:
                answer = _accelerator_memory_info(torch_type, index)
        except (RuntimeError, NotImplementedError, AssertionError) as exc:
            source = f"torch.{torch_type} ({type(exc).__name__}: {str(exc).splitlines()[0][:120]})"
            continue
        if answer is not None:
            free, total = int(answer[0]), int(answer[1])
            source = (
                f"torch.{torch_type}.{function_name}" if owner == "vendor" else f"torch.accelerator.{function_name}"
            )
            break
    return MemoryUse(figures["allocated"], figures["reserved"], figures["peak"], free, total, source)


def _accelerator_memory_info(torch_type: str, index: int) -> tuple[int, int] | None:
    import torch

    accelerator = getattr(torch, "accelerator", None)
    function = getattr(accelerator, "get_memory_info", None)
    if accelerator is None or not callable(function):
        return None
    current = accelerator.current_accelerator(check_available=False)  # compile-time answer: initialises nothing
    if current is None or current.type != torch_type:
        return None
    free, total = function(index)
    return int(free), int(total)
