"""Recorded steps: the tokens of the plain decoder, in rows that go on independently, whatever the context's length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anytorch.errors import InputError
from anytorch.text.decoders import Decoder, RecordedSteps, model
from anytorch.text.decoders.spec import read_spec

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 200,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}


def _decoder(name: str = "qwen3") -> Decoder:
    torch.manual_seed(2)
    decoder = Decoder(read_spec({**SMALL, **FAMILIES[name]}, "a config.json")).eval()
    for parameter in decoder.parameters():
        parameter.data.normal_(0, 0.3)
    return decoder.requires_grad_(False)


def _greedy(decoder: Decoder, ids: list[int], count: int) -> list[int]:
    """By the whole text anew for every token."""
    text = list(ids)
    for _ in range(count):
        text.append(int(decoder([text])[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_the_plain_decoders(name: str) -> None:
    """Beyond the first recording's 64 places, so that a second one takes over."""
    decoder = _decoder(name)
    prompts = [[3, 1, 4, 1, 5], [9, 2], list(range(40))]
    steps = RecordedSteps(decoder, rows=3, positions=120)
    assert steps.generate(prompts, 50) == [_greedy(decoder, ids, 50) for ids in prompts]
    assert steps.generate([prompts[1]], 4) == [_greedy(decoder, prompts[1], 4)], "rows are used again"


def test_rows_join_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PORTION", 3)  # a prompt in several parts
    decoder = _decoder()
    steps = RecordedSteps(decoder, rows=2, positions=64)
    first, second = [7, 8, 9, 10, 11], [20, 21]
    wanted = {0: _greedy(decoder, first, 6), 1: _greedy(decoder, second, 3)}
    made: dict[int, list[int]] = {0: [int(steps.read(0, first).argmax())], 1: []}
    for turn in range(5):
        if turn == 2:
            made[1].append(int(steps.read(1, second).argmax()))
        for row in (0, 1) if turn >= 2 else (0,):
            steps.follow(row, made[row][-1])
        logits = steps.step()
        for row in (0, 1) if turn >= 2 else (0,):
            made[row].append(int(logits[row].argmax()))
    assert made[0] == wanted[0] and made[1][:3] == wanted[1]


def test_steps_of_others_leave_a_row_that_waits_as_it_is() -> None:
    decoder = _decoder()
    steps = RecordedSteps(decoder, rows=2, positions=64)
    wanted = _greedy(decoder, [20, 21, 22], 4)
    token = int(steps.read(1, [20, 21, 22]).argmax())
    steps.read(0, [7, 8])
    before = steps.kept.keys[:, 1, :, :3].clone()
    for other in (3, 4, 5):
        steps.follow(0, other)
        steps.step()
    assert torch.equal(steps.kept.keys[:, 1, :, :3], before)
    made = [token]
    for _ in range(3):
        steps.follow(1, made[-1])
        made.append(int(steps.step()[1].argmax()))
    assert made == wanted


def test_texts_end_at_an_end_at_the_limit_and_when_a_row_is_full() -> None:
    decoder = _decoder()
    plain = _greedy(decoder, [5], 12)
    end = plain[4]
    steps = RecordedSteps(decoder, positions=10)
    assert steps.generate([[5]], 8, ends={end}) == [plain[: plain.index(end)]]
    assert steps.generate([[5]], 3) == [plain[:3]]
    assert steps.generate([[5]], 99) == [plain[:10]], "nine more that are kept, and one that follows them"


def test_work_is_recorded_at_the_second_step_of_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that records; a fake one here."""
    decoder = _decoder()
    steps = RecordedSteps(decoder, rows=5, positions=128)
    asked: list[tuple[int, int]] = []

    def run(shape: tuple[int, int], work: Any) -> torch.Tensor:
        asked.append(shape)
        first = work()
        torch.testing.assert_close(work(), first)  # as warming up and replaying do: it may be run again
        return first

    monkeypatch.setattr(steps._recorder, "run", run)
    assert steps.generate([[1, 2]], 80) == [_greedy(decoder, [1, 2], 80)]
    assert sorted(set(asked)) == [(1, 64), (1, 128)]


def test_what_does_not_fit_is_refused() -> None:
    steps = RecordedSteps(_decoder(), rows=1, positions=8)
    for ids, said in (([], "0 tokens"), ([1] * 9, "9 tokens")):
        with pytest.raises(InputError, match=said):
            steps.read(0, ids)
    with pytest.raises(InputError, match="row 1 is not one of 1"):
        steps.read(1, [2])
    with pytest.raises(InputError, match="2 prompts: there is room for 1"):
        steps.generate([[1], [2]], 3)
    steps.read(0, [1] * 8)
    with pytest.raises(InputError, match="row 0 is full"):
        steps.follow(0, 3)
    assert "Graph" in steps.recorded or steps.recorded == ""


def test_only_rows_up_to_the_last_text_are_computed() -> None:
    steps = RecordedSteps(_decoder(), rows=5, positions=64)
    shapes = []
    for row in range(5):
        steps.read(row, [1, 2])
        steps.follow(row, 3)
        shapes.append(steps.step().shape[0])
    assert shapes == [1, 2, 4, 4, 5]
    for row in (4, 3, 2):
        steps.cut(row)
    steps.follow(0, 4)
    assert steps.step().shape[0] == 2
