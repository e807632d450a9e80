"""accelerate and transformers choose a device by name, from a list that ends with the CPU and has no place for a device
that registered itself (PrivateUse1). After `import anytorch.webgpu` their choice, where it would be the CPU, is this device:
`Accelerator()`, `Trainer`, `pipeline(device=0)` and `device_map="auto"`.

What asks for the CPU by name gets it, and any other accelerator keeps its place. Each change is one function around theirs,
put there when the module is loaded; a version of theirs that has no such function is left as it is, and logged.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from anytorch import logs
from anytorch.imports import WhenLoaded
from anytorch.webgpu.tensors import NAME

log = logs.logger(__name__)
CHOSEN = "ACCELERATE_TORCH_DEVICE"  # accelerate's own: whoever sets it has chosen


def instead_of_cpu(device: Any) -> Any:
    """This device in place of a CPU that was chosen because nothing else was found."""
    if getattr(device, "type", device) != "cpu" or CHOSEN in os.environ or not usable():
        return device
    return torch.device(NAME, 0)


@functools.cache
def usable() -> bool:
    return bool(getattr(torch, NAME).is_available())


def watch() -> None:
    """Change the modules as they are loaded."""
    WhenLoaded(
        {
            "accelerate.state": _default_device,
            "accelerate.utils.modeling": _memory,
            "transformers.training_args": _trainer,
            "transformers.pipelines.base": _pipeline,
        }
    )


def _patched(change: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    @functools.wraps(change)
    def tried(module: ModuleType) -> None:
        try:
            change(module)
        except (AttributeError, TypeError) as exc:  # another version of theirs
            log.warning("%s is not changed, and will not choose %s by itself: %s", module.__name__, NAME, exc)

    return tried


@_patched
def _default_device(module: ModuleType) -> None:
    """`Accelerator()`: PartialState.default_device is used if no other device is named."""
    plain = module.PartialState.default_device.fget
    module.PartialState.default_device = property(functools.wraps(plain)(lambda self: instead_of_cpu(plain(self))))


@_patched
def _trainer(module: ModuleType) -> None:
    """`Trainer`: TrainingArguments finds the device by itself, and asks accelerate only for the kind of distribution."""
    cached = module.TrainingArguments.__dict__["_setup_devices"]
    plain = cached.func if hasattr(cached, "func") else cached.fget

    def device(self: Any) -> Any:
        found = plain(self)
        return found if self.use_cpu else instead_of_cpu(found)

    made = type(cached)(functools.wraps(plain)(device))
    if hasattr(made, "__set_name__"):
        made.__set_name__(module.TrainingArguments, "_setup_devices")
    module.TrainingArguments._setup_devices = made


@_patched
def _pipeline(module: ModuleType) -> None:
    """`pipeline(device=0)`, and without a device: a number is the accelerator of that number."""
    plain = module.Pipeline.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        model = kwargs.get("model", args[0] if args else None)
        mapped = getattr(model, "hf_device_map", None) is not None
        number = 0 if device is None else device
        if not mapped and isinstance(number, int) and number >= 0 and not _another_accelerator():
            device = instead_of_cpu(torch.device("cpu"))
        plain(self, *args, device=device, **kwargs)

    module.Pipeline.__init__ = init


def _another_accelerator() -> bool:
    return torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()


@_patched
def _memory(module: ModuleType) -> None:
    """`device_map="auto"`: by how much memory there is, on accelerators by their numbers. Device 0 is ours."""
    plain = module.get_max_memory

    @functools.wraps(plain)
    def get_max_memory(max_memory: Any = None) -> Any:
        found = plain(max_memory)
        if max_memory is not None or not set(found) <= {"cpu", "disk"} or instead_of_cpu("cpu") == "cpu":
            return found
        free, _ = getattr(torch, NAME).mem_get_info()
        return {0: free, **found}

    for other in list(sys.modules.values()):  # modules that imported the name before us have the plain one
        if getattr(other, "__name__", "").startswith(("accelerate", "transformers")):
            for name, value in list(vars(other).items()):
                if value is plain:
                    setattr(other, name, get_max_memory)
    module.get_max_memory = get_max_memory  # type: ignore[attr-defined]
