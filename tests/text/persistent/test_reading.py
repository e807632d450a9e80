"""What the CPU's kernel computes besides one token after another: prompts, guesses, draws, and a trace of its workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.text.persistent.test_host import FAMILIES, SMALL, _decoder, _greedy

from anytorch.errors import InputError, UsageError
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.choosing import Points
from anytorch.text.decoders.spec import read_spec
from anytorch.text.generate.sampling import Sampling, next_token
from anytorch.text.persistent.guesses import History, Lookup, generate
from anytorch.text.persistent.host import HostKernel, load_packed_decoder
from anytorch.text.persistent.host_code import Draw
from anytorch.text.persistent.kernel import PersistentKernel
from anytorch.text.persistent.panels import unpacked
from anytorch.text.persistent.traces import spans

LONG = torch.randint(0, 67, (150,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_logit_of_a_prompt_is_the_plain_decoders(name: str, threads: int) -> None:
    """More tokens than are read at once, in the second of two rows, and once more onward."""
    decoder = _decoder(name)
    kernel = HostKernel(decoder, rows=2, positions=200, threads=threads)
    truth = decoder([LONG])[0]
    found = torch.cat((kernel.read(1, LONG[:100], every=True), kernel.read(1, LONG[100:], onward=True, every=True)))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)
    assert kernel.lengths == [0, 150]
    torch.testing.assert_close(kernel.read(0, LONG[:7]), truth[6], rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="token 67 is invalid"):
        kernel.read(0, [1, 67])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_prompt_of_short_floats_is_read_as_exactly_as_its_keys_allow(dtype: torch.dtype) -> None:
    decoder = _decoder(dtype=dtype)
    wide = Decoder(decoder.spec).eval().requires_grad_(False)
    wide.load_state_dict(decoder.state_dict())
    truth, plain = wide([LONG])[0, -1], decoder([LONG])[0, -1].float()
    found = HostKernel(decoder, positions=160, threads=2).read(0, LONG)
    assert (found - truth).norm() <= (plain - truth).norm(), "sums are float32, whatever the weights are"


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_weights_read_prompts_as_they_compute_tokens(weights: Any) -> None:
    kernel = HostKernel(_decoder("qwen2"), rows=1, positions=160, threads=2, weights=weights)
    read = kernel.read(0, LONG, every=True)
    kernel.cut(0)
    for place, token in enumerate(LONG[:70]):
        kernel.follow(0, token)
        assert torch.equal(kernel.step()[0], read[place]), "the same bits, alone or beside others"


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_decoder_from_files_has_no_weights_of_its_own(tmp_path: Path, tied: bool) -> None:
    from safetensors.torch import save_file

    config = {**SMALL, **FAMILIES["qwen2"], "tie_word_embeddings": tied}
    torch.manual_seed(3)
    whole = Decoder(read_spec(config, "a config.json")).requires_grad_(False)
    state = {name: one.clone() for name, one in whole.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder, packed = load_packed_decoder(tmp_path, "float32", "int8")
    layer: Any = decoder.model.layers[0]
    assert layer.mlp.gate_proj.weight.is_meta and decoder.lm_head.weight.is_meta is not tied
    first = HostKernel(decoder, positions=20, threads=1, weights=packed)
    second = HostKernel(whole, positions=20, threads=1, weights="int8")
    assert torch.equal(first.read(0, LONG[:12]), second.read(0, LONG[:12]))
    torch.testing.assert_close(unpacked(packed.by_name["lm_head"]), whole.lm_head.weight, rtol=0, atol=0.02)


def test_draws_are_those_of_next_token() -> None:
    """Every kind of sampling in one batch, over many tokens: the same random numbers give the same tokens."""
    decoder = _decoder()
    ways = [
        Sampling(temperature=0.8, seed=1),
        Sampling(temperature=1.5, top_k=5, seed=2),
        Sampling(temperature=1.0, top_p=0.6, seed=3),
        Sampling(temperature=2.0, top_p=0.9, top_k=20, repetition_penalty=1.3, seed=4),
        Sampling(repetition_penalty=1.4),
        Sampling(),
        Sampling(temperature=30.0, seed=5),
        Sampling(temperature=1e-44, seed=6),  # whose quotients have no float32
        Sampling(temperature=1e-60, repetition_penalty=1e-60, seed=7),
    ]
    steps, prompt = 60, [5, 9]
    expected = []
    for sampling in ways:
        alone, seen = HostKernel(decoder, positions=80, threads=1), [*prompt]
        points = Points(torch.Generator().manual_seed(sampling.seed or 0))
        alone.read(0, prompt[:1])
        for _ in range(steps):
            alone.follow(0, seen[-1])
            seen.append(next_token(alone.step()[0], sampling, seen, points))
        expected.append(seen[2:])
    kernel = HostKernel(decoder, rows=len(ways), positions=80, threads=2)
    draws, held = {}, []
    for row, sampling in enumerate(ways):
        kernel.read(row, prompt[:1])
        kernel.follow(row, prompt[1])
        drawn = Points(torch.Generator().manual_seed(sampling.seed or 0)).ahead(steps)
        points = torch.tensor(drawn, dtype=torch.float64)
        seen_before = torch.zeros(67, dtype=torch.uint8)
        seen_before[prompt] = 1
        held.append((points, seen_before))
        penalty = sampling.repetition_penalty
        address = seen_before.data_ptr() if penalty != 1.0 else None
        draws[row] = Draw(
            sampling.temperature, sampling.top_p, penalty, sampling.top_k, points.data_ptr(), address
        )  # fmt: skip
    assert kernel.ahead(range(len(ways)), steps, (), draws) == expected
    assert kernel.lengths == [61] * len(ways)


def test_guesses_change_nothing_but_the_number_of_readings() -> None:
    decoder = _decoder()
    kernel = HostKernel(decoder, positions=300, threads=2)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    plain = kernel.generate([prompt], 200)[0]
    found, counts = generate(kernel, prompt, 200, (), Lookup(2, 6))
    assert found == plain and counts["readings"] == 199 - counts["right"]
    assert counts["right"] > 20, "a small random model repeats itself"
    end = plain[50]
    assert generate(kernel, prompt, 200, {end}, Lookup(2, 6))[0] == plain[: plain.index(end)]
    short = HostKernel(decoder, positions=20, threads=1)
    assert generate(short, prompt, 99, (), Lookup(2, 6))[0] == short.generate([prompt], 99)[0]
    assert (
        generate(kernel, prompt, 0, (), Lookup())[0] == [] and generate(kernel, prompt, 1, (), Lookup())[0] == plain[:1]
    )


def test_what_is_guessed() -> None:
    history = History(Lookup(3, 4), [1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert history.guess() == [4, 5, 6, 1]
    history.add([9])
    assert history.guess() == []
    history.add([7, 2, 3])  # three are new, two of them are not: the last place counts
    assert history.guess() == [9, 7, 2, 3]


def test_the_kernel_takes_guesses_and_traces(tmp_path: Path) -> None:
    decoder = _decoder()
    buffer = torch.zeros(3000 * 128, dtype=torch.uint64)
    kernel = PersistentKernel.from_model(
        decoder,
        max_seq_length=128,
        num_workers=2,
        spec_decode_config={"method": "promptlookup", "ngram_size": 2},
        profiler_tensor=buffer,
    )
    plain = PersistentKernel.from_model(decoder, max_seq_length=128, rows=2, num_workers=2, profiler_tensor=buffer)
    assert kernel.generate([5, 6], 60) == plain.generate([5, 6], 60) == _greedy(decoder, [5, 6], 60)
    assert kernel.guesses["readings"] < 60 and "guessed tokens" in kernel.explain()
    found = list(spans(buffer))  # of the plain one's token loop
    workers = {span.worker for span in found}
    assert workers == set(range(plain._rows.threads))  # type: ignore[union-attr]
    for worker in workers:
        own = [span for span in found if span.worker == worker]
        assert all(span.begin_ns <= span.end_ns for span in own)
        assert [s.step for s in own if s.phase == "logits"] == list(range(59))
        assert [s.layer for s in own if s.phase == "attention"] == [0, 1] * 59
    count = plain.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == count == len(found) and events[0]["ph"] == "X" and min(e["dur"] for e in events) >= 0


def test_a_trace_that_is_too_small_ends_early() -> None:
    buffer = torch.zeros(1024, dtype=torch.int64)
    kernel = PersistentKernel.from_model(_decoder(), max_seq_length=128, num_workers=1, profiler_tensor=buffer)
    kernel.generate([5], 60)
    assert 0 < len(list(spans(buffer))) <= 511


@pytest.mark.parametrize(
    "given, said",
    [
        ({"spec_decode_config": {"method": "lookahead"}}, "'lookahead' is unknown"),
        ({"spec_decode_config": {"spec_length": 0}}, "spec_length=0 is invalid"),
        ({"spec_decode_config": 5}, "spec_decode_config is of type int"),
        ({"profiler_tensor": torch.zeros(10, dtype=torch.int64)}, "it needs 1024"),
        ({"profiler_tensor": torch.zeros(4096)}, "profiler_tensor is torch.float32"),
    ],
)
def test_what_cannot_be_used_is_told(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PersistentKernel(**given)


def test_nothing_is_saved_where_nothing_was_noted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="records no trace"):
        PersistentKernel().save_trace(tmp_path / "x.json")
