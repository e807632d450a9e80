"""What is listed for a device, and the check before the clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from anytorch.devices.bench import workloads
from anytorch.devices.bench.workloads import (
    WORKLOADS,
    Bench,
    Prepared,
    Skip,
    check,
    dtype_names,
    list_cases,
    sizes,
    workload_names,
)
from anytorch.devices.types import Caps
from anytorch.errors import UsageError, WrongAnswer

torch = pytest.importorskip("torch")
CAPS = Caps(dtypes=("float32", "float16"), fast_dtypes=("float32",), autocast_dtype=None)
GRID: dict[str, Any] = {"batch_sizes": (4, 1), "seq_lengths": (16,), "hidden_sizes": (64,)}


def bench(**changes: Any) -> Bench:
    made = Bench(torch.device("cpu"), CAPS, lambda: None, free=2**40, cache_nbytes=None, hurried=True)
    return dataclasses.replace(made, **changes)


def test_only_what_the_device_can_store_is_multiplied_and_only_what_is_fast_runs_the_block() -> None:
    cases = list_cases(CAPS, workloads=WORKLOADS, dtypes=None, **GRID)
    assert [c.dtype for c in cases if c.workload == "matmul"] == ["float32", "float16"]
    assert {c.dtype for c in cases if c.workload == "transformer"} == {"float32"}
    assert {c.workload for c in cases} == set(WORKLOADS)


def test_the_grid_goes_from_small_to_large() -> None:
    cases = list_cases(CAPS, workloads=["transformer"], dtypes=None, **GRID)
    assert [c.parameters["batch"] for c in cases] == [1, 4]


def test_a_dtype_the_device_lacks_is_skipped_with_a_reason() -> None:
    (case,) = list_cases(CAPS, workloads=["matmul"], dtypes=["float64"], **GRID)
    assert "cannot compute in float64" in case.skip and "float16" in case.skip


def test_copies_make_no_sense_where_memory_is_shared() -> None:
    shared = dataclasses.replace(CAPS, unified_memory=True)
    cases = list_cases(shared, workloads=["copies"], dtypes=None, **GRID)
    assert len(cases) == 4 and all("shares the host's memory" in c.skip for c in cases)


@pytest.mark.parametrize(
    "case",
    [
        workloads.matmul("float32"),
        workloads.matmul("float16"),
        workloads.matmul("bfloat16"),
        workloads.matmul("float64"),
        workloads.transformer(3, 16, 64, "float32"),
        workloads.transformer(2, 8, 48, "bfloat16"),
        workloads.bandwidth("copy"),
        workloads.bandwidth("triad"),
        workloads.launch(wait=False),
        workloads.launch(wait=True),
        workloads.copy(to_device=True, pinned=False, unified=False),
        workloads.copy(to_device=False, pinned=False, unified=False),
    ],
    ids=lambda case: f"{case.workload} {case.case}",
)
def test_every_workload_is_right_and_its_check_can_fail(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "ENOUGH_S", 0.0)
    prepared: Prepared = case.prepare(bench())
    prepared.run()
    error, tolerance = check(prepared, case.dtype)
    assert error <= tolerance
    wrong = dataclasses.replace(prepared, reference=lambda: prepared.reference() * 1.2)
    with pytest.raises(WrongAnswer, match="not timed"):
        check(wrong, case.dtype)


def test_one_wrong_element_at_the_end_is_seen() -> None:
    prepared = workloads.matmul("float32").prepare(bench())

    def spoilt() -> Any:
        answer = prepared.answer()
        answer[-1, -1] += 5
        return answer

    with pytest.raises(WrongAnswer):
        check(dataclasses.replace(prepared, answer=spoilt), "float32")


def test_not_a_number_and_a_wrong_shape_are_wrong() -> None:
    prepared = workloads.launch(wait=False).prepare(bench())
    with pytest.raises(WrongAnswer, match="nan"):
        check(dataclasses.replace(prepared, answer=lambda: prepared.answer() * float("nan")), "float32")
    with pytest.raises(WrongAnswer, match="shape"):
        check(dataclasses.replace(prepared, answer=lambda: prepared.answer()[:3]), "float32")


def test_pinned_memory_that_does_not_work_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    # Verbatim from torch 2.13.0+cpu (shared/research/devices.md: "Also raising on a CPU-only build").
    message = "Cannot access accelerator device when none is available."

    def refuse(self: Any) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    with pytest.raises(Skip, match=message):
        workloads.copy(to_device=True, pinned=True, unified=False).prepare(bench())


@pytest.mark.parametrize(
    ("free", "cache", "mib"),
    [(2**40, None, 64), (2**40, 60 * 2**20, 240), (2**40, 2**31, 1024), (512 * 2**20, None, 32), (None, None, 64)],
)
def test_a_buffer_is_larger_than_the_cache_and_smaller_than_the_memory(
    free: int | None, cache: int | None, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "LEAST_NBYTES", 64 * 2**20)
    assert workloads.buffer_nbytes(bench(free=free, cache_nbytes=cache)) == mib * 2**20


def test_block_flop_counts_projections_and_attention() -> None:
    assert workloads.block_flop(2, 8, 64) == 2 * 2 * 8 * 12 * 64**2 + 4 * 2 * 8**2 * 64


def test_names_are_understood_or_refused() -> None:
    assert dtype_names(["half", "torch.bfloat16", "fp16"]) == ("float16", "bfloat16")
    assert dtype_names("float32") == ("float32",)
    assert workload_names(None) == WORKLOADS
    with pytest.raises(UsageError, match="did you mean 'float16'"):
        dtype_names(["floot16"])
    with pytest.raises(UsageError, match="did you mean 'matmul'"):
        workload_names(["matmull"])


@pytest.mark.parametrize("bad", [(0,), (-1,), (True,), (1.5,), ()])
def test_sizes_are_whole_numbers_above_zero(bad: Any) -> None:
    with pytest.raises(UsageError, match="batch sizes"):
        sizes("batch sizes", bad)
