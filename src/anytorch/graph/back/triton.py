"""Generated Triton on CUDA, ROCm and XPU devices: a module in the cache folder for each kernel, compiled at first call."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from anytorch import settings
from anytorch.files import replace_file
from anytorch.graph.emit import triton as emit
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import sizes_of
from anytorch.graph.emit.triton_schedules import schedules
from anytorch.graph.loops import Kernel

Launch = Callable[[Sequence[torch.Tensor], Mapping[str, int]], None]


def candidates(kernel: Kernel, known: Mapping[str, int]) -> list[Schedule]:
    return schedules(kernel, known)


def prepare(kernel: Kernel, schedule: Schedule) -> Launch:
    """A kernel that takes the tensors of its buffers and the named sizes."""
    function = _module(emit.render(kernel, schedule), settings.cache_folder()).kernel
    names = sizes_of(kernel)

    def launch(tensors: Sequence[torch.Tensor], known: Mapping[str, int]) -> None:
        sizes = [known[name] for name in names]
        programs = emit.grid(kernel, schedule, dict(known))
        function[(programs,)](*tensors, *sizes, num_warps=schedule.warps, num_stages=schedule.stages)

    return launch


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
    spec.loader.exec_module(module)
    return module
