"""The scratch that packed blocks are unpacked to: one holder at a time, given back from any thread, in order on a device."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from anytorch.memory import formats
from anytorch.memory.formats import UnpackScratch, pack_block, packing_of, unpack_block
from anytorch.memory.images import packed, views_of
from anytorch.memory.units import Found, find_units


class FakeCopies:
    """A device whose streams need telling what to wait for."""

    def __init__(self) -> None:
        self.events = 0
        self.waited: list[Any] = []

    def computed(self) -> str:
        self.events += 1
        return f"event {self.events}"

    def compute_after(self, event: Any) -> None:
        self.waited.append(event)


@pytest.fixture
def found() -> Found:
    torch.manual_seed(0)
    return find_units(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))))


@pytest.fixture
def copies() -> FakeCopies:
    return FakeCopies()


@pytest.fixture
def scratch(found: Found, copies: FakeCopies) -> UnpackScratch:
    packings = {name: packing for name in found.groups if (packing := packing_of(found, name, "int8"))}
    nbytes = max(packing.live.nbytes for packing in packings.values())
    return UnpackScratch(torch.zeros(nbytes, dtype=torch.uint8), packings, found.units, copies)  # type: ignore[arg-type]


def stored(found: Found, scratch: UnpackScratch, name: str) -> tuple[Any, torch.Tensor]:
    """A block as it comes into the ring: its image and a buffer with it."""
    group = found.groups[name]
    tensors = pack_block(scratch._packings[name], dict(zip(group.paths, group.parameters, strict=True)))
    image = packed(name, tensors)
    buffer = torch.zeros(image.nbytes, dtype=torch.uint8)
    for key, view in views_of(image, buffer).items():
        view.copy_(tensors[key])
    return image, buffer


def test_others_wait_until_it_was_given_back_as_often_as_it_was_taken(
    scratch: UnpackScratch, copies: FakeCopies
) -> None:
    scratch.take()
    scratch.take()
    got = threading.Event()

    def other() -> None:
        scratch.take()
        got.set()
        scratch.give_back()

    thread = threading.Thread(target=other)
    thread.start()
    scratch.give_back()
    assert not got.wait(0.05)
    threading.Thread(target=scratch.give_back).start()  # as a backward's end is told elsewhere
    assert got.wait(120)
    thread.join()
    assert copies.waited[-1] == "event 1", "the next holder's work is queued behind the last one's"
    scratch.take()
    assert copies.waited[-1] == "event 2"


def test_a_block_is_unpacked_again_when_the_ring_fetched_it_again(
    scratch: UnpackScratch, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = found.units
    scratch.take()
    image, buffer = stored(found, scratch, first.name)
    assert not scratch.has(first.name, first.name, buffer)
    scratch.unpack(first.name, first.name, image, buffer)
    assert scratch.has(first.name, first.name, buffer) and not scratch.has(second.name, first.name, buffer)
    weight = scratch.views(first.name, first.name)["0.0.weight"]
    assert float((weight - found.groups[first.name].parameters[0].detach()).norm() / weight.norm()) < 0.01
    assert (
        scratch.offset(weight) == weight.data_ptr() - scratch.memory.data_ptr()
        and scratch.offset(torch.ones(1)) is None
    )
    assert not scratch.has(first.name, first.name, buffer[:]), "the same place, and perhaps other values"
    scratch.unpack(second.name, second.name, *stored(found, scratch, second.name))
    assert not scratch.has(first.name, first.name, buffer), "another step's weights lie over them"
    scratch.unpack(first.name, first.name, image, buffer)

    def fails(*given: Any) -> None:
        unpack_block(*given)
        raise MemoryError("half-way")

    monkeypatch.setattr(formats, "unpack_block", fails)
    with pytest.raises(MemoryError):
        scratch.unpack(first.name, first.name, image, buffer)
    assert not scratch.has(first.name, first.name, buffer)
