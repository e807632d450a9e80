"""A complete anytorch back end: the CPU under a name of its own, which counts the operators torch runs.

It is honest about what it is (a real vendor's plug-in brings a torch device type; this one borrows "cpu") and useful
all the same: `with counted_backend.counting() as calls:` shows what a model really asks of a device.

    pip install ./examples/plugin-backend
    anytorch info                          lists it
    anytorch test counted                  tries it like any other device
    anytorch.resolve("counted").device     is torch.device("cpu")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from anytorch.devices.base import TorchBackend
from anytorch.devices.types import BackendReport, Candidate, Caps, MemoryUse, State
from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware


class CountedBackend(TorchBackend):
    # The names. Below the CPU (100) in the order, so that nothing is chosen differently because this is installed.
    name = "counted"
    torch_type = "cpu"  # what torch.device calls it
    title = "counted CPU"
    priority = 90
    aliases = ("tally",)
    precisions = ("float32", "float64")

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        """What files alone promise: no torch here. `anytorch info` shows it as "seen, not tried"."""
        return [
            Candidate(
                backend=self.name,
                torch_type=self.torch_type,
                index=0,
                name=self.device_name(0),
                state=State.SEEN,
                priority=self.priority,
                total=hardware.memory.usable_total,
                free=hardware.memory.usable_available,
            )
        ]

    def try_out(self) -> BackendReport:
        """Runs in the child process. `try_each` allocates, copies, multiplies and differentiates; the count is ours."""
        with counting() as calls:
            report = self.try_each(1)
        told = (replace(device, facts={**device.facts, "operators": dict(calls)}) for device in report.devices)
        return replace(report, devices=tuple(told))

    def device_name(self, index: int) -> str:
        return f"{snapshot().cpu.model or 'CPU'}, counted"

    def caps(self, index: int) -> Caps:
        return Caps(dtypes=("float32", "float64", "int64", "bool"), fast_dtypes=("float32",), autocast_dtype=None)

    def memory(self, index: int) -> MemoryUse:
        """What is not known is None: nobody counts the CPU's tensors."""
        memory = snapshot().memory
        return MemoryUse(free=memory.usable_available, total=memory.usable_total, source="operating system")

    # `live`, `empty_cache`, `synchronize` and `seed` are TorchBackend's; over torch.cpu they have nothing to do.


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """How often each operator is called inside the block: `Counter({"aten.mm.default": 2, …})`."""
    from torch.utils._python_dispatch import TorchDispatchMode  # torch is imported only when it is needed

    calls: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[str(function)] += 1
            return function(*args, **(kwargs or {}))

    with Count():
        yield calls
