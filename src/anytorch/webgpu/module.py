"""`torch.webgpu`: what torch and its users expect of a device's module."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from anytorch import settings
from anytorch.errors import UsageError
from anytorch.gpu.adapters import choose_adapter, list_adapters
from anytorch.gpu.buffers import PoolStatistics
from anytorch.gpu.profile import Profile
from anytorch.gpu.runtime import device_seconds, forked, meter_from_now_on, open_runtime, opened
from anytorch.gpu.tape import Tape
from anytorch.webgpu import fallback, random
from anytorch.webgpu.matrix_products import described
from anytorch.webgpu.tensors import NAME

UNKNOWN_NBYTES = 4 << 30  # of a card whose driver does not tell


class Graph(Tape):
    """A tape that refuses an optimizer whose arithmetic depends on a step count kept in Python."""

    def __enter__(self) -> Graph:
        super().__enter__()
        self._hook = register_optimizer_step_pre_hook(_refuse_frozen_steps)
        return self

    def __exit__(self, *about: Any) -> None:
        self._hook.remove()
        super().__exit__(*about)


def _refuse_frozen_steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if open_runtime().recorder is not None and any(
        group.get("capturable") is False for group in optimizer.param_groups
    ):
        raise UsageError(
            f"{type(optimizer).__name__} counts its steps in Python: recorded, every replay would be the same step",
            hint="step outside the recorded part",
        )


class WebgpuModule:
    """One device per process: torch hard-wires that for devices written in Python. ANYTORCH_WEBGPU_ADAPTER chooses it."""

    @staticmethod
    def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """What torch.compile(backend="anytorch") calls for a graph on this device (`graph.compiler`)."""
        from anytorch.webgpu import compiler  # slow to import, and few compile

        return compiler.compile_graph(module, inputs)

    # --- the device --------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return opened() or bool(list_adapters())

    def is_initialized(self) -> bool:
        return opened()

    @property
    def _initialized(self) -> bool:
        """What torch.utils.checkpoint asks before it saves the generator's state."""
        return opened()

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index:
            raise RuntimeError(f"there is one webgpu device per process, webgpu:0; {device} does not exist")

    def get_device_name(self, device: Any = None) -> str:
        return open_runtime().adapter.name

    def get_device_properties(self, device: Any = None) -> dict[str, Any]:
        runtime = open_runtime()
        adapter = runtime.adapter
        return {
            "name": adapter.name,
            "api": adapter.api,
            "kind": adapter.kind,
            "driver": adapter.driver,
            "features": sorted(runtime.features),
            "limits": runtime.limits,
            "matrix_cores": described(runtime),
        }

    def adapters(self) -> list[dict[str, str]]:
        """Every adapter that ANYTORCH_WEBGPU_ADAPTER could name, in our order."""
        return [{"name": a.name, "api": a.api, "type": a.kind} for a in list_adapters()]

    def choose(self, wanted: str) -> str:
        """Which adapter a value of ANYTORCH_WEBGPU_ADAPTER would pick."""
        return choose_adapter(list_adapters(), wanted).name

    def synchronize(self, device: Any = None) -> None:
        if opened():
            open_runtime().synchronize()

    def _is_in_bad_fork(self) -> bool:
        return forked()

    def _lazy_init(self) -> None:
        open_runtime()

    def Graph(self) -> Graph:  # named as torch.cuda.CUDAGraph and torch.accelerator.Graph are
        """`graph = torch.webgpu.Graph()`, `with graph: y = model(x)`, then `x.copy_(…)` and `graph.replay()`.

        As with CUDA graphs: run the work once beforehand (kernels are compiled then), keep inputs and outputs, and neither
        read back nor upload inside. Python numbers are frozen: a learning rate, a step count, the counter of random numbers.
        What other threads launch on the device meanwhile is recorded too.
        """
        return Graph(open_runtime())

    def profile(self) -> Profile:
        """`with torch.webgpu.profile() as p: …`, then `print(p.table())`: each kernel's time by the GPU's own clock."""
        return Profile(open_runtime())

    start_timing = staticmethod(meter_from_now_on)  # add up how long the GPU works, for a whole program
    device_seconds = staticmethod(device_seconds)

    # --- memory ------------------------------------------------------------------------------------------------------

    def _statistics(self) -> PoolStatistics:
        runtime = open_runtime()
        with runtime.lock:
            return runtime.pool.statistics

    def memory_allocated(self, device: Any = None) -> int:
        return self._statistics().allocated if opened() else 0

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._statistics().peak_allocated if opened() else 0

    def memory_reserved(self, device: Any = None) -> int:
        return self._statistics().reserved if opened() else 0

    def max_memory_reserved(self, device: Any = None) -> int:
        return self._statistics().peak_reserved if opened() else 0

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        if opened():
            statistics = self._statistics()
            statistics.peak_allocated, statistics.peak_reserved = statistics.allocated, statistics.reserved

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """(free, total) bytes, as torch.cuda.mem_get_info. WebGPU tells no sizes: it is what
        ANYTORCH_WEBGPU_MEMORY allows, else what the card's driver says, else, where the memory is the host's, half of that;
        else 4 GiB."""
        from anytorch.probe import snapshot

        adapter, hardware = open_runtime().adapter, snapshot()
        total = settings.get("webgpu_memory")
        if total is None and adapter.kind not in ("CPU", "IntegratedGPU"):
            total = next((gpu.total for gpu in hardware.gpus if gpu.total and gpu.name == adapter.name), UNKNOWN_NBYTES)
        if total is None:
            total = (hardware.memory.usable_total or 2 * UNKNOWN_NBYTES) // 2
        return max(0, total - self.memory_allocated()), total

    def empty_cache(self) -> None:
        if opened():
            open_runtime().empty_cache()

    # --- random numbers ----------------------------------------------------------------------------------------------

    manual_seed = manual_seed_all = staticmethod(random.seed_all)
    initial_seed = staticmethod(random.initial_seed)

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        return random.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        random.set_state(state)

    # --- what ran where ----------------------------------------------------------------------------------------------

    def fallback_stats(self) -> dict[str, int]:
        """How often each op ran on the CPU since the start or the last reset."""
        return dict(fallback.counts)

    def reset_fallback_stats(self) -> None:
        fallback.counts.clear()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def device(self, device: Any) -> AbstractContextManager[None]:
        """`with torch.webgpu.device(0):`; there is only one."""
        return nullcontext()
