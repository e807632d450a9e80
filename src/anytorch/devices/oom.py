"""Telling "out of memory" from every other error, and finding a batch size that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from anytorch import limits, logs
from anytorch.devices.memory import cleanup
from anytorch.errors import AnytorchError, OutOfMemory, UsageError
from anytorch.measured import store
from anytorch.measured.verdict import NO_MEMORY, Question, Trial, Verdict

T = TypeVar("T")
log = logs.logger(__name__)

# Verbatim texts of torch and its vendors. Anchored on words no other error has: a test holds each one's source.
MESSAGES = tuple(
    re.compile(pattern)
    for pattern in (
        r"CUDA out of memory\.",  # torch < 2.5, and HIP: "HIP out of memory."
        r"HIP out of memory\.",
        r"XPU out of memory\.",
        r"NPU out of memory\.",
        r"MPS backend out of memory \(MPS allocated",
        r"DefaultCPUAllocator: can't allocate memory",
        r"DefaultCPUAllocator: not enough memory: you tried to allocate \d+ bytes",
        r"CUDA error: out of memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        r"CUDNN_STATUS_ALLOC_FAILED",
        r"HIPBLAS_STATUS_ALLOC_FAILED",
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.*out of memory",
        r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)",
        r"ZE_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY",
        r"FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",  # Habana
        r"Invalid buffer size: [\d.]+ [KMG]i?B",  # MPS, one tensor above Metal's limit
    )
)


def is_out_of_memory(exc: BaseException) -> bool:
    """True if this exception, or one it was raised `from`, means that a device or the host ran out of memory.

    One that was raised while another was handled does not count: a smaller batch does not mend a bug in a
    handler.
    """
    import sys

    torch = sys.modules.get("torch")
    torch_type = getattr(torch, "OutOfMemoryError", None)
    link: BaseException | None = exc
    for _ in range(8):
        if link is None:
            return False
        if isinstance(link, (MemoryError, OutOfMemory)) or (torch_type is not None and isinstance(link, torch_type)):
            return True
        if isinstance(link, RuntimeError) and any(pattern.search(str(link)) for pattern in MESSAGES):
            return True
        link = link.__cause__
    return False


@contextmanager
def telling_out_of_memory(doing: str, hint: str) -> Iterator[None]:
    """A context that turns memory that ran out, in torch's words or another library's, into OutOfMemory with this hint."""
    try:
        yield
    except AnytorchError:
        raise
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        why = (str(exc).splitlines() or [""])[0] or type(exc).__name__
        raise OutOfMemory(f"out of memory while {doing}: {why}", hint=hint) from exc


@dataclass(frozen=True)
class Fit(Generic[T]):
    """What `fit_batch` found: the function's result, the batch size that gave it, and the sizes that did not fit."""

    result: T
    batch: int
    too_large: tuple[int, ...] = ()


_fitting: dict[str, int] = {}


def fit_batch(
    function: Callable[[int], T], start: int, *, minimum: int = 1, key: str | None = None, remember: bool = True
) -> Fit[T]:
    """Call `function(batch)`, halving the batch on real out-of-memory errors, until it fits.

    With a `key` (say, model and device), the size that fitted is where the next call starts: in this process, and with
    `remember=True` in later ones through the store of what was measured. Any other exception passes through untouched.
    Raises OutOfMemory when even `minimum` does not fit.

    >>> from anytorch import fit_batch
    >>> fit_batch(lambda batch: sum(range(batch)), 8).batch
    8
    """
    start, minimum = limits.COUNT.check("start", start), limits.COUNT.check("minimum", minimum)
    if start < minimum:
        raise UsageError(f"fit_batch: start ({start}) must be at least minimum ({minimum})")
    batch = min(start, max(minimum, _recall(key, remember) or start))
    too_large: list[int] = []
    while True:
        try:
            result = function(batch)
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            failure = exc
        else:
            if key is not None and too_large:
                _keep(key, batch, too_large, remember)
            return Fit(result, batch, tuple(too_large))
        too_large.append(batch)
        if batch <= minimum:
            raise OutOfMemory(
                f"a batch of {batch} does not fit in memory, and the minimum is {minimum}: {failure}",
                hint="free memory, use a smaller model, or quantize it",
            ) from failure
        # The traceback's frames hold the tensors of the failed attempt: drop them before trying again.
        failure.__traceback__ = None
        del failure
        cleanup()
        log.info("a batch of %d does not fit; trying %d", batch, max(minimum, batch // 2))
        batch = max(minimum, batch // 2)


KIND = "batch size"  # in the store of what was measured


def _recall(key: str | None, remember: bool) -> int | None:
    if key is None or not remember:
        return _fitting.get(key or "") or None
    if key not in _fitting:  # asked once: a training loop calls this for every step
        found = store.recall(_question(key))
        _fitting[key] = int(found.chosen) if found is not None and found.chosen.isdigit() else 0
    return _fitting[key] or None


def _keep(key: str, batch: int, too_large: Sequence[int], remember: bool) -> None:
    _fitting[key] = batch
    if remember:
        trials = (*(Trial(str(size), refused=NO_MEMORY) for size in too_large), Trial(str(batch)))
        store.remember(Verdict(_question(key), trials, str(batch), "the largest tried that fitted in memory"))


def _question(key: str) -> Question:
    return Question.of(KIND, key, "this machine", key=key)
