"""Files: what was saved from CUDA is loaded onto the stand-in's device, and what a program saves there says "cuda:0".

So a checkpoint written under one stand-in can be read under another, or on a machine with CUDA.
"""

from __future__ import annotations

from typing import Any

import torch

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import NAME, Device, Place

FIRST = -1  # before torch's own, which start at 10


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    serialization: Any = torch.serialization

    def tag(storage: Any) -> str | None:
        return None if place.host or storage.device.type != place.kind else f"{NAME}:0"

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith(NAME):
            return None
        ledger.redirect("torch.load() of a tensor saved from cuda")
        index = Device(location).index
        # A file may name a card that only the machine it was saved on had.
        real = place.real(index if index is not None and index < len(place.reals) else None)
        return serialization.default_restore_location(storage, str(real))

    entry = (FIRST, tag, restore)
    registered: list[Any] = serialization._package_registry
    registered.insert(0, entry)
    patches.at_the_end(lambda: registered.remove(entry))

    def storage_to(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        real = place.real() if device is None else place.of(device)
        return self.to(device=real if real is not None else device, non_blocking=non_blocking)

    for kind in (torch.UntypedStorage, torch.TypedStorage):
        patches.set(kind, "cuda", storage_to)
