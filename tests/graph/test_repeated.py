"""Long tensors that repeat a few numbers: the same numbers whether their memory is mapped or copied, and given back."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anytorch.graph import repeated, verify
from anytorch.graph.ir import Builder, Graph

CPU = torch.device("cpu")


def _few(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(repeated.period(dtype)).remainder(1021).to(dtype)


def _mappings() -> int:
    return sum("memfd:anytorch" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture(params=["mapped", "copied"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "copied":
        monkeypatch.setattr(repeated, "_mapped", lambda block, times: None)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_numbers_come_again_and_again(how: str, dtype: torch.dtype) -> None:
    few = _few(dtype)
    count = 3 * few.numel() + 17
    made = repeated.repeated(few, count)
    assert made.dtype == dtype and made.shape == (count,)
    assert torch.equal(made, few.repeat(4)[:count])
    assert made.data_ptr() % 64 == 0


@pytest.mark.parametrize("blocks", [0.5, 1, 3.01])
def test_numbers_are_replaced(how: str, blocks: float) -> None:
    few = _few(torch.float32)
    made = repeated.repeated(few, int(blocks * few.numel()))
    for numbers in (few * 2 + 1, few * 2 + 1, -few):
        repeated.refill(made, numbers)
        assert torch.equal(made, numbers.repeat(4)[: made.numel()])


def test_other_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="few has 8 numbers, not"):
        repeated.repeated(torch.ones(8), 100)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux alone")
def test_the_memory_is_mapped_and_given_back_with_the_last_view() -> None:
    before = _mappings()
    made = repeated.repeated(_few(torch.float32), 5 * repeated.period(torch.float32))
    view = made[100:].view(-1)
    assert _mappings() == before + 5
    del made
    assert _mappings() == before + 5 and float(view[0]) == 100.0
    del view
    gc.collect()
    assert _mappings() == before


@pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux alone")
def test_what_cannot_be_mapped_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have so many mappings and no more."""
    libc, calls = repeated._libc(), []

    class Full:
        munmap = libc.munmap

        def mmap(self, *args: Any) -> Any:
            calls.append(args)
            return libc.mmap(*args) if len(calls) < 3 else libc.mmap(None, 0, 0, 0, -1, 0)  # of no bytes: EINVAL

    monkeypatch.setattr(repeated, "_libc", lambda: Full())
    before, files = _mappings(), len(list(Path("/proc/self/fd").iterdir()))
    few = _few(torch.float32)
    assert torch.equal(repeated.repeated(few, 3 * few.numel()), few.repeat(3))
    assert len(calls) == 3 and _mappings() == before and len(list(Path("/proc/self/fd").iterdir())) == files


@pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux alone")
@pytest.mark.parametrize("how", ["forbidden", "too long"])
def test_what_must_not_be_mapped_is_copied(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def forbidden(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    if how == "forbidden":
        monkeypatch.setattr(repeated.os, "memfd_create", forbidden)
    else:
        monkeypatch.setattr(repeated, "MOST_TIMES", 2)
    few = _few(torch.float32)
    before = _mappings()
    made = repeated.repeated(few, 3 * few.numel())
    assert _mappings() == before and torch.equal(made, few.repeat(3))


def _gated() -> Graph:
    b = Builder()
    x, gate, up = (b.input(shape, "float32") for shape in ((2, 600), (600, 900), (600, 900)))
    return b.graph([b.add("mul", b.add("silu", b.add("matmul", x, gate)), b.add("matmul", x, up))])


def test_long_inputs_share_memory_and_differ(how: str) -> None:
    graph = _gated()
    _, (x, gate, up) = next(verify.quick_examples(graph, {}, CPU))
    assert [tuple(one.shape) for one in (x, gate, up)] == [(2, 600), (600, 900), (600, 900)]
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    assert not torch.equal(gate, up) and all(one.is_contiguous() for one in (x, gate, up))
    rows = {tuple(row.tolist()) for row in gate[:, :8]}
    assert len(rows) == 600  # a row read in another's place shows


def test_a_digest_is_the_same_mapped_or_copied_and_sees_one_wrong_element(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _gated()

    def run(tensors: Any) -> list[torch.Tensor]:
        x, gate, up = tensors
        return [torch.nn.functional.silu(x @ gate) * (x @ up)]

    def damaged(tensors: Any) -> list[torch.Tensor]:
        (made,) = run(tensors)
        made.view(-1)[-1] += 1e-3
        return [made]

    def swapped(tensors: Any) -> list[torch.Tensor]:
        x, gate, up = tensors
        return run([x, up, gate])

    right = verify.digest(run, graph, {}, CPU)
    assert right == verify.digest(run, graph, {}, CPU)
    assert right not in (verify.digest(damaged, graph, {}, CPU), verify.digest(swapped, graph, {}, CPU))
    monkeypatch.setattr(repeated, "_mapped", lambda block, times: None)
    assert right == verify.digest(run, graph, {}, CPU)


def test_elsewhere_few_numbers_are_sent_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    b = Builder()
    wide, short = b.input((1024, 1024), "float32"), b.input((1024,), "float32")
    graph = b.graph([b.add("mul", wide, short)])
    drawn: list[int] = []
    plain = torch.randn

    def counted(*sizes: Any, **options: Any) -> torch.Tensor:
        made = plain(*sizes, **options)
        drawn.append(made.numel())
        return made

    monkeypatch.setattr(torch, "randn", counted)
    monkeypatch.setattr(verify, "_home_of_random_numbers", lambda device: CPU)
    _, found = next(verify.quick_examples(graph, {}, torch.device("meta")))
    assert [list(one.shape) for one in found] == [[1024, 1024], [1024]] and all(one.is_meta for one in found)
    assert drawn == [repeated.period(torch.float32), 1024]
