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
from anytorch.probe.masks import Mask


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

    def visible(self, cards: Sequence[Gpu], mask: Mask, fact: str = "") -> list[Candidate]:
        """Candidates for the cards that a mask leaves, with one fact of theirs. All are masked: all, the doctor says why."""
        shown = [cards[i] for i in mask.visible] if mask.visible else cards
        known = [(gpu, getattr(gpu, fact) if fact else None) for gpu in shown]
        return [self.candidate(index, gpu, facts={fact: it} if it else {}) for index, (gpu, it) in enumerate(known)]

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

    def call(self, name: str, *arguments: Any) -> Any:
        """What the vendor's function of that name returns; None where this torch has no such function."""
        function = getattr(self.module(), name, None)
        return function(*arguments) if callable(function) else None

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
        named = self.call("get_device_name", index)
        return f"{self.title} {index}" if named is None else str(named)

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
        if self.initialized():
            self.call("empty_cache")

    def synchronize(self, index: int) -> None:
        self.call("synchronize", index)

    def seed(self, value: int) -> None:
        self.call("manual_seed_all", value)

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

    def ask(name: str) -> Any:
        function = getattr(module, name, None)
        return function(index) if callable(function) else None

    told = [ask(name) for name in ("memory_allocated", "memory_reserved", "max_memory_allocated")]
    allocated, reserved, peak = (None if nbytes is None else int(nbytes) for nbytes in told)
    source = f"torch.{torch_type}"
    for name, answer_of in (
        (f"{source}.mem_get_info", lambda: ask("mem_get_info")),
        ("torch.accelerator.get_memory_info", lambda: _accelerator_memory_info(torch_type, index)),
    ):
        try:
            answer = answer_of()
        except (RuntimeError, NotImplementedError, AssertionError) as exc:
            source = f"torch.{torch_type} ({type(exc).__name__}: {str(exc).splitlines()[0][:120]})"
            continue
        if answer is not None:
            return MemoryUse(allocated, reserved, peak, int(answer[0]), int(answer[1]), name)
    return MemoryUse(allocated, reserved, peak, None, None, source)


def _accelerator_memory_info(torch_type: str, index: int) -> tuple[int, int] | None:
    import torch

    accelerator: Any = getattr(torch, "accelerator", None)
    if not callable(getattr(accelerator, "get_memory_info", None)):
        return None
    current = accelerator.current_accelerator(check_available=False)  # compile-time answer: initialises nothing
    found: tuple[int, int] | None = None
    if current is not None and current.type == torch_type:
        found = accelerator.get_memory_info(index)
    return found
