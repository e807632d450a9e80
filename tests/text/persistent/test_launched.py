"""A text that is alone, in launches of a bounded length: a stand-in for the GPU's kernel says what each was asked for."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any

import pytest
import torch

from anytorch.text.decoders import Decoder
from anytorch.text.decoders.choosing import Choice
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent.ahead import AheadSteps
from anytorch.text.persistent.launched import LaunchedSteps, portion_of, rows_for

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Launches:
    """Gives 100 + place after the token at `place`, as long as it was given the one before."""

    def __init__(self, positions: int) -> None:
        self.positions, self.asked, self.open = positions, list[tuple[int, int]](), 0

    def launched(
        self, row: int, token: int, place: int, tokens: int, ends: Collection[int]
    ) -> Generator[int, None, None]:
        assert row == 1 and (token == 9 or token == 100 + place - 1)
        self.asked.append((place, tokens))
        self.open += 1
        try:
            for at in range(place, min(place + tokens, self.positions)):
                yield 100 + at
                if 100 + at in ends:
                    return
        finally:
            self.open -= 1


@pytest.fixture
def steps() -> LaunchedSteps:
    torch.manual_seed(0)
    made = LaunchedSteps.__new__(LaunchedSteps)
    AheadSteps.__init__(made, Decoder(read_spec(SMALL, "a config.json")).requires_grad_(False), 2, 40)
    made.launch, made.portion = Launches(40), 8  # type: ignore[assignment]
    made.read(1, [3, 4, 5])
    made.follow(1, 9)
    return made


def test_a_long_text_is_several_launches_one_after_the_other(steps: LaunchedSteps) -> None:
    found = [one for (one,) in steps.tokens([1], [Choice(most=20)])]
    assert found == [103 + at for at in range(20)] and steps.lengths == [0, 23]
    assert steps.launch.asked == [(3, 8), (11, 8), (19, 4)]  # type: ignore[attr-defined]


def test_it_ends_at_an_end_in_a_full_row_and_when_it_is_closed(steps: LaunchedSteps) -> None:
    for end, count in ((110, 8), (111, 9)):  # a launch's last token, and the next one's first
        steps.cut(1, 3)
        steps.follow(1, 9)
        assert len(list(steps.tokens([1], [Choice(ends=(end,))]))) == count
    steps.cut(1, 3)
    steps.follow(1, 9)
    assert len(list(steps.tokens([1], [Choice()]))) == 37 and steps.lengths == [0, 40]
    steps.cut(1, 3)
    steps.follow(1, 9)
    flow = steps.tokens([1], [Choice()])
    assert [next(flow) for _ in range(10)][-1] == [112] and steps.launch.open == 1  # type: ignore[attr-defined]
    flow.close()
    assert steps.launch.open == 0 and steps.lengths == [0, 13]  # type: ignore[attr-defined]


def test_others_are_not_launched(steps: LaunchedSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AheadSteps, "tokens", lambda self, rows, choices: iter([list(rows)]))
    assert list(steps.tokens([1], [Choice(0.7)])) == [[1]]  # by chance
    assert list(steps.tokens([0, 1], [Choice(), Choice()])) == [[0, 1]]
    assert not steps.launch.asked  # type: ignore[attr-defined]


def test_how_long_a_launch_is() -> None:
    assert portion_of(1_190_000_000) == 252 and portion_of(15_100_000_000) == 20 and portion_of(10**12) == 8


def test_devices_without_our_kernels_get_torchs_steps() -> None:
    rows, why = rows_for(Decoder(read_spec(SMALL, "a config.json")), 1, 8)
    assert not isinstance(rows, AheadSteps) and why.startswith("not by our own kernels: there is no Triton for cpu")
