"""Steps that choose their own tokens: those that logits would give, and rows as they should be whenever it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anytorch.text.decoders import Decoder, RecordedSteps
from anytorch.text.decoders.choosing import Choice, Points, chosen
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent.ahead import AheadSteps

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
PROMPTS = ([5, 9, 11], [7], [1, 2, 3, 4, 5, 6])


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(2)
    made = Decoder(read_spec(SMALL, "a config.json")).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.4)
    return made


def begun(steps: RecordedSteps) -> list[int]:
    """All rows have read their prompts and follow with what was most likely."""
    first = [int(steps.read(row, ids).argmax()) for row, ids in enumerate(PROMPTS)]
    for row, token in enumerate(first):
        steps.follow(row, token)
    return first


def test_tokens_are_those_of_generate(decoder: Decoder) -> None:
    wanted = RecordedSteps(decoder, 3, 40).generate(PROMPTS, 12)
    steps = AheadSteps(decoder, 3, 40)
    first = begun(steps)
    made = [next(flow) for flow in [steps.tokens(range(3), [Choice()] * 3)] for _ in range(11)]
    found = [[token, *(one[row] for one in made)] for row, token in enumerate(first)]
    assert found == wanted


def test_rows_can_be_left_and_taken_up_at_any_token(decoder: Decoder) -> None:
    """One row waits while others go on, and then all do; nothing of what was computed too far remains."""
    wanted = RecordedSteps(decoder, 3, 40).generate(PROMPTS, 20)
    steps = AheadSteps(decoder, 3, 40)
    texts = [[token] for token in begun(steps)]
    steps.cut(1, 1)
    for rows, count in (([0, 2], 3), ([0, 1, 2], 4), ([1], 6), ([0, 1, 2], 2)):
        for row in rows:
            if steps.lengths[row] < len(PROMPTS[row]) + len(texts[row]):
                steps.follow(row, texts[row][-1])
        flow = steps.tokens(rows, [Choice()] * len(rows))
        for _ in range(count):
            for row, token in zip(rows, next(flow), strict=True):
                texts[row].append(token)
        flow.close()
        for row in rows:
            assert steps.lengths[row] == len(PROMPTS[row]) + len(texts[row]) - 1
    assert texts == [want[: len(text)] for want, text in zip(wanted, texts, strict=True)]


def test_it_ends_where_a_row_is_full_and_where_no_more_is_wanted(decoder: Decoder) -> None:
    steps = AheadSteps(decoder, 3, 12)
    begun(steps)
    assert len(list(steps.tokens(range(3), [Choice()] * 3))) == 6  # the longest has 7 of 12
    assert steps.lengths == [9, 7, 12]
    begun(steps)
    assert len(list(steps.tokens(range(3), [Choice(most=9), Choice(most=4), Choice()]))) == 4
    assert steps.lengths == [7, 5, 10]


def test_chance_decides_by_numbers_that_are_used_up_by_whoever_takes_the_token(decoder: Decoder) -> None:
    def points(row: int) -> Points:
        return Points(torch.Generator().manual_seed(row))

    plain = RecordedSteps(decoder, 3, 40)
    tokens, every, wanted = begun(plain), [points(row) for row in range(3)], []
    for _ in range(8):
        point = torch.tensor([one.take() for one in every], dtype=torch.float64)
        heat, among, share = torch.tensor([0.8, 1.5, 0.0]), torch.tensor([9, 0, 0]), torch.tensor([0.9, 1.0, 1.0])
        tokens = chosen(plain.step()[:3], 61, heat, among, share.double(), point).tolist()
        wanted.append(tokens)
        for row, token in enumerate(tokens):
            plain.follow(row, token)
    steps, every = AheadSteps(decoder, 3, 40), [points(row) for row in range(3)]
    begun(steps)
    choices = [Choice(0.8, 9, 0.9, every[0].ahead), Choice(1.5, points=every[1].ahead), Choice()]
    found = []
    for made in steps.tokens(range(3), choices):
        found.append(made)
        for one in every:
            one.take()
        if len(found) == 8:
            break
    assert found == wanted and len({tuple(one) for one in found}) > 4


def test_a_model_that_computes_no_numbers_is_said(decoder: Decoder) -> None:
    steps = AheadSteps(decoder, 3, 40)
    begun(steps)
    decoder.lm_head.weight.data[3, 0] = torch.nan
    with pytest.raises(ArithmeticError, match="NaN or infinity"):
        next(steps.tokens([0, 1], [Choice(), Choice()]))
    decoder.lm_head.weight.data[3, 0] = 0
    steps.cut(0, 3)
    steps.follow(0, 7)
    assert len(next(steps.tokens([0], [Choice()]))) == 1
