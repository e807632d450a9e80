"""Numbers for ops whose kernels report indices out of range (`gpu.faults`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anytorch.gpu.runtime import open_runtime

BINDS = "max-storage-buffers-per-shader-stage"


def site_of(op: Any, dims: Sequence[int], *, noun: str = "index", buffers: int) -> int:
    """The number by which a kernel of `buffers` bindings reports for this op, whose index tensors name positions in `dims`.

    0: it reports nothing, since `webgpu_checks` is off or the adapter binds no buffer more.
    """
    runtime = open_runtime()
    if runtime.faults.checks == "off" or buffers >= int(runtime.limits[BINDS]):
        return 0
    return runtime.faults.site(str(op), noun, tuple(dims))
