"""Counters of programs that share a tile: who has which, without a device: the CPU stands in for one that records."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from anytorch.graph import clock
from anytorch.graph.back import tickets

CPU = torch.device("cpu")


class Streams:
    """torch.cuda as far as counters ask it: the current stream, and whether it records."""

    def __init__(self) -> None:
        self.current, self.records = 7, False

    def is_current_stream_capturing(self) -> bool:
        return self.records

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(cuda_stream=self.current, synchronize=lambda: None)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(tickets, "_records", lambda device: True)
    for name in ("_blocks", "_kept"):
        monkeypatch.setattr(tickets, name, type(getattr(tickets, name))())
    for name in ("is_current_stream_capturing", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def _addresses(taken: torch.Tensor) -> set[int]:
    return {taken.data_ptr() + 4 * place for place in range(taken.numel())}


def test_launches_of_one_stream_share_and_of_another_do_not(streams: Streams) -> None:
    first, second = tickets.take(CPU, 10), tickets.take(CPU, 20)
    assert first.data_ptr() == second.data_ptr() and second.numel() >= 20
    streams.current = 8
    assert tickets.take(CPU, 10).data_ptr() != first.data_ptr()
    assert not int(first.abs().sum())


def test_a_recorded_launch_has_counters_of_its_own(streams: Streams) -> None:
    shared = tickets.take(CPU, 10)
    streams.records = True
    recorded = [tickets.take(CPU, 10) for _ in range(3)]
    every = [_addresses(one) for one in (shared, *recorded)]
    assert sum(map(len, every)) == len(set.union(*every))
    assert all(one.numel() == 10 and not int(one.abs().sum()) for one in recorded)


def test_counters_of_recordings_stay_when_new_ones_are_made(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording holds addresses alone: were the block freed, another tensor's numbers would count its programs."""
    blocks: list[weakref.ref[torch.Tensor]] = []
    zeros = torch.zeros

    def watched(count: int, **options: Any) -> torch.Tensor:
        made = zeros(count, **options)
        if count == tickets.BLOCK:
            blocks.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "zeros", watched)
    tickets.take(CPU, 1)
    streams.records = True
    recorded = tickets.take(CPU, tickets.BLOCK // 2 + 1)
    address = recorded.data_ptr()
    del recorded
    streams.records = False
    tickets.take(CPU, 1)  # more than half is given away: the next recordings get a new block
    streams.records = True
    later = tickets.take(CPU, 10)
    gc.collect()
    first, second = (one() for one in blocks)
    assert first is not None and first.data_ptr() == address
    assert second is not None and _addresses(later) <= _addresses(second)


def test_what_is_recorded_to_be_timed_borrows(streams: Streams) -> None:
    tickets.take(CPU, 1)
    with tickets.borrowed(CPU) as block:
        streams.records = True
        lent = [tickets.take(CPU, 10) for _ in range(2)]
        rest = tickets.take(CPU, tickets.BLOCK)  # more than there are: zeros that the recording itself sets
        streams.records = False
    assert _addresses(lent[0]) | _addresses(lent[1]) <= _addresses(block) and not _addresses(lent[0]) & _addresses(
        lent[1]
    )
    assert rest.numel() == tickets.BLOCK and not _addresses(rest) & _addresses(block)
    assert (
        tickets._blocks[CPU, tickets.RECORDED][1] == 0 and len(tickets._kept) == 1
    )  # none of those that stay for good
    streams.records = True
    assert not _addresses(tickets.take(CPU, 10)) & _addresses(block)


@pytest.fixture
def records_otherwise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device as XPU: it records, but not CUDA graphs (the CPU's module of torch has no CUDAGraph either)."""
    backend = SimpleNamespace(caps=lambda index: SimpleNamespace(graphs=True))
    for module in (tickets, clock):
        monkeypatch.setattr(module, "locate", lambda device: (backend, 0))
    monkeypatch.setattr(tickets, "_blocks", {})

    def absent(*args: Any) -> NoReturn:
        raise AssertionError("CUDA is asked about another device's streams")

    for name in ("is_current_stream_capturing", "current_stream", "CUDAGraph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, absent)
    tickets._records.cache_clear()
    yield
    tickets._records.cache_clear()


def test_a_device_that_records_otherwise_shares_its_counters_in_order(records_otherwise: None) -> None:
    first, second = tickets.take(CPU, 10), tickets.take(CPU, 20)
    assert first.data_ptr() == second.data_ptr() and not int(first.abs().sum())
    more = tickets.take(CPU, 5000)
    assert more.numel() >= 5000 and tickets.take(CPU, 10).data_ptr() == more.data_ptr()


def test_a_device_that_records_otherwise_is_timed_launch_by_launch(records_otherwise: None) -> None:
    watch = clock.Clock(CPU)

    def run() -> None:
        return None

    assert watch.timed([run, run]) is run and watch.stopwatch is watch.plain
    inputs = [torch.ones(2)]
    assert len(watch.copies(inputs)) == 1
