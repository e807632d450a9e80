"""The generator as a whole: its tokens are transformers' own, and many callers get what one would."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.faulty_disk import failing_threads  # noqa: E402
from tests.waiting import until  # noqa: E402

from anytorch.errors import InputError, NoThread, QueueFull, UsageError  # noqa: E402
from anytorch.text.generate import scheduler  # noqa: E402
from anytorch.text.generate.generator import TextGenerator  # noqa: E402
from anytorch.text.generate.requests import Computed, TextRequest  # noqa: E402

PROMPTS = [
    "The quick brown fox",
    "日本語",
    "One token after another token makes a text, and a text makes a page. " * 3,
    "x",
]


def expected(folder: Path, prompt: str, count: int, **options: Any) -> list[int]:
    """The new tokens of transformers' own loop, without the one that ends a text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    settings = {"do_sample": False, "pad_token_id": 1, **options}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
    tokens: list[int] = made[0, ids.shape[1] :].tolist()
    return tokens[:-1] if tokens[-1] == 1 else tokens


def watched(
    generator: TextGenerator,
    patch: pytest.MonkeyPatch,
    before: Callable[[], None] = lambda: None,
    after: Callable[[list[TextRequest], int], None] = lambda requests, count: None,
) -> None:
    """Call `before` every computation, and `after` it with its requests and how many tokens of each it has computed.

    A computation makes one token of each: a call for several would be over before anybody looks.
    """
    way = generator._scheduler._way
    read, step, several, tokens = way.read, way.step, way.several, way.tokens

    def reads(request: TextRequest, portion: int) -> Computed:
        before()
        computed = read(request, portion)
        after([request], computed[0])
        return computed

    def steps(requests: list[TextRequest]) -> Computed:
        before()
        computed = step(requests)
        after(requests, computed[0])
        return computed

    def one_of_several(requests: list[TextRequest], most: int) -> list[list[int]] | None:
        before()
        found = several(requests, 1)
        if found is not None:
            after(requests, 1)
        return found

    def goes_on(requests: list[TextRequest]) -> Generator[list[int], None, None] | None:
        made = tokens(requests)
        return None if made is None else looked_at(requests, made)

    def looked_at(
        requests: list[TextRequest], made: Generator[list[int], None, None]
    ) -> Generator[list[int], None, None]:
        with closing(made):
            while True:
                before()
                found = next(made, None)
                if found is None:
                    return
                after(requests, 1)
                yield found

    patch.setattr(way, "read", reads)
    patch.setattr(way, "step", steps)
    patch.setattr(way, "several", one_of_several)
    patch.setattr(way, "tokens", goes_on)


def held_from_step(generator: TextGenerator, patch: pytest.MonkeyPatch, number: int) -> threading.Event:
    """An event that the generator waits for before its step `number`, counted from now: nothing ends by itself before."""
    steps, go_on = [0], threading.Event()

    def held() -> None:
        steps[0] += 1
        assert steps[0] < number or go_on.wait(120)

    watched(generator, patch, held)
    return go_on


def tokens_of(stream: Any) -> list[int]:
    list(stream)
    return list(stream._request.tokens[stream.prompt_tokens :])


@pytest.mark.parametrize("kernel", ["auto", "off"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral"])
def test_greedy_is_what_transformers_generates(models: dict[str, Path], family: str, kernel: str) -> None:
    with TextGenerator(models[family], device="cpu", kernel=kernel) as generator:
        for prompt in PROMPTS:
            found = tokens_of(generator.stream(prompt, max_tokens=40, temperature=0))
            assert found == expected(models[family], prompt, 40)


def test_a_refused_thread_wedges_nobody(models: dict[str, Path]) -> None:
    with TextGenerator(models["llama"], device="cpu") as generator:
        with failing_threads(1), pytest.raises(NoThread, match="anytorch-generate"):
            generator.stream(PROMPTS[0], max_tokens=4, temperature=0)
        assert generator.stats.waiting == 0
        assert tokens_of(generator.stream(PROMPTS[0], max_tokens=4, temperature=0))


def test_a_worker_that_a_fork_left_behind_is_replaced(models: dict[str, Path]) -> None:
    with TextGenerator(models["llama"], device="cpu") as generator:
        of_parent = threading.Thread(target=lambda: None)
        of_parent.start()
        of_parent.join()  # as the child of a fork sees its parent's threads: ended
        generator._scheduler._worker = of_parent
        stream = generator.stream(PROMPTS[0], max_tokens=4, temperature=0, timeout_s=60)
        assert generator._scheduler._worker is not of_parent
        assert tokens_of(stream) == expected(models["llama"], PROMPTS[0], 4)


def test_the_repetition_penalty_is_that_of_transformers(models: dict[str, Path], llama: TextGenerator) -> None:
    found = tokens_of(llama.stream(PROMPTS[0], max_tokens=40, temperature=0, repetition_penalty=1.5))
    assert found == expected(models["llama"], PROMPTS[0], 40, repetition_penalty=1.5)
    assert found != expected(models["llama"], PROMPTS[0], 40)


@pytest.mark.parametrize("kernel", ["auto", "off"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_requests_that_are_computed_together_get_what_they_would_get_alone(
    models: dict[str, Path], family: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TextGenerator(models[family], device="cpu", kernel=kernel) as generator:
        alone = [generator.complete(prompt, max_tokens=30, temperature=0).text for prompt in PROMPTS]
        before = generator.stats
        go_on = held_from_step(generator, monkeypatch, 1)
        streams = [generator.stream(prompt, max_tokens=30, temperature=0) for prompt in PROMPTS]
        go_on.set()
        together = [stream.completion().text for stream in streams]
        after = generator.stats
    assert together == alone
    made, steps = after.tokens - before.tokens, after.steps - before.steps
    if family == "mistral" and kernel == "off":  # a sliding window: in turns
        assert steps == made
    else:
        assert steps < made / 2


def test_a_request_that_comes_later_joins_and_one_that_ends_leaves(llama: TextGenerator) -> None:
    lengths = [50, 5, 20, 1, 35]
    alone = [llama.complete(PROMPTS[n % 4], max_tokens=k, temperature=0).text for n, k in enumerate(lengths)]
    found: dict[int, str] = {}

    def ask(number: int, count: int) -> None:
        time.sleep(0.01 * number)
        found[number] = llama.complete(PROMPTS[number % 4], max_tokens=count, temperature=0).text

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(lengths)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(lengths))] == alone


def test_a_prompt_longer_than_a_portion_is_read_in_several(models: dict[str, Path], llama: TextGenerator) -> None:
    prompt = "quick brown fox " * 60
    count = len(llama.tokenize(prompt))
    assert count > 512
    found = tokens_of(llama.stream(prompt, max_tokens=10, temperature=0))
    assert found == expected(models["llama"], prompt, 10)
    exact = llama.tokenize(prompt)[:513]  # the last token alone is left for the second portion
    assert len(tokens_of(llama.stream(exact, max_tokens=3, temperature=0))) == 3


def test_a_long_prompt_does_not_hold_up_a_short_one(llama: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = llama.tokenize("quick brown fox " * 60)[:600], llama.tokenize(PROMPTS[0])
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(scheduler, "READ_S", 1e9)  # however slow the machine is
    watched(llama, monkeypatch, after=lambda requests, count: sizes.append((len(requests), count)))
    with llama._scheduler._changed:  # the worker sees both at once
        streams = [llama.stream(prompt, max_tokens=3, temperature=0) for prompt in (long, short)]
    for stream in streams:
        list(stream)
    assert sizes[:2] == [(1, scheduler.PORTION // 2), (1, len(short))]  # half the round's portion each
    assert sizes[2:4] == [(1, 1), (1, 600 - scheduler.PORTION // 2)]  # the short one goes on, then the long one alone


def test_the_same_seed_gives_the_same_text_and_another_seed_another(llama: TextGenerator) -> None:
    def text(seed: int) -> str:
        return llama.complete("The", max_tokens=30, temperature=1.5, seed=seed).text

    assert text(1) == text(1)
    assert text(1) != text(2)
    streams = [llama.stream("The", max_tokens=30, temperature=1.5, seed=1) for _ in range(3)]
    assert {stream.completion().text for stream in streams} == {text(1)}


def test_pieces_are_the_text_and_the_facts_are_told(llama: TextGenerator) -> None:
    stream = llama.stream("The quick", max_tokens=20, temperature=0)
    pieces = list(stream)
    assert len(pieces) > 3, "few tokens at first, then those of a call"
    made = stream._request.tokens[stream.prompt_tokens :]
    assert "".join(pieces) == llama.decode(made)
    assert stream.finish_reason == "length"
    assert stream.prompt_tokens == len(llama.tokenize("The quick"))
    assert stream.completion_tokens == 20
    assert stream.tokens_per_second is not None and stream.tokens_per_second > 0
    assert stream.first_token_s is not None and 0 < stream.first_token_s <= stream.seconds
    share = stream.tokens_per_second * llama.weight_nbytes_per_token / 10e9
    assert stream.bandwidth_share == pytest.approx(share)


def test_what_a_reader_has_is_counted(llama: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    end = TextRequest.end

    def noted(self: TextRequest, *given: Any) -> None:
        counted.append(llama.stats.tokens)
        end(self, *given)

    monkeypatch.setattr(TextRequest, "end", noted)
    assert llama.complete("The quick", max_tokens=12, temperature=0).completion_tokens == 12
    assert counted == [12] and llama.stats.steps == 12


def test_a_stop_string_ends_the_text_before_it(llama: TextGenerator) -> None:
    whole = llama.complete("The quick", max_tokens=40, temperature=0).text
    stop = whole[10:13]
    done = llama.complete("The quick", max_tokens=40, temperature=0, stop=stop)
    assert done.text == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"
    assert done.completion_tokens < 40


def test_the_models_own_end_ends_the_text(models: dict[str, Path], llama: TextGenerator) -> None:
    tokens = tokens_of(llama.stream("The quick", max_tokens=30, temperature=0))
    llama._ends["text"] = frozenset([tokens[12]])
    done = llama.complete("The quick", max_tokens=30, temperature=0)
    place = tokens.index(tokens[12])
    assert done.finish_reason == "stop"
    assert done.completion_tokens == place


def test_closing_a_stream_stops_the_computation(llama: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = held_from_step(llama, monkeypatch, 100)
    stream = llama.stream("The", max_tokens=900, temperature=0)
    next(stream)
    stream.close()
    go_on.set()
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.finish_reason == "cancelled"
    until(lambda: not llama.stats.running)
    assert llama.stats.tokens < 900
    assert llama.stats.cancelled == 1


def test_a_stream_that_is_forgotten_stops_too(llama: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = held_from_step(llama, monkeypatch, 100)
    stream = llama.stream("The", max_tokens=900, temperature=0)
    next(stream)
    del stream
    go_on.set()
    until(lambda: not llama.stats.running)
    assert llama.stats.tokens < 900


def test_asyncio_reads_pieces_and_cancelling_a_task_stops(
    llama: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = llama.complete("The quick", max_tokens=20, temperature=0).text

    async def main() -> tuple[str, str]:
        pieces = [piece async for piece in llama.stream("The quick", max_tokens=20, temperature=0)]
        both = await asyncio.gather(
            llama.acomplete("The quick", max_tokens=20, temperature=0),
            llama.acomplete("One token", max_tokens=20, temperature=0),
        )
        go_on = held_from_step(llama, monkeypatch, 100)
        task = asyncio.create_task(llama.acomplete("The", max_tokens=900, temperature=0))
        while not llama.stats.running:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        return "".join(pieces), both[0].text

    assert asyncio.run(main()) == (alone, alone)
    until(lambda: not llama.stats.running)
    assert llama.stats.cancelled == 1


def test_an_event_loop_that_ends_early_is_no_trouble_for_others(llama: TextGenerator) -> None:
    alone = llama.complete("One token", max_tokens=40, temperature=0).text
    other = llama.stream("One token", max_tokens=40, temperature=0)

    async def leave() -> Any:
        stream = llama.stream("The quick", max_tokens=900, temperature=0)
        await anext(stream)
        waiting = asyncio.ensure_future(stream._something_came())
        await asyncio.sleep(0)
        return stream, waiting

    loop = asyncio.new_event_loop()
    stream, waiting = loop.run_until_complete(leave())
    loop.close()  # with a reader that still waits
    assert other.completion().text == alone
    assert llama.stats.failed == 0
    stream.close()
    waiting._log_destroy_pending = False


def test_a_request_out_of_time_gets_a_timeout(llama: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    watched(llama, monkeypatch, before=lambda: time.sleep(0.001))  # a fast machine has written all of it by then
    with pytest.raises(TimeoutError, match="not finished within"):
        llama.complete("The", max_tokens=1000, temperature=0, timeout_s=0.02)


def test_too_many_waiting_requests_are_refused(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with TextGenerator(models["llama"], device="cpu", at_once=1, waiting=1) as generator:
        go_on = held_from_step(generator, monkeypatch, 100)
        first = generator.stream("The", max_tokens=900, temperature=0)
        next(first)  # runs
        second = generator.stream("The", max_tokens=1, temperature=0)
        with pytest.raises(QueueFull, match="waiting"):
            generator.stream("The", max_tokens=1)
        first.close()
        go_on.set()
        assert second.completion().finish_reason == "length"
        assert generator.stats.rejected == 1


def test_a_failure_is_the_answer_of_its_request_alone(llama: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = llama.complete("The quick", max_tokens=12, temperature=0).text
    bad = llama.tokenize("x")

    def broken(requests: list[TextRequest], count: int) -> None:
        if len(requests) > 1 or requests[0].tokens[: len(bad)] == bad:  # after the cache was written to, as in life
            raise RuntimeError("the device said no")

    watched(llama, monkeypatch, after=broken)
    streams = [llama.stream(prompt, max_tokens=12, temperature=0) for prompt in ("The quick", "x", "The quick")]
    assert streams[0].completion().text == alone
    with pytest.raises(RuntimeError, match="said no"):
        streams[1].completion()
    assert streams[2].completion().text == alone
    assert llama.stats.failed == 1


def held_together(
    generator: TextGenerator, patch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[Any], list[int], threading.Event]:
    """Streams of three prompts that begin when the event is set, and the sizes of the batches that are computed."""
    sizes: list[int] = []
    all_there = threading.Event()

    def held() -> None:
        assert all_there.wait(120)

    watched(generator, patch, held, lambda requests, count: sizes.append(len(requests)))
    streams = [generator.stream(prompt, max_tokens=12, temperature=0, **options) for prompt in PROMPTS[:3]]
    return streams, sizes, all_there


@pytest.mark.parametrize("first_ends", [False, True])
def test_a_token_that_cannot_be_chosen_ends_its_request_alone(
    llama: TextGenerator, monkeypatch: pytest.MonkeyPatch, first_ends: bool
) -> None:
    monkeypatch.setattr(llama._scheduler._way, "several", lambda requests, most: None)  # the host chooses, step by step
    options = {"temperature": 0, "repetition_penalty": 1.1, "max_tokens": 12}
    alone = [tokens_of(llama.stream(prompt, **options)) for prompt in PROMPTS[:3]]
    choose, end = scheduler.next_token, next(token for token in alone[0] if alone[0].index(token) >= 4)
    prompts = [llama.tokenize(prompt) for prompt in PROMPTS[:3]]
    failed_in: list[int] = []  # the size of the batch

    def broken(logits: Any, sampling: Any, seen: Any, random: Any) -> int:
        of_second = list(seen[: len(prompts[1])]) == prompts[1]
        # The first has got its last token in this very step, if it gets one early.
        now = streams[0]._request.cache is None if first_ends else len(seen) == len(prompts[1]) + 4
        if of_second and now and not failed_in:
            failed_in.append(sizes[-1])
            raise RuntimeError("no memory to sort with")
        return choose(logits, sampling, seen, random)

    monkeypatch.setattr(scheduler, "next_token", broken)
    streams, sizes, begin = held_together(llama, monkeypatch, repetition_penalty=1.1)
    if first_ends:
        streams[0]._request.ends = frozenset([end])
    begin.set()
    found = [tokens_of(streams[0]), [], tokens_of(streams[2])]
    with pytest.raises(RuntimeError, match="no memory to sort"):
        streams[1].completion()
    assert failed_in == [3]
    assert found[0] == (alone[0][: alone[0].index(end)] if first_ends else alone[0])
    assert found[2] == alone[2]
    assert llama.stats.failed == 1


def test_a_device_that_reports_late_that_it_failed_is_asked_again(
    llama: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama._scheduler._way, "several", lambda requests, most: None)  # the host looks, step by step
    alone = [tokens_of(llama.stream(prompt, max_tokens=12, temperature=0)) for prompt in PROMPTS[:3]]
    look, failures = scheduler.Outlook.of, []

    def late(requests: Any, logits: Any) -> Any:
        if len(requests) == 3 and not failures:
            failures.append(1)
            raise RuntimeError("a kernel before this one failed")
        return look(requests, logits)

    monkeypatch.setattr(scheduler.Outlook, "of", late)
    streams, _, begin = held_together(llama, monkeypatch)
    begin.set()
    assert [tokens_of(stream) for stream in streams] == alone
    assert failures and llama.stats.failed == 0


def test_a_chat_goes_through_the_models_template(llama: TextGenerator) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    ids = llama.tokenize(messages)
    assert llama.tokenizer.decode(ids) == "<|system|>Be brief.<end><|user|>Hi<end><|assistant|>"
    assert llama.complete(messages, max_tokens=5).completion_tokens <= 5


def test_a_template_that_leaves_nothing_is_told(llama: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(InputError, match="makes an empty text"):
        llama.complete([{"role": "user", "content": ""}], max_tokens=2)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([5, 10_000], "token 1 is 10000"),
        ([True], "token 0"),
        (b"bytes", "type bytes"),
        (7, "type int"),
        ("cut \ud83d", "a lone surrogate"),
        ([{"role": "user"}], "message 0"),
        ([{"content": "x"}], "no role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "robot", "content": "x"}], "no robots"),
        ("quick " * 5000, "positions"),
    ],
)
def test_a_prompt_that_cannot_be_used_says_why(llama: TextGenerator, prompt: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        llama.stream(prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 1.5},
        {"seed": -1},
        {"seed": "x"},
        {"stop": [""]},
        {"timeout_s": 0},
        {"repetition_penalty": 0},
    ],
)
def test_an_option_that_cannot_be_used_says_why(llama: TextGenerator, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        llama.stream("The", **options)


def test_the_answer_ends_where_the_model_has_no_more_positions(llama: TextGenerator) -> None:
    ids = [9] * 1020
    done = llama.complete(ids, max_tokens=100, temperature=0)
    assert (done.completion_tokens, done.finish_reason) == (4, "length")


def test_a_closed_generator_says_so_and_ends_what_runs(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = TextGenerator(models["llama"], device="cpu")
    watched(generator, monkeypatch, before=lambda: until(lambda: generator._scheduler._closing))
    stream = generator.stream("The", max_tokens=900, temperature=0)
    generator.close()
    generator.close()
    assert stream.completion().finish_reason == "cancelled"
    with pytest.raises(UsageError, match="closed"):
        generator.stream([1])


def test_it_describes_itself(llama: TextGenerator) -> None:
    facts = llama.describe()
    assert facts["family"] == "llama" and facts["device"] == "cpu" and facts["max_length"] == 1024
    assert facts["parameters"] == sum(p.numel() for p in llama.model.parameters())
    # The input table is only looked up in, so one of the two tables is not read.
    assert facts["weight_nbytes_per_token"] == 4 * (facts["parameters"] - 320 * 32)
    assert facts["cache_nbytes_per_token"] == 2 * 2 * 2 * 8 * 4
    words = llama.explain()
    assert "llama" in words and "GB/s (measured)" in words
