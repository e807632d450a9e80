"""Files: what was saved from CUDA is loaded onto the stand-in's device, and what a program saves there says "cuda:0".

So a checkpoint written under one stand-in can be read under another, or on a machine with CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import HOST, NAME, Device, Place
from anytorch.run.tensors import Marks

FIRST = -1  # before torch's own, which start at 10


def install(patches: Patches, place: Place, ledger: Ledger, marks: Marks) -> None:
    serialization: Any = torch.serialization
    moved: list[None] = []  # storages that a program's map_location has put on cuda

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
        moved.append(None)
        return self.to(device=real if real is not None else device, non_blocking=non_blocking)

    for kind in (torch.UntypedStorage, torch.TypedStorage):
        patches.set(kind, "cuda", storage_to)
    _install_scripts(patches, place, ledger)
    if not place.host:
        return
    plain_load: Any = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What was loaded onto the CPU says so, though the CPU stands in for CUDA."""
        before = len(moved)
        loaded = plain_load(f, map_location, *args, **kwargs)
        if _means_host(map_location) and len(moved) == before:
            for tensor in _tensors(loaded):
                marks.on_host.add(tensor)
        moved.clear()
        return loaded

    for owner in (torch, torch.serialization):
        patches.set(owner, "load", load)


def _means_host(location: Any) -> bool:
    """True for a map_location that puts everything on the CPU; of a function, all that can be seen is what it did."""
    if isinstance(location, dict):
        return bool(location) and all(_means_host(value) for value in location.values())
    if isinstance(location, (str, Device)):
        return str(location).startswith(HOST)
    return callable(location)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a file had: in dictionaries, lists and modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _install_scripts(patches: Patches, place: Place, ledger: Ledger) -> None:
    """`torch.jit.load`, whose reader is C++ and asks for CUDA itself."""
    plain: Any = torch.jit.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        real = place.of(map_location)
        if real is not None:
            ledger.redirect("torch.jit.load() onto cuda")
            return plain(f, real, *args, **kwargs)
        try:
            return plain(f, map_location, *args, **kwargs)
        except RuntimeError:
            if map_location is not None:
                raise
            ledger.redirect("torch.jit.load() of a module saved from cuda")
            if hasattr(f, "seek"):
                f.seek(0)
            return plain(f, place.real(), *args, **kwargs)

    for owner in (torch.jit, torch.jit._serialization):
        patches.set(owner, "load", load)
