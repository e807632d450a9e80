"""POST /v1/completions and /v1/chat/completions, with a real (tiny, random) model and OpenAI's own client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.waiting import until

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<begin>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["one word after another makes a text"], trainer)
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>")
    whole.chat_template = TEMPLATE
    whole.save_pretrained(path)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def writer(served: Callable[..., Any], folder: Path) -> Iterator[Any]:
    with served(text_model=str(folder)) as running:
        running.server.call(running.state.load_rest)
        until(lambda: running.state.models.loaded("text"), "the model to load")
        yield running


@pytest.fixture
def official(writer: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{writer.url}/v1", api_key="unused", max_retries=0)


def test_a_completion_is_the_generator_s(writer: Any, official: openai.OpenAI) -> None:
    answer = official.completions.create(model="tiny-llama", prompt="one word", max_tokens=12, temperature=0)
    want = writer.state.models.loaded("text")[0].generator.complete("one word", max_tokens=12, temperature=0.0)
    assert answer.choices[0].text == want.text and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12 and answer.usage.prompt_tokens == want.prompt_tokens
    assert answer.usage.model_dump()["tokens_per_second"] > 0


def test_a_stream_brings_the_same_text_in_pieces(official: openai.OpenAI) -> None:
    whole = official.completions.create(model="tiny-llama", prompt="one", max_tokens=20, temperature=0).choices[0].text
    chunks = list(
        official.completions.create(model="tiny-llama", prompt="one", max_tokens=20, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole and len(chunks) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert chunks[-1].usage is not None and "bandwidth_share" in chunks[-1].usage.model_dump()


def test_usage_that_was_asked_for_is_a_chunk_of_its_own(official: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"model": "tiny-llama", "max_tokens": 5, "temperature": 0, "stream": True}
    options["stream_options"] = {"include_usage": True}
    for chunks in (
        list(official.completions.create(prompt="one", **options)),
        list(official.chat.completions.create(messages=messages, **options)),
    ):
        *others, last = chunks
        assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 5
        assert all(chunk.choices and chunk.usage is None for chunk in others)
        assert others[-1].choices[0].finish_reason == "length"


def test_settings_beyond_openai_s_reach_the_generator(writer: Any, official: openai.OpenAI) -> None:
    generator = writer.state.models.loaded("text")[0].generator
    for more in (
        {"top_k": 2},
        {"top_k": -1},
        {"top_k": 0},
        {"repetition_penalty": 1.7},
        {"top_k": 3, "repetition_penalty": 0.5},
    ):
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.3, "seed": 4}
        made = official.completions.create(model="tiny-llama", prompt="one", extra_body=more, **options)
        told = {**more, "top_k": max(0, more["top_k"])} if "top_k" in more else more
        assert made.choices[0].text == generator.complete("one", **options, **told).text


def test_a_chat(writer: Any, official: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "hi"}]
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    options: dict[str, Any] = {"model": "tiny-llama", "messages": messages, "max_completion_tokens": 8, "seed": 3}
    answer = official.chat.completions.create(**options)
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    want = writer.state.models.loaded("text")[0].generator.complete(
        plain, max_tokens=8, seed=3, temperature=1.0, top_p=1.0
    )
    assert answer.choices[0].message.content == want.text and answer.choices[0].message.role == "assistant"
    chunks = list(official.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text


def test_the_stream_s_own_form(writer: Any) -> None:
    with writer.client.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[0][6:])["object"] == "text_completion"


@pytest.fixture
def slowly(writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast machine writes thousands of tokens before a client has left, or its time is up."""
    way = writer.state.models.loaded("text")[0].generator._scheduler._way
    several = way.several

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return several(*arguments)

    monkeypatch.setattr(way, "several", slow)


def test_a_client_that_leaves_ends_the_text(writer: Any, slowly: None) -> None:
    generator = writer.state.models.loaded("text")[0].generator
    counted, ended = tokens_counted(writer), generator.stats.cancelled
    body = {"prompt": "one", "max_tokens": 3000, "temperature": 0, "stream": True}
    with writer.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    until(lambda: not writer.app.guard.under_way, "the request to end without its client")
    until(lambda: not generator.stats.running, "the generator to leave it")
    assert generator.stats.cancelled == ended + 1
    until(lambda: writer.state.models.slots("text")[0].users == 0, "the model to be free")
    assert tokens_counted(writer) > counted, "what was made of it counts"


def tokens_counted(writer: Any) -> float:
    return writer.state.metrics.registry.get_sample_value("anytorch_tokens_total", {"job": "text"}) or 0.0


def test_a_deadline_ends_a_text_with_words(writer: Any, slowly: None) -> None:
    body = {"prompt": "one", "max_tokens": 4000, "temperature": 0}
    counted = tokens_counted(writer)
    for seconds in ("0.8", "8", "60"):  # again where a busy machine has not written anything by then
        headers = {"X-Request-Timeout": seconds}
        assert writer.client.post("/v1/completions", json=body, headers=headers).status_code == 504
        if tokens_counted(writer) > counted:
            break
    assert tokens_counted(writer) > counted
    with writer.client.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as answer:
        last = [line for line in answer.iter_lines() if line][-1]
    assert json.loads(last[6:])["error"]["code"] == "deadline"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("completions", {}, 422),
        ("completions", {"prompt": ["a", "b"]}, 422),
        ("completions", {"prompt": "x", "max_tokens": 0}, 422),
        ("completions", {"prompt": "x", "max_tokens": 10**6}, 422),
        ("completions", {"prompt": "x", "temperature": -1}, 422),
        ("completions", {"prompt": "x", "top_p": 0}, 422),
        ("completions", {"prompt": "x", "n": 2}, 422),
        ("completions", {"prompt": "x", "logprobs": 3}, 422),
        ("completions", {"prompt": "x", "model": "nobody"}, 404),
        ("completions", {"prompt": "word " * 5000}, 422),
        ("completions", {"prompt": "x", "stop": [""] * 100}, 422),
        ("chat/completions", {"messages": []}, 422),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 422),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422),
    ],
)
def test_what_makes_no_sense_is_told(writer: Any, path: str, body: dict[str, Any], status: int) -> None:
    for stream in (False, True):
        answer = writer.client.post(f"/v1/{path}", json={**body, "stream": stream})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"] and answer.headers["content-type"] == "application/problem+json"
    assert writer.state.models.slots("text")[0].users == 0


def test_a_long_prompt_holds_up_nobody(writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing happens beside the event loop, and what cannot fit is refused before."""
    generator = writer.state.models.loaded("text")[0].generator
    tokenize, begun, go_on = generator.tokenize, threading.Event(), threading.Event()

    def slow(prompt: Any) -> Any:
        begun.set()
        assert go_on.wait(120)
        return tokenize(prompt)

    monkeypatch.setattr(generator, "tokenize", slow)
    body = {"prompt": "one word " * 50, "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(lambda: httpx.post(f"{writer.url}/v1/completions", json=body, timeout=120))
        assert begun.wait(120)
        try:
            assert writer.client.get("/v1/readyz", timeout=60).status_code == 200
        finally:
            go_on.set()
        assert long.result().status_code == 200
    monkeypatch.undo()
    for path, given in (("completions", {"prompt": "x" * 70_000}), ("chat/completions", {"messages": MANY})):
        answer = writer.client.post(f"/v1/{path}", json={**given, "max_tokens": 1})
        assert answer.status_code == 413 and "characters" in answer.json()["detail"], answer.text


MANY = [{"role": "user", "content": "x" * 30}] * 3000


def test_what_a_client_leaves_open_may_be_null(official: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    answer = official.chat.completions.create(
        model="tiny-llama", messages=messages, max_tokens=2, temperature=None, top_p=None, n=None, stream=None
    )
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.UnprocessableEntityError, match="4096"):
        official.chat.completions.create(model="tiny-llama", messages=messages * 3000, max_tokens=2)


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -1},
        {"logit_bias": {"5": 100}},
        {"tool_choice": "required"},
        {"n": 2},
        {"logprobs": True},
        {"temprature": 0.2},
        {"min_p": 0.1},
    ],
)
def test_what_a_chat_does_not_do_is_refused_by_its_name(writer: Any, field: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, **field}
    answered = httpx.post(f"{writer.url}/v1/chat/completions", json=body, timeout=60)
    (name,) = field
    assert answered.status_code == 422, answered.text
    said = answered.json()["detail"]
    assert name in said and ("is not supported" in said or "is not a field of this end point" in said)


def test_a_body_sent_as_a_form_says_what_to_send(writer: Any) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answered = httpx.post(f"{writer.url}/v1/completions", content=b'{"prompt": "x"}', headers=form, timeout=60)
    assert answered.status_code == 422 and answered.json()["detail"] == "the body: is not a JSON object"
    assert "Content-Type: application/json" in answered.json()["hint"]


def test_what_asks_for_nothing_is_taken(writer: Any) -> None:
    """As frameworks send it: every field of OpenAI's, at its default."""
    body = {
        "messages": [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "user", "content": "x"}],
        "max_tokens": 2, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "frequency_penalty": 0.0,
        "presence_penalty": 0, "logit_bias": {}, "user": "somebody", "metadata": {"a": "b"}, "store": False, "n": 1,
    }  # fmt: skip
    answered = httpx.post(f"{writer.url}/v1/chat/completions", json=body, timeout=60)
    assert answered.status_code == 200, answered.text


def test_the_model_that_comes_with_anytorch_is_loaded_by_the_first_request(serve: Callable[..., Any]) -> None:
    """Nothing is named, and nothing but torch and transformers is needed: it waits, and what it writes can be read."""
    service = serve(text=True)
    before = {model["id"]: model for model in service.client.get("/api/models").json()["models"]}
    assert before["tiny-writer"]["default"] and not before["tiny-writer"]["loaded"]
    messages = [{"role": "user", "content": "What does textwrap.dedent do?"}]
    body = {"messages": messages, "max_tokens": 40, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    text, usages = "", []
    with service.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                text += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
                usages += [chunk["usage"]] if "usage" in chunk else []
    assert text == "Remove any common leading whitespace from every line in `text`."
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and len(counts) > 2, "told while it writes, and at the end"
    assert {model["id"] for model in service.client.get("/v1/models").json()["data"]} >= {"tiny-writer"}
