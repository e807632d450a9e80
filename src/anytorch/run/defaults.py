"""Defaults that name CUDA: the default device, `with torch.device("cuda"):`, optimizers made for graphs, and profilers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._device import DeviceContext

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import HOST, NAME, Place
from anytorch.run.tensors import Marks, program_asks


def install(patches: Patches, place: Place, ledger: Ledger, marks: Marks) -> None:
    _install_device(patches, place, ledger, marks)
    _install_optimizers(patches, place)
    _install_profiler(patches, ledger)


def _install_device(patches: Patches, place: Place, ledger: Ledger, marks: Marks) -> None:
    plain_set, plain_get = torch.set_default_device, torch.get_default_device
    context: Any = DeviceContext
    plain_init = context.__init__

    def set_default_device(device: Any) -> None:
        real = None if device is None else place.of(device)
        marks.by_default = real is not None
        if real is None:
            on_host = place.host and str(device).startswith(HOST)
            plain_set(None if on_host else device)  # a default other than none costs every call of torch's functions
            return
        ledger.redirect('torch.set_default_device("cuda")')
        plain_set(None if place.host else real)

    def get_default_device() -> Any:
        device = plain_get()
        if not program_asks(2):
            return device
        if place.host:
            return place.shown[0] if marks.by_default else device
        return place.shown_of.get(device, device)

    def enter(self: Any, device: Any) -> None:
        real = place.of(device)
        self.means_cuda = real is not None  # the CPU stands in for it, perhaps, and its tensors must say so
        plain_init(self, device if real is None else real)

    patches.set(torch, "set_default_device", set_default_device)
    patches.set(torch, "get_default_device", get_default_device)
    patches.set(context, "__init__", enter)
    patches.at_the_end(lambda: plain_set(None) if not place.host and plain_get().type == place.kind else None)


def _install_optimizers(patches: Patches, place: Place) -> None:
    """`capturable=True` keeps the count of steps on the device, for graphs: the CPU can do that, too."""
    if not place.host:
        return
    name = "_get_capturable_supported_devices"
    plain = getattr(sys.modules.get("torch.optim.optimizer"), name, None)
    if plain is None:
        return

    def supported(*args: Any, **kwargs: Any) -> list[str]:
        return [*plain(*args, **kwargs), HOST]

    for module in [module for key, module in sys.modules.items() if key.startswith("torch.optim.")]:
        if vars(module).get(name) is plain:
            patches.set(module, name, supported)


def _install_profiler(patches: Patches, ledger: Ledger) -> None:
    """Profilers asked for CUDA's times measure the CPU's: CUDA's are read from NVIDIA's library."""
    profile: Any = torch.autograd.profiler.profile
    plain_init = profile.__init__

    def initialise(
        self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **more: Any
    ) -> None:
        if use_cuda or use_device == NAME:
            ledger.ignore("profiling of CUDA")
            use_device = None
        plain_init(self, enabled, use_device=use_device, **more)

    patches.set(profile, "__init__", initialise)
