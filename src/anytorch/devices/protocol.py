"""The interface of a back end. Ours and third-party ones load through the entry-point group `anytorch.backends`.

A plug-in names a class (or a function) that takes no arguments and returns an object with these attributes and methods.
Deriving from `anytorch.devices.base.TorchBackend` gives working defaults for all of them but the names;
`examples/plugin-backend/` is a complete one. A back end whose torch device lives in a module of its own may also have
`activate()`, called in the user's process when one of its devices has been chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from anytorch.devices.types import BackendReport, Candidate, Caps, MemoryUse
from anytorch.probe.facts import Hardware


@runtime_checkable
class Backend(Protocol):
    name: str  # what users ask for: "rocm"
    torch_type: str  # what torch.device calls it: "cuda"
    title: str  # "AMD GPU (ROCm)"
    priority: int  # higher wins; ours: CUDA/ROCm 700, NPU 600, XPU 500, MPS 400, WebGPU 300, CPU 100
    aliases: tuple[str, ...]  # other words for it: ("hip", "amd")

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        """The devices that files list. Uses neither torch nor a driver."""

    def try_out(self) -> BackendReport:
        """Use every device for real: allocate, multiply, differentiate, copy. Runs in the child process only."""

    def live(self) -> BackendReport | None:
        """The devices if this very process has already loaded this back end, else None. Must not initialise anything."""

    def caps(self, index: int) -> Caps:
        """What the device can do. May initialise the driver."""

    def memory(self, index: int) -> MemoryUse:
        """Memory figures. Must not initialise a driver that is not initialised yet."""

    def empty_cache(self) -> None:
        """Return cached memory to the system; does nothing if the driver is not initialised."""

    def synchronize(self, index: int) -> None:
        """Wait until the device has finished its work."""

    def seed(self, value: int) -> None:
        """Seed every device of this back end."""
