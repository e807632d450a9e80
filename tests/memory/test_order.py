"""What comes next is what came next the last time, for each way a step is used."""

from __future__ import annotations

import copy
from typing import Any

import torch

import anytorch
from anytorch.memory.ring import AGAIN, BACKWARD, FORWARD, TRAINING, UseOrder
from anytorch.memory.training import TieredOptimizer
from anytorch.memory.types import Speeds

STEPS = ["a", "b", "c"]


def ahead(order: UseOrder) -> list[str]:
    return [step for _, step in order.ahead()]


def test_nothing_seen_yet() -> None:
    order = UseOrder(STEPS)
    assert ahead(order) == [] and not order.at("a")
    order.follow("b", FORWARD)
    assert order.at("b") and ahead(order) == ["c", "a"]
    order.follow("b", BACKWARD)
    assert ahead(order)[0] == "a"


def test_a_training_loop_is_followed_from_its_second_round_on() -> None:
    order = UseOrder(STEPS)
    uses = [(step, TRAINING) for step in STEPS]
    for step in reversed(STEPS):
        uses += [(step, AGAIN), (step, BACKWARD)]
    for step, way in uses * 2:
        order.follow(step, way)
    for number, (step, way) in enumerate(uses):
        order.follow(step, way)
        rest = [name for name, _ in uses[number + 1 :] + uses[:number]]
        assert ahead(order) == rest
        assert [distance for distance, _ in order.ahead()] == list(range(1, len(uses)))


def test_a_branch_taken_now_and_then_never_ends_in_a_loop() -> None:
    order = UseOrder(STEPS)
    for step in "abacabbcabcaa":
        order.follow(step, FORWARD)
        assert len(ahead(order)) <= 4 * len(STEPS)


def test_no_block_is_fetched_twice_where_the_ring_still_has_it(models: Any, given: dict[str, Any]) -> None:
    """Six streamed blocks, a ring of two: six fetches up, and four down, because the last two are still there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[models.Layer(64) for _ in range(6)]).train()
    plain = copy.deepcopy(model)
    layer = sum(p.nbytes for p in model[0].parameters())
    anytorch.memory.fit(
        model, "cpu", device_budget=round(2.3 * layer), host_budget=30 * layer, host_reserve=4 * layer,
        speeds=Speeds(10.0, 2.0), disk=given["disk"],
    )  # fmt: skip
    handle = anytorch.memory.fitted(model)
    assert set(handle.plan.homes.values()) == {"host"} and handle.plan.ring_nbytes < 3 * layer
    optimizer = TieredOptimizer(model, torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(3, 64)
    counts = []
    for _ in range(4):
        before = handle.mover.stats.fetched
        for network, updated in ((model, optimizer), (plain, reference)):
            loss = network(x).square().mean()
            loss.backward()
            updated.step()
            updated.zero_grad()
        counts.append(handle.mover.stats.fetched - before)
    assert counts[2:] == [10, 10]
    assert handle.mover.stats.dropped_unused <= 6  # before it was known that backward follows
    optimizer.close()
    anytorch.memory.unfit(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
