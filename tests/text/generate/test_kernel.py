"""Requests in the rows of a kernel: transformers' tokens whoever comes and goes, bounded memory, and who computes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.text.generate.conftest import make_tokenizer, without_compiler  # noqa: E402
from tests.waiting import until  # noqa: E402

from anytorch.errors import ModelError, OutOfMemory  # noqa: E402
from anytorch.text.decoders import RecordedSteps, load_decoder  # noqa: E402
from anytorch.text.generate import kernel  # noqa: E402
from anytorch.text.generate.generator import TextGenerator  # noqa: E402
from anytorch.text.generate.kernel import KernelRows, Opened  # noqa: E402
from anytorch.text.generate.requests import End, TextRequest  # noqa: E402
from anytorch.text.generate.sampling import Sampling  # noqa: E402
from anytorch.text.generate.scheduler import Scheduler  # noqa: E402
from anytorch.text.persistent.ahead import AheadSteps  # noqa: E402
from anytorch.text.persistent.host import HostKernel  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 700, "bos_token_id": 0, "eos_token_id": 1,
    "initializer_range": 0.3,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "Mistral": {"sliding_window": 11},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
}
PROMPTS = ["The quick brown fox", "x", "日本語のテキスト, one token after another token makes a text", "A page"]
POSITION = 2 * 2 * 16 * 4  # bytes of the llama of the tests: keys and values, layers, heads' width, float32


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(
    family: str, compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family]})
    getattr(transformers, f"{family}ForCausalLM")(config).eval().save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    if not compiler:
        without_compiler(monkeypatch)
    found: dict[str, list[Any]] = {}
    for way in ("off", "auto"):
        with TextGenerator(tmp_path, device="cpu", kernel=way) as generator:
            streams = [generator.stream(prompt, max_tokens=30, temperature=0) for prompt in PROMPTS]
            # Random numbers meet the same shares, up to rounding.
            streams.append(generator.stream("The", max_tokens=30, temperature=0.9, top_p=0.9, top_k=40, seed=4))
            found[way] = [(stream.completion().text, stream._request.tokens) for stream in streams]
            facts = generator.describe()
    assert found["auto"] == found["off"]
    assert facts["decoding"] == ("HostKernel" if compiler else "RecordedSteps")


@pytest.fixture
def opened(models: dict[str, Path]) -> Opened:
    return kernel.open_kernel(models["llama"], torch.device("cpu"), "float32")


def asked(prompt: int, tokens: int, first: int = 5) -> TextRequest:
    ids = list(range(first, first + prompt))
    return TextRequest(ids, Sampling(), tokens, frozenset(), torch.Generator())


def read(rows: KernelRows, request: TextRequest, portion: int = 512) -> bool:
    """The scheduler's part of it. False: it has to wait."""
    count, logits = rows.read(request, portion)
    request.length += count
    if logits is not None:
        request.tokens.append(int(logits.argmax()))
    return count > 0


def step(rows: KernelRows, *requests: TextRequest) -> None:
    _, logits = rows.step(list(requests))
    assert logits is not None and logits.shape == (len(requests), 320)
    for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
        request.length += 1
        request.tokens.append(token)


def alone(opened: Opened, request: TextRequest) -> list[int]:
    prompt = request.tokens[: request.prompt_length]
    return prompt + opened.make(1, 700).generate([prompt], request.made)[0]


def test_rows_join_grow_and_close_up(opened: Opened) -> None:
    rows = KernelRows(opened, 1 << 30)
    first, second, third, long = asked(4, 40), asked(3, 40, 60), asked(5, 40, 90), asked(200, 400, 20)
    with torch.no_grad():
        assert read(rows, first)
        step(rows, first)
        small = rows._kernel
        assert small is not None and (small.rows, small.positions) == (1, 512)
        assert read(rows, second) and read(rows, third)
        step(rows, first, second, third)
        assert rows._open.rows == 4 and [r.row for r in (first, second, third)] == [0, 1, 2]
        read(rows, long, portion=120)  # longer than the kernel: everybody moves
        assert rows._open.positions == 1024
        step(rows, first, third)  # second waits
        rows.leave(first)
        assert [r.row for r in (second, third, long)] == [1, 2, 0] and rows._open.lengths[3] == 0
        step(rows, third, second)  # in another order than the rows'
        read(rows, long, portion=120)
        for _ in range(5):
            step(rows, second, third, long)
    for request in (first, second, third, long):
        assert request.tokens == alone(opened, request)
    for request in (third, long, second):
        rows.leave(request)
        rows.leave(request)
    assert not rows._taken and not any(rows._open.lengths)


def test_a_failed_step_leaves_no_trace(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = KernelRows(opened, 1 << 30)
    first, second = asked(4, 40), asked(3, 40, 60)
    read(rows, first)
    read(rows, second)

    def fails() -> Any:
        raise RuntimeError("the device said no")

    with monkeypatch.context() as patch:
        patch.setattr(rows._open, "step", fails)
        with pytest.raises(RuntimeError, match="said no"):
            rows.step([first, second])
    rows.undo([first, second])
    for _ in range(3):
        step(rows, first)
        step(rows, second)
    assert [r.tokens for r in (first, second)] == [alone(opened, r) for r in (first, second)]


def test_who_does_not_fit_beside_others_waits_and_keeps_its_turn(opened: Opened) -> None:
    rows = KernelRows(opened, 130 * POSITION)
    first, large, small = asked(10, 30), asked(20, 100), asked(2, 2)
    assert read(rows, first)
    assert not read(rows, large) and large.reading
    assert not read(rows, small), "it would fit, but came later"
    step(rows, first)
    rows.leave(first)
    assert read(rows, large)
    assert not read(rows, small)
    rows.leave(small)  # the first in line has gone
    assert read(rows, asked(1, 2)) is False and rows._first_in_line is not None, "the next one is first now"
    step(rows, large)
    assert large.tokens == alone(opened, large)


def test_what_never_fits_says_what_is_needed_and_what_fits(opened: Opened) -> None:
    rows = KernelRows(opened, 100 * POSITION)
    with pytest.raises(
        OutOfMemory, match=r"20 \+ 200 tokens need 55 KiB; there is room for 25 KiB, which is 100"
    ) as caught:
        rows.read(asked(20, 200), 512)
    assert caught.value.hint == "use max_tokens=80 or less"
    with pytest.raises(OutOfMemory) as caught:
        rows.read(asked(120, 1), 512)
    assert "shorten the prompt" in caught.value.hint
    assert read(rows, asked(20, 80)), "as much as was said"
    with pytest.raises(OutOfMemory):  # at once: waiting would not help
        rows.read(asked(20, 200), 512)


def test_memory_that_runs_out_is_one_requests_answer(models: dict[str, Path]) -> None:
    with TextGenerator(models["llama"], device="cpu") as generator:
        wanted = generator.complete("The quick", max_tokens=50, temperature=0).text
        rows = generator._scheduler._way
        assert isinstance(rows, KernelRows)
        rows._room, rows._kernel = 90 * POSITION, None
        with generator._scheduler._changed:  # the worker sees all at once
            streams = [generator.stream("The quick", max_tokens=n, temperature=0) for n in (50, 800, 50, 60)]
        assert streams[0].completion().text == wanted
        with pytest.raises(OutOfMemory, match=r"4 \+ 800 tokens need 201 KiB"):
            streams[1].completion()
        assert streams[2].completion().text == wanted and streams[3].completion().text.startswith(wanted)
        assert generator.stats.failed == 1 and not rows._taken


def test_a_request_that_is_cancelled_while_its_prompt_is_read_gives_its_row_back(models: dict[str, Path]) -> None:
    with TextGenerator(models["llama"], device="cpu") as generator:
        way = generator._scheduler._way
        assert isinstance(way, KernelRows)
        read = way.read

        def reads(request: TextRequest, portion: int) -> Any:
            computed = read(request, portion)
            if request.reading and request.prompt_length == 600:
                stream.close()
            return computed

        way.read = reads  # type: ignore[method-assign]
        other = generator.stream("The quick", max_tokens=60, temperature=0)
        with generator._scheduler._changed:
            stream = generator.stream([9] * 600, max_tokens=5)
        assert other.completion().completion_tokens == 60
        until(lambda: not generator.stats.running)
        assert generator.stats.cancelled == 1 and not way._taken
        del way.read


def test_bfloat16_goes_through_the_kernel(models: dict[str, Path]) -> None:
    with TextGenerator(models["qwen3"], device="cpu", dtype="bfloat16") as generator:
        assert generator.describe()["decoding"] == "HostKernel"
        ids = generator.tokenize(PROMPTS[0])
        streams = [generator.stream(ids, max_tokens=20, temperature=0) for _ in range(2)]
        for stream in streams:
            list(stream)
        ends = generator._ends["text"]
    decoder = load_decoder(models["qwen3"], "cpu", "bfloat16")
    wanted = ids + HostKernel(decoder, 1, 100).generate([ids], 20, ends)[0]
    assert [stream._request.tokens for stream in streams] == [wanted, wanted]


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("gpt2", {"kernel": "off"}, "kernel='off'"),
        ("llama", {"device_budget": "110KB"}, "does not fit"),
    ],
)
def test_op_by_op_says_why(models: dict[str, Path], family: str, options: dict[str, Any], why: str) -> None:
    with TextGenerator(models[family], device="cpu", **options) as generator:
        assert generator.describe()["decoding"] == "transformers"
        assert f"tokens by transformers: op by op: {generator._loaded.why_none}" in generator.explain()
        assert why in generator.explain()


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [("gpt2", {}, "do not support the family gpt2"), ("llama", {"quantization": "int2"}, "no weights in int2")],
)
def test_everything_else_is_a_step_of_transformers_and_says_why(
    models: dict[str, Path], family: str, options: dict[str, Any], why: str
) -> None:
    found = []
    for kernel_ in ("auto", "off"):
        with TextGenerator(models[family], device="cpu", kernel=kernel_, **options) as generator:
            assert generator.describe()["decoding"] == ("ModelSteps" if kernel_ == "auto" else "transformers")
            assert why in generator.explain() or kernel_ == "off"
            streams = [generator.stream(prompt, max_tokens=20, temperature=0) for prompt in PROMPTS]
            found.append([stream.completion().text for stream in streams])
    assert found[0] == found[1]


def test_what_our_decoder_does_not_know_is_computed_by_transformers(models: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models["llama"], tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with TextGenerator(folder, device="cpu") as generator:
        assert "only silu is known" in generator.describe()["decoding_why"]
        assert generator.complete("The", max_tokens=3, temperature=0).completion_tokens == 3


def test_a_device_that_cannot_compute_the_steps_is_left_to_transformers(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise NotImplementedError("no such op\nand more lines")

    without_compiler(monkeypatch)
    monkeypatch.setattr(kernel.RecordedSteps, "step", fails)
    with TextGenerator(models["llama"], device="cpu") as generator:
        facts = generator.describe()
        assert facts["decoding"] == "ModelSteps"
        assert facts["decoding_why"].endswith("; our decoder does not run on cpu: NotImplementedError: no such op")


def test_a_generator_without_a_compiler_says_so(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    with TextGenerator(models["llama"], device="cpu") as generator:
        assert "not recorded" in generator.explain() and "there is no C++ compiler" in generator.explain()


def test_it_takes_no_more_workers_than_torch_has(models: dict[str, Path]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TextGenerator(models["llama"], device="cpu") as generator:
            assert "with 1 worker" in generator.explain()
            generator.complete("The", max_tokens=3)
            rows = generator._scheduler._way
            assert isinstance(rows, KernelRows) and isinstance(rows._kernel, HostKernel)
            assert rows._kernel.threads == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_weights_go_through_the_kernel(models: dict[str, Path], weights: str) -> None:
    """Tokens are those of the kernel alone, also with several requests; the floats are not in memory."""
    with TextGenerator(models["qwen3"], device="cpu", quantization=weights) as generator:
        facts = generator.describe()
        assert facts["decoding"] == "HostKernel" and f"weights in {weights}" in facts["decoding_why"]
        whole = load_decoder(models["qwen3"])
        assert facts["parameters"] == sum(one.numel() for one in whole.parameters())
        assert any(one.is_meta for one in generator.model.parameters())
        streams = [generator.stream(prompt, max_tokens=25, temperature=0) for prompt in PROMPTS]
        found = [stream.completion() and stream._request.tokens for stream in streams]
        alone = HostKernel(whole, positions=200, threads=1, weights=weights)  # type: ignore[arg-type]
        assert facts["weight_nbytes_per_token"] == alone.weight_nbytes
        for tokens, prompt in zip(found, PROMPTS, strict=True):
            ids = generator.tokenize(prompt)
            assert tokens == ids + alone.generate([ids], 25, generator._ends["text"])[0]


def test_several_tokens_in_one_call_and_what_the_reader_is_told(models: dict[str, Path]) -> None:
    """Calls grow while they are quick; the text, its counts, its end and its stop string are as one by one."""
    calls: list[int] = []
    with TextGenerator(models["qwen3"], device="cpu") as generator:
        generator._ends = {"text": frozenset()}  # a random model may choose an end at any time
        way: Any = generator._scheduler._way
        several = way.several

        def noted(requests: Any, most: int) -> Any:
            found = several(requests, most)
            calls.append(len(found[0]))
            return found

        way.several = noted
        whole = generator.complete("The", max_tokens=120, temperature=0)
        assert whole.completion_tokens == 120 and whole.finish_reason == "length"
        assert max(calls) > 1 and sum(calls) <= 119 and whole.tokens_per_second is not None
        stats = generator.stats
        assert stats.tokens == 120 and stats.steps == 120
        stop = next(iter(re.findall("[a-z]{3}", whole.text[8:])))
        cut = generator.complete("The", max_tokens=120, temperature=0, stop=stop)
        assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish_reason == "stop"
        assert cut.completion_tokens < 120
        drawn = [
            generator.complete("The", max_tokens=60, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=7)
            for _ in range(2)
        ]
        way.several = lambda requests, most: None
        drawn.append(
            generator.complete("The", max_tokens=60, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=7)
        )
        assert len({one.text for one in drawn}) == 1 and len({one.completion_tokens for one in drawn}) == 1


def test_a_failed_call_for_several_tokens_is_computed_one_by_one(models: dict[str, Path]) -> None:
    with TextGenerator(models["qwen3"], device="cpu") as generator:
        plain = generator.complete("The", max_tokens=30, temperature=0).text
        way: Any = generator._scheduler._way
        failed = []

        def fails(requests: Any, most: int) -> Any:
            failed.append(most)
            raise RuntimeError("for the test")

        way.several = fails
        assert generator.complete("The", max_tokens=30, temperature=0).text == plain and failed


# --- tokens that the device chooses --------------------------------------------------------------------------------------


def texts_by(decoder: Any, kind: type[RecordedSteps]) -> list[tuple[list[int], str]]:
    """Six requests, three at once, which come and go: their tokens, and why each ended."""
    opened = Opened(decoder, lambda rows, positions: kind(decoder, rows, positions), kind.__name__, "")
    scheduler = Scheduler(KernelRows(opened, 1 << 30), most_at_once=3, most_waiting=9, guard=torch.no_grad)
    asked = [
        (Sampling(), 30), (Sampling(0.9, 0.9, 40), 25), (Sampling(), 7), (Sampling(1.2), 40),
        (Sampling(repetition_penalty=1.2), 12), (Sampling(0.7, 0.8, 5, 1.1), 9),
    ]  # fmt: skip
    requests = [
        TextRequest(list(range(5, 9 + row)), sampling, count, frozenset([1]), torch.Generator().manual_seed(row))
        for row, (sampling, count) in enumerate(asked)
    ]
    for request in requests:
        scheduler.submit(request)
    found: list[tuple[list[int], str]] = []
    for request in requests:
        while not isinstance(event := request.mailbox.get(), End):
            pass
        assert event.error is None
        found.append((request.tokens[request.prompt_length :], event.reason))
    scheduler.close()
    return found


def test_tokens_that_the_device_chooses_are_those_of_its_logits(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = texts_by(opened.model, RecordedSteps)
    at_once: set[int] = set()
    tokens = AheadSteps.tokens

    def seen(self: AheadSteps, rows: Any, choices: Any) -> Any:
        at_once.add(len(rows))
        return tokens(self, rows, choices)

    monkeypatch.setattr(AheadSteps, "tokens", seen)
    assert texts_by(opened.model, AheadSteps) == wanted
    assert 3 in at_once and {len(made) for made, reason in wanted if reason == "length"} >= {7, 9}


def test_a_device_that_fails_to_choose_is_asked_for_logits(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = texts_by(opened.model, RecordedSteps)
    tokens, failures = AheadSteps.tokens, []

    def fails(self: AheadSteps, rows: Any, choices: Any) -> Any:
        for number, made in enumerate(tokens(self, rows, choices)):
            if number == 2:
                failures.append(len(rows))
                raise RuntimeError("the device said no")
            yield made

    monkeypatch.setattr(AheadSteps, "tokens", fails)
    assert texts_by(opened.model, AheadSteps) == wanted and failures


def test_packed_weights_need_a_gpu_that_launches(opened: Opened) -> None:
    with pytest.raises(ModelError, match="no kernel reads weights in int4 on cpu: it runs on GPUs of NVIDIA"):
        kernel._open_packed_launch(opened.model, "int4")
