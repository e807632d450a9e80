"""A model over several cards: the plan as pure data, and a real pass on the compiled device with two of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory import fit
from anytorch.memory.spread import Card, plan_spread

CARDS = [torch.device("cuda", number) for number in range(3)]


def plan(sizes: list[int], budgets: list[int], kept: int = 0) -> list[int]:
    names = [f"b{number}" for number in range(len(sizes))]
    cards = [Card(card, budget) for card, budget in zip(CARDS, budgets, strict=False)]
    made = plan_spread([(n, (n,)) for n in names], dict(zip(names, sizes, strict=True)), cards, kept)
    for number, card in enumerate(cards):
        there = sum(size for name, size in zip(names, sizes, strict=True) if made.blocks[name] == number)
        assert made.nbytes[number] == there + (kept if number == 0 else 0) <= card.budget
    return [made.blocks[name] for name in names]


def test_consecutive_blocks_by_the_budgets() -> None:
    assert plan([10] * 6, [100, 100, 100]) == [0, 0, 1, 1, 2, 2]
    assert plan([10] * 6, [80, 40]) == [0, 0, 0, 0, 1, 1]
    assert plan([10] * 4, [20, 20]) == [0, 0, 1, 1]
    assert plan([10] * 6, [100, 30, 30], kept=70) == [0, 0, 1, 1, 2, 2]
    assert plan([30, 10, 10, 10], [30, 30]) == [0, 1, 1, 1]
    assert plan([5], [100, 100]) == [0]


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(BudgetTooSmall, match="2 cards") as told:
        plan([10] * 6, [20, 20])
    assert "20 bytes" in str(told.value.hint)
    with pytest.raises(BudgetTooSmall, match="'b2' needs"):
        plan([6, 6, 6], [9, 9])


def test_blocks_that_share_a_weight_are_on_one_card() -> None:
    cards = [Card(card, 100) for card in CARDS[:2]]
    units = [("embed", ("tied",)), ("a", ("a",)), ("b", ("b",)), ("head", ("tied",))]
    made = plan_spread(units, {"tied": 10, "a": 40, "b": 40}, cards)
    assert made.blocks["tied"] == 0 and made.blocks["b"] == 1
    assert "cuda:1" in made.explain()


def test_arguments_that_cannot_work() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(UsageError, match="named twice"):
        fit(model, devices=["cpu", "cpu"])
    with pytest.raises(UsageError, match="names no card"):
        fit(model, devices=[])
    with pytest.raises(UsageError, match="2 budgets for 1 card"):
        fit(model, devices=["cpu"], device_budget=["1MB", "1MB"])
    with pytest.raises(UsageError, match="device_budget is a list, but only one card is used"):
        fit(model, "cpu", device_budget=["1MB"])


def test_a_model_that_no_card_holds_computes_and_trains_on_two(npu_extension: Any) -> None:
    """128 MiB of weights on two cards of 120, the last trained: the CPU's answers and weights, and everything back."""
    answers = npu_extension.run(
        """
        from torch import nn
        from anytorch.memory import fit, fitted, unfit

        def error(call):
            try:
                call()
            except Exception as exc:
                return str(exc)
            return ""

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024, bias=False)
                self.register_buffer("scale", torch.full((1,), 0.5))
            def forward(self, x, mask=None):
                return x + self.scale * self.down(torch.relu(self.up(x * mask)))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks, self.norm = nn.ModuleList(Block() for _ in range(8)), nn.LayerNorm(1024)
            def forward(self, x):
                mask = torch.ones_like(x)
                for block in self.blocks:
                    x = block(x, mask=mask)
                return {"out": self.norm(x)}

        def train(model, x, steps=2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                loss = model(x)["out"].square().mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
            return loss.item()

        torch.manual_seed(0)
        model, x = Model(), torch.randn(4, 1024)
        for block in model.blocks[:7]:
            block.requires_grad_(False)
        import copy
        twin = copy.deepcopy(model)
        whole = sum(p.nbytes for p in model.parameters())
        alone = error(lambda: copy.deepcopy(model).to("npu:0"))
        npu.empty_cache()
        fit(model, devices=["npu:0", "npu:1"], device_budget="80MiB")
        places = [str(block.up.weight.device) for block in model.blocks]
        out = model(x)["out"].detach()
        close = torch.allclose(out, twin(x)["out"], atol=1e-5)
        moved = error(lambda: model.to("cpu"))
        losses = [train(model, x), train(twin, x)]
        explained = fitted(model).explain()
        unfit(model)
        same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), twin.parameters()))
        answer(whole=whole, alone=alone, places=places, back=str(out.device), close=close, moved=moved, losses=losses,
               same=same, homes=sorted({str(p.device) for p in model.parameters()}), explained=explained,
               plain="forward" not in vars(model), buffer=str(model.blocks[3].scale.device))
        """,
        capacity=120 << 20,
    )
    assert answers["whole"] > 128 << 20 and "out of memory" in answers["alone"]
    assert answers["places"] == ["npu:0"] * 4 + ["npu:1"] * 4
    assert answers["back"] == "cpu" and answers["close"] and "cannot be moved" in answers["moved"]
    assert answers["losses"][0] == pytest.approx(answers["losses"][1], abs=1e-5)
    assert answers["same"] and answers["homes"] == ["cpu"] and answers["plain"] and answers["buffer"] == "cpu"
    assert "npu:1" in answers["explained"]
