"""`torch.npu` over the compiled test device (npu_device.cpp), with the functions torch_npu documents.

    import npu_module
    npu_module.load("/path/to/npu_device.so")  # torch.npu, two devices of 1 GiB
    npu_module.load(path, name="vulkan", count=1, capacity=64 << 20)

torch knows one PrivateUse1 device per process: load it once, in a process of its own.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Properties:
    name: str
    total_memory: int


def load(path: str, name: str = "npu", count: int = 2, capacity: int = 1 << 30) -> types.ModuleType:
    """Register the device under `name` and return its module (`torch.<name>`)."""
    torch.utils.rename_privateuse1_backend(name)
    torch.ops.load_library(path)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    module = device_module(name, ctypes.CDLL(path))
    torch._register_device_module(name, module)
    module.set_device_count(count)
    for index in range(count):
        module.set_capacity(index, capacity)
    add_autocast(name)
    return module


def device_module(name: str, library: ctypes.CDLL) -> Any:
    library.npu_counter.restype = ctypes.c_int64
    library.npu_set_capacity.argtypes = (ctypes.c_int, ctypes.c_uint64)
    module: Any = types.ModuleType(f"torch.{name}")

    def index_of(device: Any) -> int:
        if device is None:
            return int(torch.accelerator.current_device_index())
        return device if isinstance(device, int) else index_of(torch.device(device).index)

    def define(function: Function) -> Function:
        setattr(module, function.__name__, function)
        return function

    def checked(code: int) -> None:
        if code != 0:
            raise ValueError("the test device has no such index")

    # --- what torch_npu documents ---
    @define
    def is_available() -> bool:
        return device_count() > 0

    @define
    def device_count() -> int:
        return int(torch._C._accelerator_hooks_device_count())  # torch.accelerator.device_count() asks us

    @define
    def current_device() -> int:
        return int(torch.accelerator.current_device_index())

    @define
    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(index_of(device))

    @define
    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        before = current_device()
        set_device(wanted)
        try:
            yield
        finally:
            set_device(before)

    @define
    def get_device_name(device: Any = None) -> str:
        return get_device_properties(device).name

    @define
    def get_device_properties(device: Any = None) -> Properties:
        return Properties(f"test device posing as {name}", mem_get_info(device)[1])

    @define
    def memory_allocated(device: Any = None) -> int:
        return int(torch.accelerator.memory_allocated(index_of(device)))

    @define
    def memory_reserved(device: Any = None) -> int:
        return int(torch.accelerator.memory_reserved(index_of(device)))

    @define
    def max_memory_allocated(device: Any = None) -> int:
        return int(torch.accelerator.max_memory_allocated(index_of(device)))

    @define
    def max_memory_reserved(device: Any = None) -> int:
        return int(torch.accelerator.max_memory_reserved(index_of(device)))

    @define
    def reset_peak_memory_stats(device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats(index_of(device))

    @define
    def memory_stats(device: Any = None) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(index_of(device)))

    @define
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free, total = torch.accelerator.get_memory_info(index_of(device))
        return int(free), int(total)

    @define
    def empty_cache() -> None:
        torch.accelerator.empty_cache()

    @define
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(index_of(device))

    @define
    def manual_seed(seed: int) -> None:
        generators[current_device()].manual_seed(seed)

    @define
    def manual_seed_all(seed: int) -> None:
        for generator in generators[: device_count()]:
            generator.manual_seed(seed)

    @define
    def is_bf16_supported() -> bool:
        return torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]

    @define
    def is_initialized() -> bool:
        return bool(library.npu_is_initialized())

    @define
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    # --- what torch itself asks a device module for ---
    @define
    def _is_in_bad_fork() -> bool:
        return False

    @define
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generators[index_of(device)].get_state()

    @define
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        generators[index_of(device)].set_state(state)

    # --- the controls of the fake ---
    @define
    def set_device_count(count: int) -> None:
        checked(library.npu_set_device_count(count))
        generators[:] = [torch.ops.anytorch_test_device.default_generator(i) for i in range(count)]

    @define
    def set_capacity(index: int, nbytes: int) -> None:
        checked(library.npu_set_capacity(index, nbytes))

    @define
    def counter(which: str) -> int:
        """synchronized_devices, synchronized_streams, emptied_caches, copies or fallbacks."""
        value = int(library.npu_counter(which.encode()))
        if value < 0:
            raise ValueError(f"no counter {which!r}")
        return value

    generators: list[torch.Generator] = []
    module.default_generators = generators
    return module


# The operators every back end lets autocast lower (torch/csrc and ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP).
LOWERED = ("linear", "matmul", "mm", "addmm", "bmm")
_kept: list[torch.library.Library] = []  # a Library takes its kernels back when it is collected


def add_autocast(name: str) -> None:
    key = torch._C.DispatchKey.AutocastPrivateUse1
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    _kept.extend((fallthrough, aten))

    def lowered(operator: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            dtype = torch.get_autocast_dtype(name)
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return operator(*(cast(argument, dtype) for argument in arguments))

        return run

    def cast(value: Any, dtype: torch.dtype) -> Any:
        lower = isinstance(value, torch.Tensor) and value.device.type == name and value.dtype == torch.float32
        return value.to(dtype) if lower else value

    for operator in LOWERED:
        aten.impl(operator, lowered(getattr(torch.ops.aten, operator)), "AutocastPrivateUse1")
