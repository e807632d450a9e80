"""Real out-of-memory errors are recognised; nothing else is."""

from __future__ import annotations

import pytest
import torch

from anytorch.devices.oom import _fitting, fit_batch, is_out_of_memory
from anytorch.errors import OutOfMemory, UsageError
from anytorch.measured import store
from anytorch.measured.verdict import Question, Verdict

# Verbatim messages, each with the place it was taken from.
RECORDED = [
    # torch < 2.5 raised a RuntimeError subclass with this text; pytorch#16417
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; 6.48 GiB already allocated)",
    # pytorch#103421 (ROCm)
    "HIP out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 15.98 GiB of which 92.00 MiB is free.",
    # huggingface/accelerate#4226: no full stop, which is why accelerate missed it
    "MPS backend out of memory (MPS allocated: 9.05 GB, other allocations: 8.06 MB, max allowed: 9.07 GB). "
    "Tried to allocate 256.00 MB on private pool.",
    # torch 2.13.0+cpu here, torch.empty(2**50)
    "[enforce fail at alloc_cpu.cpp:130] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
    # public logs of Windows users; alloc_cpu.cpp
    "[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
    "17179869184 bytes.",
    # cuBLAS at the first matmul of a full card; pytorch#67978
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    # the asynchronous form
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    # Ascend/pytorch NPUCachingAllocator.cpp
    "NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 32.00 GiB total capacity; 28.00 GiB already allocated)",
    # c10/xpu/XPUCachingAllocator.cpp
    "XPU out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 15.11 GiB.",
]

OTHERS = [
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "CUDA error: no kernel image is available for execution on the device",
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
    "we ran out of memory lane",
    "Cannot access accelerator device when none is available.",
]


@pytest.mark.parametrize("text", RECORDED)
def test_recorded_messages(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(RECORDED[0])), "the type counts, not only the words"


def test_the_real_thing_on_the_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_torchs_own_type_and_pythons() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert is_out_of_memory(MemoryError())


def test_a_cause_counts() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("anything")
        except RuntimeError as exc:
            raise ValueError("layer 3 failed") from exc
    except ValueError as exc:
        assert is_out_of_memory(exc)


def test_a_bug_in_a_handler_is_no_lack_of_memory() -> None:
    calls = []

    def fails(batch: int) -> None:
        calls.append(batch)
        try:
            raise torch.OutOfMemoryError("anything")
        except RuntimeError:
            {}["free_cache"]

    with pytest.raises(KeyError, match="free_cache") as caught:
        fit_batch(fails, 64)
    assert calls == [64] and not is_out_of_memory(caught.value)


def allocate(limit: int) -> list[int]:
    sizes: list[int] = []

    def run(batch: int) -> int:
        sizes.append(batch)
        if batch > limit:
            torch.empty(2**50, dtype=torch.uint8)  # a real out-of-memory error
        return batch * 10

    run.sizes = sizes  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def test_the_batch_is_halved_until_it_fits() -> None:
    run = allocate(limit=20)
    fit = fit_batch(run, 100)  # type: ignore[arg-type,var-annotated]
    assert (fit.result, fit.batch, fit.too_large) == (120, 12, (100, 50, 25))


def test_what_fitted_is_where_the_next_call_starts_also_in_another_process() -> None:
    assert fit_batch(allocate(limit=20), 100, key="model on device").batch == 12  # type: ignore[arg-type]
    again = allocate(limit=20)
    assert fit_batch(again, 100, key="model on device").too_large == ()  # type: ignore[arg-type,var-annotated]
    _fitting.clear()  # as in a new process: only the files are left
    store.forget()
    assert fit_batch(allocate(limit=20), 100, key="model on device").too_large == ()  # type: ignore[arg-type]
    _fitting.clear()


def test_the_store_is_asked_once_for_a_key_also_where_it_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training loop calls this for every step, and nearly every first size fits: there is nothing to be found."""
    asked: list[str] = []
    recall = store.recall

    def counted(question: Question) -> Verdict | None:
        asked.append(question.title)
        return recall(question)

    monkeypatch.setattr(store, "recall", counted)
    for _ in range(3):
        assert fit_batch(allocate(limit=200), 100, key="it fits").batch == 100  # type: ignore[arg-type]
    assert len(asked) == 1
    assert fit_batch(allocate(limit=20), 100, key="it fits").batch == 12  # type: ignore[arg-type]
    assert fit_batch(allocate(limit=20), 100, key="it fits").too_large == ()  # type: ignore[arg-type]
    assert len(asked) == 1
    _fitting.clear()


def test_another_error_passes_through_at_once() -> None:
    calls = []

    def fails(batch: int) -> None:
        calls.append(batch)
        raise ValueError("shapes")

    with pytest.raises(ValueError, match="shapes"):
        fit_batch(fails, 64)
    assert calls == [64]


def test_nothing_fits() -> None:
    with pytest.raises(OutOfMemory, match="batch of 2 does not fit in memory") as caught:
        fit_batch(allocate(limit=0), 8, minimum=2)  # type: ignore[arg-type,var-annotated]
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(("start", "minimum"), [(0, 1), (4, 8), (4, 0)])
def test_bad_sizes(start: int, minimum: int) -> None:
    with pytest.raises(UsageError):
        fit_batch(lambda batch: batch, start, minimum=minimum)
