"""The functions of `torch.cuda`, answered with the facts of the device that stands in.

What CUDA asks and no other device can know has one documented answer: the compute capability is (8, 0) where bfloat16
can be computed and (7, 0) where not, a warp has 32 lanes, and a device has as many multiprocessors as cores, or 1.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from anytorch.run.ledger import CHOOSES_KERNELS, Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import Place
from anytorch.run.refusals import refusing
from anytorch.run.tensors import program_asks

IGNORED = [
    "ipc_collect",
    "set_per_process_memory_fraction",
    "set_sync_debug_mode",
    "caching_allocator_enable",
    "reset_accumulated_memory_stats",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
    "_record_memory_history",
    "_dump_snapshot",
    "_set_allocator_settings",
    "_sleep",
]
UNKNOWN = [
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
    "memory_usage",
    "device_memory_used",
    "list_gpu_processes",
]
REFUSED = [
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "change_current_allocator",
    "current_blas_handle",
    "get_stream_from_external",
    "memory_snapshot",
    "_compile_kernel",
]

# The counters of torch.cuda.memory_stats().
COUNTERS = (
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
)
POOLS = ("all", "small_pool", "large_pool")
MOMENTS = ("current", "peak", "allocated", "freed")

# These look for NVIDIA's functions, in torch itself or in libraries, where they are told that CUDA is there.
TOLD_THE_TRUTH = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.utils._triton",
    "torch._higher_order_ops",
    *(f"{name}." for name in sorted(CHOOSES_KERNELS)),
)
FOLDING = "torch._dynamo.variables.torch"  # the tracer, on behalf of the program whose question it answers


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    functions: dict[str, Any] = {
        **_devices(place, ledger),
        **_memory(place, ledger),
        **_random_numbers(place, ledger),
    }
    for name in IGNORED:
        functions[name] = _ignoring(f"torch.cuda.{name}", ledger)
    for name in UNKNOWN:
        functions[name] = refusing(f"torch.cuda.{name}()", "ask the system's own tools")
    for name in REFUSED:
        functions[name] = refusing(f"torch.cuda.{name}", "use the program's torch path")
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name, value in functions.items():
            if owner is torch.cuda or hasattr(owner, name):
                patches.set(owner, name, value)
    _install_tools(patches, ledger)
    _install_libraries(patches, ledger)
    plain_built = torch.backends.cuda.is_built

    def is_built() -> bool:
        # Not for torch itself: every optimizer's step asks, and then asks CUDA whether a graph is being captured.
        return program_asks(2) or plain_built()

    patches.set(torch.backends.cuda, "is_built", is_built)
    _install_switches(patches, ledger, "torch.backends.cudnn", torch.backends.cudnn)
    _install_switches(patches, ledger, "torch.backends.cuda.matmul", torch.backends.cuda.matmul)


def _devices(place: Place, ledger: Ledger) -> dict[str, Any]:
    real_init: Any = torch.cuda._lazy_init if torch.cuda.is_available() else None

    def lazy_init() -> None:
        """torch calls it once before it makes the first CUDA tensor. A machine that has CUDA, too, keeps its own."""
        if real_init is not None:
            real_init()

    plain_available = torch.cuda.is_available

    def is_available() -> bool:
        name = sys._getframe(1).f_globals.get("__name__", "")
        if (name.startswith(TOLD_THE_TRUTH) and name != FOLDING) or name in CHOOSES_KERNELS:
            return plain_available()
        ledger.redirect("torch.cuda.is_available()")
        return place.count() > 0

    def set_device(device: Any) -> None:
        ledger.redirect("torch.cuda.set_device()")
        index = place.index_of(device)
        if index >= 0:
            place.current = index
            if place.has("set_device"):
                place.module.set_device(place.indices[index])

    class device:
        """`with torch.cuda.device(n):` makes it the current one."""

        def __init__(self, device: Any) -> None:
            self.idx = place.index_of(device) if device is not None and device != -1 else -1

        def __enter__(self) -> None:
            self.prev_idx = place.current
            if self.idx >= 0:
                set_device(self.idx)

        def __exit__(self, *about: Any) -> None:
            if self.prev_idx != place.current:
                set_device(self.prev_idx)

    class device_of(device):
        def __init__(self, obj: Any) -> None:
            real = getattr(obj, "device", None)
            super().__init__(place.shown_of[real].index if real in place.shown_of else -1)

    def name_of(device: Any = None) -> str:
        return place.name_of(place.index_of(device))

    def capability(device: Any = None) -> tuple[int, int]:
        return (8, 0) if "bfloat16" in place.caps(place.index_of(device)).dtypes else (7, 0)

    def properties(device: Any = None) -> Any:
        index = place.index_of(device)
        major, minor = capability(index)
        candidate = place.resolution.chosen
        return DeviceProperties(
            name=place.name_of(index),
            major=major,
            minor=minor,
            total_memory=place.free_and_total(index)[1],
            multi_processor_count=int(
                candidate.facts.get("multi_processor_count") or candidate.facts.get("cores") or 1
            ),
            is_integrated=int(place.caps(index).unified_memory),
            is_multi_gpu_board=0,
            max_threads_per_multi_processor=1024,
            max_threads_per_block=1024,
            warp_size=32,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=32768,
            shared_memory_per_multiprocessor=32768,
            L2_cache_size=0,
            gcnArchName="",
            uuid=candidate.uuid or "",
        )

    def bf16(including_emulation: bool = True) -> bool:
        caps = place.caps(place.current)
        return "bfloat16" in (caps.dtypes if including_emulation else caps.fast_dtypes)

    def synchronize(device: Any = None) -> None:
        ledger.redirect("torch.cuda.synchronize()")
        place.synchronize(place.index_of(device))

    return {
        "_lazy_init": lazy_init,
        "init": lazy_init,
        "is_initialized": lambda: True,
        "is_available": is_available,
        "_is_in_bad_fork": lambda: bool(getattr(place.module, "_is_in_bad_fork", bool)()),
        "device_count": place.count,
        "current_device": lambda: place.current,
        "set_device": set_device,
        "device": device,
        "device_of": device_of,
        "_exchange_device": lambda index: _exchange(place, set_device, index),
        "_maybe_exchange_device": lambda index: _exchange(place, set_device, index),
        "get_device_name": name_of,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "_get_device_properties": properties,
        "can_device_access_peer": lambda device, peer: False,
        "get_arch_list": list,
        "get_gencode_flags": lambda: "",
        "is_bf16_supported": bf16,
        "is_tf32_supported": lambda: False,
        "get_sync_debug_mode": lambda: 0,
        "synchronize": synchronize,
        "cudart": lambda: SimpleNamespace(
            cudaProfilerStart=lambda: 0,
            cudaProfilerStop=lambda: 0,
            cudaMemGetInfo=place.free_and_total,
            cudaHostRegister=lambda *args: 0,
            cudaHostUnregister=lambda *args: 0,
            cudaError=SimpleNamespace(success=0),
        ),
        "check_error": lambda code: None,
    }


class DeviceProperties(SimpleNamespace):
    """What torch.cuda.get_device_properties returns: facts of the device that stands in."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count})"
        )


def _exchange(place: Place, set_device: Any, index: int) -> int:
    before = place.current
    if index >= 0 and index != before:
        set_device(index)
    return before


def _memory(place: Place, ledger: Ledger) -> dict[str, Any]:
    at = place.index_of

    def reserved(device: Any = None) -> int:
        index = at(device)
        return place.allocated(index) if place.host else place.memory(index).reserved or 0

    def max_reserved(device: Any = None) -> int:
        own = getattr(place.module, "max_memory_reserved", None)
        return int(own(place.indices[at(device)])) if callable(own) else max(place.peak(at(device)), reserved(device))

    def stats(device: Any = None) -> OrderedDict[str, Any]:
        """Those of CUDA's counters that every device has; the rest are 0."""
        index = at(device)
        now, peak = place.allocated(index), place.peak(index)
        told: OrderedDict[str, Any] = OrderedDict(
            (f"{name}.{pool}.{moment}", 0) for name in COUNTERS for pool in POOLS for moment in MOMENTS
        )
        for name, current, most in (
            ("active_bytes", now, peak),
            ("allocated_bytes", now, peak),
            ("requested_bytes", now, peak),
            ("reserved_bytes", reserved(index), max_reserved(index)),
        ):
            told.update({f"{name}.all.current": current, f"{name}.all.peak": most})
        told.update(num_alloc_retries=0, num_ooms=0, num_sync_all_streams=0, max_split_size=-1)
        told.update({f"oversize_{kind}.{moment}": 0 for kind in ("allocations", "segments") for moment in MOMENTS})
        return told

    def nested_stats(device: Any = None) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for name, value in stats(device).items():
            *path, last = name.split(".")
            inner = nested
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return nested

    def info(device: Any = None) -> tuple[int, int]:
        return place.free_and_total(at(device))

    def summary(device: Any = None, abbreviated: bool = False) -> str:
        index = at(device)
        rows = {"allocated": place.allocated(index), "reserved": reserved(index), "peak": place.peak(index)}
        lines = [f"  {name:<10} {nbytes / 2**20:>12.1f} MiB" for name, nbytes in rows.items()]
        return "\n".join([f"memory of {place.name_of(index)}, which stands in for cuda:{index}", *lines])

    def empty_cache() -> None:
        ledger.redirect("torch.cuda.empty_cache()")
        place.backend.empty_cache()

    def reset(device: Any = None) -> None:
        place.reset_peak(at(device))

    return {
        "memory_allocated": lambda device=None: place.allocated(at(device)),
        "max_memory_allocated": lambda device=None: place.peak(at(device)),
        "memory_reserved": reserved,
        "max_memory_reserved": max_reserved,
        "memory_cached": reserved,
        "max_memory_cached": max_reserved,
        "memory_stats": stats,
        "memory_stats_as_nested_dict": nested_stats,
        "host_memory_stats": OrderedDict,
        "host_memory_stats_as_nested_dict": dict,
        "memory_summary": summary,
        "mem_get_info": info,
        "empty_cache": empty_cache,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": reset,
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda device=None: 1.0,
    }


def _random_numbers(place: Place, ledger: Ledger) -> dict[str, Any]:
    """The device's own generator; the CPU's where the CPU stands in, which then has one generator for both worlds."""
    generator = torch.default_generator

    def manual_seed(seed: int) -> None:
        ledger.redirect("torch.cuda.manual_seed()")
        if place.host:
            generator.manual_seed(int(seed))
        else:
            place.backend.seed(int(seed))

    def seed() -> None:
        manual_seed(random.SystemRandom().getrandbits(63))

    def index_of(device: Any) -> int:
        return place.indices[place.index_of(device)]

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        if place.host:
            place.index_of(device)
            return torch.get_rng_state()
        state: torch.Tensor = place.module.get_rng_state(index_of(device))
        return state

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        if place.host:
            torch.set_rng_state(new_state)
        else:
            place.module.set_rng_state(new_state, index_of(device))

    def set_all(new_states: Any) -> None:
        for index, state in enumerate(new_states):
            set_rng_state(state, index)

    def initial_seed() -> int:
        return int(generator.initial_seed() if place.host else place.module.initial_seed())

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": seed,
        "seed_all": seed,
        "initial_seed": initial_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(index) for index in range(place.count())],
        "set_rng_state_all": set_all,
        "default_generators": (generator,) * max(1, place.count()),
    }


def _install_switches(patches: Patches, ledger: Ledger, named: str, switches: Any) -> None:
    """`torch.backends.cudnn.benchmark = True`: kept, so that it reads as it was set, and listed as without effect."""
    kind = type(switches)
    plain: Any = kind.__setattr__

    def set_switch(self: Any, name: str, value: Any) -> None:
        if program_asks(2):
            ledger.ignore(f"{named}.{name}")
        plain(self, name, value)

    patches.set(kind, "__setattr__", set_switch)


def _install_libraries(patches: Patches, ledger: Ledger) -> None:
    """Which of NVIDIA's libraries is to compute, what they keep, and kernels in their language."""
    for name in ("preferred_linalg_library", "preferred_blas_library"):
        plain = getattr(torch.backends.cuda, name, None)
        if plain is not None:
            patches.set(torch.backends.cuda, name, _reading(plain, f"torch.backends.cuda.{name}", ledger))
    ignoring = _ignoring("torch.backends.cuda.cufft_plan_cache", ledger)
    patches.set(torch.backends.cuda.cuFFTPlanCache, "size", 0)
    patches.set(torch.backends.cuda.cuFFTPlanCache, "max_size", property(lambda self: 0, ignoring))
    patches.set(torch.backends.cuda.cuFFTPlanCache, "clear", ignoring)
    for name in ("_create_jit_fn", "_create_multi_output_jit_fn"):
        do = "write the function with torch's operations, and torch.compile it"
        patches.set(torch.cuda.jiterator, name, refusing(f"torch.cuda.jiterator.{name}", do))


def _reading(plain: Any, name: str, ledger: Ledger) -> Any:
    """A function that sets what it is given, and returns what is set: only the second."""

    def read(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            ledger.ignore(f"{name}()")
        return plain()

    return read


def _ignoring(name: str, ledger: Ledger) -> Any:
    def nothing(*args: Any, **kwargs: Any) -> None:
        ledger.ignore(f"{name}()")

    return nothing


def _install_tools(patches: Patches, ledger: Ledger) -> None:
    """nvtx ranges and the profiler's start and stop: marks for NVIDIA's tools, which see nothing here."""
    nvtx: Any = torch.cuda.nvtx
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        patches.set(nvtx, name, _ignoring(f"torch.cuda.nvtx.{name}", ledger))

    @contextlib.contextmanager
    def marked(*args: Any, **kwargs: Any) -> Iterator[None]:
        ledger.ignore("torch.cuda.nvtx.range()")
        yield

    patches.set(nvtx, "range", marked)
    profiler: Any = torch.cuda.profiler
    patches.set(profiler, "start", _ignoring("torch.cuda.profiler.start", ledger))
    patches.set(profiler, "stop", _ignoring("torch.cuda.profiler.stop", ledger))
    patches.set(profiler, "profile", marked)
    emitting: Any = torch.autograd.profiler.emit_nvtx

    def enter(self: Any) -> Any:
        ledger.ignore("emit_nvtx()")
        return self

    patches.set(emitting, "__enter__", enter)
    patches.set(emitting, "__exit__", lambda self, *about: None)
