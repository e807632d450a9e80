"""POST /v1/embeddings over a real port, by hand and with OpenAI's own client."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.waiting import until

from anytorch.serve.routes.embeddings import tokenize

TEXTS = ["a cat sleeps", "the stock fell", "ein Hund bellt", "a cat sleeps"]


def ask(service: Any, **body: Any) -> httpx.Response:
    response: httpx.Response = service.client.post("/v1/embeddings", json=body)
    return response


def vectors(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return np.array([row["embedding"] for row in response.json()["data"]], np.float32)


def test_the_vectors_are_the_engine_s(service: Any) -> None:
    answer = ask(service, input=TEXTS, model="all-MiniLM-L6-v2")
    document = answer.json()
    assert document["object"] == "list" and document["model"] == "all-MiniLM-L6-v2"
    assert [row["index"] for row in document["data"]] == [0, 1, 2, 3]
    np.testing.assert_array_equal(vectors(answer), service.embedding.engine.encode(TEXTS))
    tokens = int(service.embedding.engine.tokenize(TEXTS).starts[-1])
    assert document["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_one_text(service: Any) -> None:
    np.testing.assert_array_equal(vectors(ask(service, input="a cat")), service.embedding.engine.encode(["a cat"]))


def test_token_ids_give_the_vectors_of_their_texts(service: Any) -> None:
    tokens = service.embedding.engine.tokenize(TEXTS)
    rows = [tokens.ids[a:b].tolist() for a, b in zip(tokens.starts, tokens.starts[1:], strict=False)]
    want = vectors(ask(service, input=TEXTS))
    np.testing.assert_array_equal(vectors(ask(service, input=rows)), want)
    np.testing.assert_array_equal(vectors(ask(service, input=rows[0])), want[:1])


def test_base64_holds_the_same_floats(service: Any) -> None:
    answer = ask(service, input=TEXTS, encoding_format="base64")
    found = np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer.json()["data"]])
    np.testing.assert_array_equal(found, vectors(ask(service, input=TEXTS)))


def test_fewer_dimensions_are_normalised_again(service: Any) -> None:
    found = vectors(ask(service, input=TEXTS, dimensions=32))
    assert found.shape == (4, 32)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(("precision", "columns"), [("int8", 384), ("binary", 48), ("ubinary", 48), ("float16", 384)])
def test_other_precisions(service: Any, precision: str, columns: int) -> None:
    want = service.embedding.engine.encode(TEXTS, precision=precision)
    found = vectors(ask(service, input=TEXTS, precision=precision))
    assert found.shape == (4, columns)
    np.testing.assert_allclose(found, want.astype(np.float32), rtol=1e-3)
    # As OpenAI's clients ask, who would take any base64 for float32.
    as_base64 = ask(service, input=TEXTS, precision=precision, encoding_format="base64")
    np.testing.assert_array_equal(vectors(as_base64), found)


def test_a_prompt_is_put_before_each(service: Any) -> None:
    found = vectors(ask(service, input=["x"], prompt="search: "))
    np.testing.assert_array_equal(found, vectors(ask(service, input=["search: x"])))


def test_the_publisher_s_name_means_the_same_model(service: Any) -> None:
    assert ask(service, input="x", model="sentence-transformers/all-MiniLM-L6-v2").status_code == 200


def test_a_long_request_is_tokenized_off_the_loop(service: Any) -> None:
    texts = ["word " * 400] * 10
    np.testing.assert_array_equal(vectors(ask(service, input=texts)), service.embedding.engine.encode(texts))


BAD: list[tuple[Any, int, str]] = [
    ({}, 422, "missing"),
    ({"input": []}, 422, "`input` must be"),
    ({"input": {}}, 422, "`input` must be"),
    ({"input": None}, 422, "`input` must be"),
    ({"input": ["a", 1]}, 422, "mixes"),
    ({"input": [1, "a"]}, 422, "token id"),
    ({"input": [[1], "a"]}, 422, "mixes"),
    ({"input": [True]}, 422, "mixes"),
    ({"input": [[]]}, 422, "0 token ids"),
    ({"input": [[101, -1]]}, 422, "token id -1"),
    ({"input": [[101, 30522]]}, 422, "30522"),
    ({"input": [[101, 2**63]]}, 422, "token id"),
    ({"input": [[101.5]]}, 422, "token id"),
    ({"input": [[101] * 257]}, 422, "257"),
    ({"input": "x", "dimensions": 0}, 422, "dimensions"),
    ({"input": "x", "dimensions": "9"}, 422, "dimensions"),
    ({"input": "x", "dimensions": 10**9}, 422, "384"),
    ({"input": "x", "encoding_format": "hex"}, 422, "encoding_format"),
    ({"input": "x", "precision": "int3"}, 422, "precision"),
    ({"input": "x", "model": 3}, 422, "model"),
    ({"input": "x", "model": "gpt-9"}, 404, "gpt-9"),
    ({"input": "x", "prompt": 1}, 422, "prompt"),
    ({"input": [[101]], "prompt": "x"}, 422, "prompt"),
    ([], 422, "object"),
    ("x", 422, "object"),
]


@pytest.mark.parametrize(("body", "status", "words"), BAD)
def test_what_makes_no_sense_is_told(service: Any, body: Any, status: int, words: str) -> None:
    answer = service.client.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert words in document["detail"] and document["status"] == status
    assert document["type"].startswith("urn:anytorch:problem:") and document["instance"] == "/v1/embeddings"
    assert document["error"]["message"] and document["error"]["type"]


@pytest.mark.parametrize("body", [b"", b"{", b'{"input": NaN}', b'{"input": "\\ud800"}', b"\xff\xfe", b"[" * 60_000])
def test_what_is_not_json_is_told(service: Any, body: bytes) -> None:
    answer = service.client.post("/v1/embeddings", content=body)
    assert answer.status_code == 400 and answer.json()["type"].endswith(":not-json")


def test_too_many_texts_and_tokens(serve: Callable[..., Any]) -> None:
    service = serve(max_texts=3, max_request_tokens=50)
    assert ask(service, input=["a"] * 3).status_code == 200
    many = ask(service, input=["a"] * 4)
    assert many.status_code == 413 and many.json()["type"].endswith("too-many-texts")
    long = ask(service, input=["word " * 60])
    assert long.status_code == 413 and long.json()["type"].endswith("too-many-tokens")


def test_requests_that_wait_together_share_a_batch(serve: Callable[..., Any], gate: Callable[[Any], Any]) -> None:
    service = serve()
    closed = gate(service)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(ask, service, input="first")
        assert closed.waiting.wait(120)
        rest = [pool.submit(ask, service, input=f"text {n}") for n in range(8)]
        until(lambda: service.embedding.queue.stats.waiting_requests == 8, "all to wait")
        closed.open.set()
        assert first.result().status_code == 200
        found = np.concatenate([vectors(one.result()) for one in rest])
    assert closed.batches == 2
    np.testing.assert_array_equal(found, service.embedding.engine.encode([f"text {n}" for n in range(8)]))


# --- OpenAI's client -------------------------------------------------------------------------------------------------


@pytest.fixture
def official(service: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0)


def test_the_official_client_reads_vectors(official: openai.OpenAI, service: Any) -> None:
    answer = official.embeddings.create(input=TEXTS, model="all-MiniLM-L6-v2")  # asks for base64 by itself
    np.testing.assert_array_equal(
        np.array([row.embedding for row in answer.data], np.float32), service.embedding.engine.encode(TEXTS)
    )
    assert answer.usage.prompt_tokens > 0
    floats = official.embeddings.create(input="x", model="default", encoding_format="float", dimensions=8)
    assert len(floats.data[0].embedding) == 8


def test_the_official_client_lists_models(official: openai.OpenAI) -> None:
    assert [model.id for model in official.models.list()] == ["all-MiniLM-L6-v2"]


def test_the_official_client_shows_our_words(official: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        official.embeddings.create(input="x", model="gpt-9")
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions"):
        official.embeddings.create(input="x", model="default", dimensions=0)
    with pytest.raises(openai.NotFoundError, match="text-model"):
        official.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])


@pytest.fixture
def counted(service: Any) -> Iterator[list[int]]:
    """The characters of every call of the Rust tokenizer."""
    tokenizer, sizes = service.embedding.engine._tokenizer, list[int]()
    real = tokenizer._encode

    def encode(texts: list[str]) -> Any:
        sizes.append(sum(map(len, texts)))
        return real(texts)

    tokenizer._encode = encode
    yield sizes
    tokenizer._encode = real


@pytest.mark.parametrize("text", ["中文", "今天天气很好，我们去公园。", "word ", "!"])
def test_of_a_long_text_no_more_is_tokenized_than_the_model_can_use(
    service: Any, counted: list[int], text: str
) -> None:
    text *= 1_000_000 // len(text)
    long = service.client.post("/v1/embeddings", json={"input": text}).json()
    assert sum(counted) < 10_000
    short = service.client.post("/v1/embeddings", json={"input": text[:3000]}).json()
    assert long["data"] == short["data"] and long["usage"] == short["usage"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/similarity", "/v1/search"])
@pytest.mark.parametrize(("first", "then"), [("", "a"), ("b ", "a"), ("", "😀"), ("e", "\u0301")])
def test_a_text_that_cannot_be_cut_has_a_limit(
    service: Any, counted: list[int], path: str, first: str, then: str
) -> None:
    text = first + then * 900_000
    bodies = {
        "/v1/embeddings": {"input": text},
        "/v1/similarity": {"a": [text]},
        "/v1/search": {"queries": ["x"], "corpus": [text]},
    }
    answer = service.client.post(path, json=bodies[path])
    assert answer.status_code == 422 and "too long" in answer.json()["detail"], answer.text
    assert sum(counted) < 10_000 and len(answer.content) < 1000


def test_many_texts_are_tokenized_some_at_a_time(service: Any, counted: list[int]) -> None:
    texts = [f"{place} " * (100 + place) for place in range(500)]
    engine = service.embedding.engine
    whole = engine.tokenize(texts, prompt="query: ")
    assert len(counted) == 1
    parts = tokenize(engine, texts, "query: ")
    assert len(counted) > 2 and all(size < 600_000 for size in counted)
    assert (
        (parts.ids == whole.ids).all() and (parts.starts == whole.starts).all() and parts.truncated == whole.truncated
    )


def test_a_prompt_has_a_limit(service: Any) -> None:
    """It is put before every text: a long one before many texts would be gigabytes."""
    answer = service.client.post("/v1/embeddings", json={"input": ["x"] * 2000, "prompt": "y" * 1_000_000})
    assert answer.status_code == 422 and answer.json()["error"]["param"] == "prompt"
