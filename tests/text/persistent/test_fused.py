"""Recorded steps of our own kernels: torch's logits in Triton's interpreter, and torch's steps where ours fail."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from anytorch.text.decoders import Decoder, RecordedSteps
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent import fused
from anytorch.text.persistent.joined import joined, joined_biases

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 400,
}

# Triton's interpreter makes a loop's bound an int by int(array), which NumPy 2.4 allows only without dimensions.
SCRIPT = """
from triton.runtime import interpreter
patch = interpreter._patch_lang_tensor
def with_index(tensor, *more):
    patch(tensor, *more)
    tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
interpreter._patch_lang_tensor = with_index

import torch
from anytorch.text.decoders import Decoder, RecordedSteps
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent import fused
torch.set_num_threads(1)

SMALL = {"vocab_size": 61, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 400, "head_dim": 32}
FAMILIES = {
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 9},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "num_attention_heads": 6},
}

def decoder_of(name):
    torch.manual_seed(2)
    made = Decoder(read_spec({**SMALL, **FAMILIES[name]}, "a config.json")).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return made.to(torch.float16)

def difference(name, lengths, positions=64, count=3):
    decoder = decoder_of(name)
    theirs, ours = RecordedSteps(decoder, len(lengths), positions), fused.FusedSteps(decoder, len(lengths), positions)
    worst = 0.0
    for row, length in enumerate(lengths):
        for steps in (theirs, ours):
            steps.read(row, [(3 * i + row) % 61 for i in range(length)])
    for turn in range(count):
        for steps in (theirs, ours):
            for row in range(len(lengths)):
                steps.follow(row, (7 * turn + row) % 61)
        wanted, found = theirs.step().float(), ours.step().float()
        worst = max(worst, float((wanted - found).abs().max() / wanted.std()))
    pairs = ((theirs.kept.keys, ours.kept.keys), (theirs.kept.values, ours.kept.values))
    kept = max(float((one - other).abs().max()) for one, other in pairs)
    return worst, kept

found = {}
for name in FAMILIES:
    found[name + ", one text"] = difference(name, [12])
    found[name + ", three texts"] = difference(name, [1, 12, 5])
found["a long context in parts"] = difference("qwen3", [150], positions=400, count=1)
whole = fused.cut_for
fused.cut_for = lambda *given, **more: fused.Cut(16, 16, 1, 1, splits=2)
found["sums in parts"] = difference("llama with biases", [3, 4], count=1)
fused.cut_for = whole
fused.MOST_ROWS = 1
found["many texts by torch's products"] = difference("qwen3", [3, 4], count=1)
answer(found=found)
"""


def test_the_kernels_give_torchs_logits(
    run_script: Callable[..., Any], missing: Callable[[str, str], NoReturn]
) -> None:
    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    found = run_script(SCRIPT, {"TRITON_INTERPRET": "1"}, warm=True)["found"]
    assert len(found) == 9
    for name, (logits, kept) in found.items():
        assert logits < 0.05 and kept < 0.02, f"{name}: logits differ by {logits} of their spread, keys by {kept}"


@pytest.mark.parametrize(
    ("rows", "columns", "width"), [(1, 1024, 2048), (1, 12288, 4096), (16, 1024, 3072), (3, 151_936, 64)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_every_column_is_summed_by_somebody(rows: int, columns: int, width: int, gated: bool) -> None:
    cut = fused.cut_for(rows, columns, width, 132, normed=gated, gated=gated)
    assert cut.dot == (rows > fused.FEW)
    assert cut.block_n & (cut.block_n - 1) == 0 and cut.block_k & (cut.block_k - 1) == 0
    share = -(-width // (cut.splits * cut.block_k)) * cut.block_k
    assert share * cut.splits >= width > share * (cut.splits - 1)


def _decoder(**more: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(read_spec({**SMALL, "model_type": "llama", **more}, "a config.json")).eval().requires_grad_(False)


def test_torchs_steps_where_there_is_no_triton() -> None:
    steps, why = fused.steps_for(_decoder(), 2, 16)
    assert type(steps) is RecordedSteps and steps.rows == 2 and "no Triton for cpu" in why


@pytest.mark.parametrize("trouble", ["fails", "is wrong"])
def test_kernels_that_fail_or_are_wrong_are_not_used(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Troubled(RecordedSteps):
        def step(self) -> torch.Tensor:
            if trouble == "fails":
                raise RuntimeError("no such instruction\nmore")
            return super().step() * 1.5

    monkeypatch.setattr(fused, "refusal", lambda *given: "")
    monkeypatch.setattr(fused, "FusedSteps", Troubled)
    monkeypatch.setattr(fused, "_why_not", {})
    decoder = _decoder()
    for _ in range(2):
        steps, why = fused.steps_for(decoder, 1, 16)
        assert type(steps) is RecordedSteps
        assert ("no such instruction" if trouble == "fails" else "differ by 0.5 of their size") in why
    assert caplog.text.count("not our kernels") == 1


def test_kernels_that_agree_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours(RecordedSteps):
        pass

    monkeypatch.setattr(fused, "refusal", lambda *given: "")
    monkeypatch.setattr(fused, "FusedSteps", Ours)
    monkeypatch.setattr(fused, "_why_not", {})
    steps, why = fused.steps_for(_decoder(), 3, 16)
    assert type(steps) is Ours and not why and steps.positions == 16


@pytest.mark.parametrize(
    ("more", "dtype", "said"),
    [
        ({}, torch.float32, "bfloat16 and float16"),
        ({"head_dim": 24}, torch.bfloat16, "heads of 32, 64, 128, 256, not of 24"),
        ({"num_attention_heads": 34, "head_dim": 32}, torch.bfloat16, "at most 16 query heads"),
        ({"head_dim": 64}, torch.float16, ""),
    ],
)
def test_what_they_do_not_compute_is_named(
    more: dict[str, Any], dtype: torch.dtype, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Backend:
        @staticmethod
        def caps(index: int) -> Any:
            return type("Caps", (), {"triton": True})

    monkeypatch.setattr(fused, "locate", lambda device: (Backend, 0))
    why = fused.refusal(_decoder(**more).spec, dtype, torch.device("cpu"))
    assert said in why and bool(said) == bool(why)


@pytest.mark.parametrize("in_turns", [False, True])
def test_joined_weights_are_the_layers_own_and_move_once(in_turns: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 6) for _ in range(3)] if in_turns else [nn.Linear(8, size) for size in (6, 2, 4)]
    x = torch.randn(5, 8)
    wanted = [layer(x) for layer in layers]
    whole = joined(layers, in_turns=in_turns)
    biases = joined_biases(layers, in_turns=in_turns)
    made = x @ whole.T + biases
    parts = made.unflatten(1, (-1, 3)).unbind(2) if in_turns else made.split([6, 2, 4], 1)
    for layer, part, one in zip(layers, parts, wanted, strict=True):
        torch.testing.assert_close(part, one)
        torch.testing.assert_close(layer(x), one)
    again = joined(layers, in_turns=in_turns)
    assert again.data_ptr() == whole.data_ptr() and torch.equal(again, whole)
    layers[0].weight.data.fill_(2)
    assert float(whole[0, 0]) == 2


def test_layers_without_biases_have_none() -> None:
    assert joined_biases([nn.Linear(4, 4, bias=False)]) is None
