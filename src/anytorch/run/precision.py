"""Mixed precision: autocast and GradScaler that name "cuda" work on the stand-in's device, with the dtype asked for."""

from __future__ import annotations

from typing import Any

import torch

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import NAME, Place

HALVES = (torch.float16, torch.bfloat16)


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    autocast: Any = torch.amp.autocast_mode.autocast
    scaler: Any = torch.amp.grad_scaler.GradScaler
    plain_autocast, plain_scaler = autocast.__init__, scaler.__init__
    kind = place.kind
    slow: dict[torch.dtype, bool] = {}

    def is_slow(dtype: torch.dtype) -> bool:
        if dtype not in slow:
            slow[dtype] = str(dtype).removeprefix("torch.") not in place.caps(place.current).fast_dtypes
        return slow[dtype]

    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any) -> None:
        if device_type == NAME:
            if dtype is not None and dtype not in HALVES:
                enabled = False  # CUDA takes float32, which casts nothing; elsewhere torch warns and does the same
            if enabled:
                ledger.redirect('torch.autocast("cuda")')
                if dtype is not None and is_slow(dtype):
                    ledger.redirect(f"autocast to {dtype}, which is slow on this device")
            device_type = kind
        plain_autocast(self, device_type, dtype=dtype, enabled=enabled, **kwargs)

    def make(self: Any, device: str = NAME, *args: Any, **kwargs: Any) -> None:
        plain_scaler(self, kind if device == NAME else device, *args, **kwargs)

    patches.set(autocast, "__init__", begin)
    patches.set(scaler, "__init__", make)

    def for_type(plain: Any) -> Any:
        def ask(device_type: Any = NAME, *args: Any) -> Any:
            if not isinstance(device_type, str):  # the old form, which always meant CUDA
                return plain(kind, device_type, *args)
            return plain(kind if device_type == NAME else device_type, *args)

        return ask

    ask_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
    for name in (
        "is_autocast_enabled",
        "set_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_dtype",
        "is_autocast_available",
    ):
        for owner in (torch, torch.amp, torch.amp.autocast_mode):
            if hasattr(owner, name):
                patches.set(owner, name, for_type(getattr(owner, name)))
    patches.set(torch, "get_autocast_gpu_dtype", lambda: ask_dtype(kind))
    patches.set(torch, "set_autocast_gpu_dtype", lambda dtype: set_dtype(kind, dtype))
    for name in ("custom_fwd", "custom_bwd"):
        plain = getattr(torch.amp, name)
        for owner in (torch.amp, torch.amp.autocast_mode):
            patches.set(owner, name, _with_kind(plain, kind))


def _with_kind(plain: Any, kind: str) -> Any:
    def wrapped(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return plain(*args, device_type=kind if device_type == NAME else device_type, **kwargs)

    return wrapped
