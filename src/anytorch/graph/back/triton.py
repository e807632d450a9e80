"""Generated Triton on CUDA, ROCm and XPU devices: a module in the cache folder for each kernel, compiled at first call."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from anytorch import logs, settings
from anytorch.devices.locate import locate
from anytorch.files import replace_file
from anytorch.graph.back import saving, tickets
from anytorch.graph.back.compiling import patient_pool
from anytorch.graph.emit import triton as emit
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import sizes_of
from anytorch.graph.emit.triton_schedules import schedules
from anytorch.graph.loops import Kernel

log = logs.logger(__name__)

MOST_KERNELS = 256  # sizes and alignments that a kernel is kept for
Launch = Callable[[Sequence[torch.Tensor], Mapping[str, int]], None]


def candidates(device: torch.device, kernel: Kernel, known: Mapping[str, int]) -> list[Schedule]:
    backend, index = locate(device)
    early = backend.caps(index).early_launches
    return [replace(one, early=early) for one in schedules(kernel, known)]


def _options(schedule: Schedule) -> dict[str, Any]:
    """What the compiler is told."""
    options: dict[str, Any] = {"num_warps": schedule.warps, "num_stages": schedule.stages}
    return {**options, "launch_pdl": True} if schedule.early else options


def prepare(kernel: Kernel, schedule: Schedule) -> Launch:
    """A kernel that takes the tensors of its buffers and the named sizes."""
    text = emit.render(kernel, schedule)
    saving.save(text, schedule.name, suffix=".py", comment="#")
    function = _module(text, settings.cache_folder()).kernel
    names = sizes_of(kernel)
    compiler = _options(schedule)
    slot = emit.slot(kernel, schedule) if schedule.parts > 1 else 0

    known_kernels: dict[tuple[Any, ...], Any] = {}
    grids: dict[tuple[int, ...], int] = {}

    def launch(tensors: Sequence[torch.Tensor], known: Mapping[str, int]) -> None:
        device = tensors[0].device
        sizes = [known[name] for name in names]
        programs = grids.get(tuple(sizes))
        if programs is None:
            programs = grids[tuple(sizes)] = emit.grid(kernel, schedule, dict(known))
        shared: tuple[torch.Tensor, ...] = ()
        if schedule.parts > 1:
            scratch = torch.empty(programs * slot, dtype=torch.float32, device=device)
            shared = (scratch, tickets.take(device, programs // schedule.parts))
        # Triton's code for pointers that are multiples of 16 is wrong for others: counters are not always.
        key = (device, *sizes, *[tensor.data_ptr() & 15 for tensor in (*tensors, *shared)])
        compiled = known_kernels.get(key)
        with _current(device):
            if compiled is not None:
                compiled[programs, 1, 1](*tensors, *sizes, *shared)
                return
            compiled = function[(programs,)](*tensors, *sizes, *shared, **compiler)
        if _is_compiled_for_these(compiled):
            if len(known_kernels) >= MOST_KERNELS:
                known_kernels.clear()
                grids.clear()
            known_kernels[key] = compiled

    return launch


def _is_compiled_for_these(compiled: Any) -> bool:
    """Whether what Triton launched serves all tensors that are aligned alike, with the same sizes?

    Then the next launch goes to it at once: Triton's own way there looks at every argument again, and takes several times as
    long. Not in the interpreter, which compiles nothing, and not on ROCm, where the size of a tensor's storage matters, too.
    """
    return torch.version.cuda is not None and hasattr(compiled, "packed_metadata")


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensors', where it is another."""
    if device.type == "cpu":  # Triton's interpreter
        return nullcontext()
    module = torch.get_device_module(device)
    return nullcontext() if module.current_device() == device.index else module.device(device.index)


def compile_ahead(
    kernel: Kernel, schedules: Sequence[Schedule], tensors: Sequence[torch.Tensor], known: Mapping[str, int]
) -> None:
    """Compile the kernel with all of these schedules, several at once. What cannot be compiled says so when prepared."""
    names = sizes_of(kernel)

    def warm(schedule: Schedule) -> None:
        function = _module(emit.render(kernel, schedule), settings.cache_folder()).kernel
        shared = (torch.float32, torch.int32) if schedule.parts > 1 else ()
        sizes = [known[name] for name in names]
        with _current(tensors[0].device):
            function.warmup(*tensors, *sizes, *shared, grid=(1,), **_options(schedule))

    with patient_pool(min(16, os.cpu_count() or 1)) as pool:
        for schedule, done in [(one, pool.submit(copy_context().run, warm, one)) for one in schedules]:
            if (failed := done.exception()) is not None:
                log.info("a kernel with %s does not compile: %s", schedule.name, str(failed).splitlines()[0:1])


@lru_cache(maxsize=4096)
def _module(text: str, cache: Path) -> Any:
    """The module with this text. It lies in a file because Triton reads the source of what it compiles."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    path = cache / "graph" / "triton" / f"k{digest}.py"
    if not path.exists() or path.read_text() != text:
        replace_file(path, text.encode())
    spec = importlib.util.spec_from_file_location(f"anytorch_graph_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # By its text, and not by `exec_module`: that would run whatever bytecode lies in the cache beside the file.
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module
