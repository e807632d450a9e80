"""Requests for two hosts, from other sites, or such as nobody thought of: each gets an answer of ours, and a short one."""

from __future__ import annotations

import json
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from anytorch.serve import bodies, problems
from anytorch.serve.limits import host_name
from anytorch.serve.problems import Problem, private_folders, reading
from anytorch.serve.routes import embeddings, forecast

# --- for whom ----------------------------------------------------------------------------------------------------------

TARGETS = [
    b"GET http://evil.example/v1/readyz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://localhost/v1/readyz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET HTTPS://evil.example/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /v1/readyz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    b"GET /v1/readyz HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n",
    b"POST http://evil.example/v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{\"input\":\"x\"}",
]  # fmt: skip
HOSTS = [
    *("[::1]evil.com", "[::1]:80evil", "localhost:evil", "localhost@evil.com", "localhost/evil.com", "a,localhost"),
    *("[::1", "[]"),
]


@pytest.mark.parametrize("request_bytes", TARGETS)
def test_a_request_for_two_hosts_is_refused(service: Any, request_bytes: bytes) -> None:
    answered = exchange(service.port, request_bytes)
    assert answered.startswith(b"HTTP/1.1 400") and b"ambiguous-host" in answered, answered[:200]


def exchange(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as made:
        made.sendall(request)
        found = b""
        while b"}" not in found and (chunk := made.recv(65536)):
            found += chunk
        return found


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_only_begins_like_one_of_ours_is_refused(service: Any, host: str) -> None:
    answered = exchange(service.port, f"GET /v1/readyz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert answered.startswith(b"HTTP/1.1 421"), answered[:100]


def test_names_with_and_without_a_port() -> None:
    given = {
        b"localhost": "localhost",
        b"LocalHost:1": "localhost",
        b"[::1]": "::1",
        b"[::1]:80": "::1",
        b"a.b-c:65535": "a.b-c",
        b" localhost\t": "localhost",
        b"\x85[::1]\x85": "",  # a space in Latin-1, and no space in HTTP
    }
    assert {header: host_name(header) for header in given} == given


# --- from other sites ----------------------------------------------------------------------------------------------------


def surveyed(service: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every survey that is asked for, whether it is a new one; none is made."""
    asked: list[bool] = []
    real = service.state.surveys.survey

    async def survey(*, refresh: bool = False, **options: Any) -> Any:
        asked.append(refresh)
        return await real(**options)

    monkeypatch.setattr(service.state.surveys, "survey", survey)
    return asked


@pytest.mark.parametrize("path", ["/v1/devices", "/v1/doctor"])
@pytest.mark.parametrize("query", ["?refresh=true", "?%72efresh=1", "?refresh=0&refresh=yes"])
def test_a_page_of_another_site_cannot_have_the_devices_tried(
    service: Any, monkeypatch: pytest.MonkeyPatch, path: str, query: str
) -> None:
    asked = surveyed(service, monkeypatch)
    for site in ("cross-site", "same-site", "Cross-Site"):
        answer = service.client.get(path + query, headers={"Sec-Fetch-Site": site})
        assert answer.status_code == 403 and answer.json()["type"].endswith("foreign-origin")
        assert service.client.get(path, headers={"Sec-Fetch-Site": site}).status_code == 200, "looking is free"
    assert True not in asked
    for headers in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        assert service.client.get(path + query, headers=headers).status_code == 200
        assert asked[-1] is True


def test_a_page_that_is_allowed_may_have_the_devices_tried(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve(allow_origins=("https://app.example",))
    asked = surveyed(service, monkeypatch)
    for origin, status in (("https://app.example", 200), ("https://other.example", 403)):
        headers = {"Sec-Fetch-Site": "cross-site", "Origin": origin}
        assert service.client.get("/v1/devices?refresh=true", headers=headers).status_code == status
    assert asked == [True]


# --- short answers -------------------------------------------------------------------------------------------------------

LONG = "z" * 30_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/{LONG}", None), (f"/v1/models/{LONG}", None), (f"/v1/graphs/{LONG}", None), (f"/v1/doctor/{LONG}", None),
        (f"/web/{LONG}", None), (f"/v1/devices?refresh={LONG}", None),
        ("/v1/embeddings", {"input": "x", "model": LONG}), ("/v1/embeddings", {"input": "x", "precision": LONG}),
        ("/v1/embeddings", {"input": "x", "encoding_format": [LONG]}), ("/v1/embeddings", {LONG: 1}),
        ("/v1/similarity", {"a": LONG}), ("/v1/similarity", {"a": ["x"], "model": LONG}),
        ("/v1/search", {"queries": [1], "corpus": {LONG: LONG}, "k": LONG}), ("/v1/forecast", {"csv": LONG, "model": LONG}),
        ("/v1/completions", {"prompt": "x", "model": LONG}), ("/v1/chat/completions", {"messages": [{LONG: LONG}]}),
        ("/api/load-model", {"model": LONG[:400], "job": LONG}), ("/api/load-model", {"model": LONG[:400]}),
        ("/v1/benchmark", {"devices": [LONG[:100]], "workloads": [LONG[:100]]}),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_an_answer_does_not_repeat_what_was_sent(service: Any, path: str, body: Any) -> None:
    answer = service.client.get(path) if body is None else service.client.post(path, json=body)
    assert 400 <= answer.status_code < 500, answer.status_code
    assert len(answer.content) < 3000 and answer.content.count(b"z") < 1100, len(answer.content)


def test_an_answer_does_not_say_where_things_lie_here(serve: Callable[..., Any], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    service = serve(model_folders=(tmp_path,))
    answer = service.client.post("/api/load-model", json={"model": "broken"})
    assert 400 <= answer.status_code < 600 and str(tmp_path) not in answer.text, answer.text
    assert str(tmp_path.resolve()) not in answer.text
    for folder in private_folders():
        told = Problem(
            503, "x", "title", f"cannot read {folder}/models/a.json", hint=f"see {folder}", param=f"{folder}/x"
        )
        for path in ("/v1/embeddings", "/x"):
            assert folder not in told.body(path).decode() and b"models/a.json" in told.body(path)


# --- what nobody thought of ----------------------------------------------------------------------------------------------

SURPRISES = [
    RecursionError("deep"), TypeError("kind"), OverflowError("large"), struct.error("bytes"), KeyError("key"),
    ZeroDivisionError("zero"), UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"),
]  # fmt: skip


@pytest.mark.parametrize("error", SURPRISES, ids=lambda error: type(error).__name__)
def test_what_a_body_makes_fail_is_the_client_s(
    service: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    for module in (bodies, embeddings, forecast):
        monkeypatch.setattr(module, "parse_json", fails)
    for path in ("/v1/embeddings", "/v1/similarity", "/v1/forecast", "/v1/completions", "/api/load-model"):
        answer = service.client.post(path, content=b'{"input": "x"}', headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and answer.headers["content-type"] == "application/problem+json", path
        assert "Traceback" not in answer.text and str(error) not in answer.text


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Path, "home", RuntimeError("Could not determine home directory.")),
        (Path, "cwd", FileNotFoundError(2, "No such file or directory")),
        (tempfile, "gettempdir", FileNotFoundError(2, "No usable temporary directory found")),
    ],
    ids=["no home", "no working folder", "nowhere to write"],
)
def test_a_folder_that_is_not_there_hides_no_answer(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(owner, name, fails)
    private_folders.cache_clear()
    try:
        body = orjson.loads(Problem(401, "no-key", "A key is required", f"not in {sys.prefix}").body("/v1/models"))
        assert body["status"] == 401 and body["detail"] == "not in …", "what can be told is still hidden"
    finally:
        private_folders.cache_clear()


def test_what_is_ours_to_tell_stays_as_it_is() -> None:
    for error in (
        Problem(404, "x", "X"),
        problems.UsageError("no"),
        orjson.JSONDecodeError("no", "{", 0),
        MemoryError(),
    ):
        with pytest.raises(type(error)) as caught, reading("it"):
            raise error
        assert caught.value is error
    with reading("it"):
        pass


@pytest.mark.parametrize(
    "candles",
    [
        {"timestamps": ["9998-01-01", "2024-01-01", "9999-01-01"]},
        {"timestamps": ["0001-01-01", "0001-01-02", "0001-01-03"]},
        {"timestamps": ["9999-12-29", "9999-12-30", "9999-12-31"]}, {"timestamps": ["\ud800", "\ud800", "\ud800"]},
        {"timestamps": [10**18, 10**30, 1]}, {"timestamps": [1e308, -1e308, 0]}, {"open": [1e308, 5e-324, 1e308]},
        {"timestamps": ["2261-12-30", "2261-12-31", "2262-04-11"]},
    ],
)  # fmt: skip
def test_times_at_the_ends_of_the_calendar(forecaster: Any, candles: dict[str, Any]) -> None:
    good: dict[str, Any] = {"timestamps": ["2024-01-01", "2024-01-02", "2024-01-03"]}
    good |= {name: [2.0, 3.0, 4.0] for name in ("open", "high", "low", "close")}
    body = {"candles": good | candles, "horizon": 1000, "samples": 1, "repair": True}
    raw = json.dumps(body).encode()
    answer = forecaster.client.post("/v1/forecast", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text


# A body that each end point takes, at the least.
LEAST: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "x"},
    "/v1/similarity": {"a": ["x"]},
    "/v1/search": {"queries": ["x"], "corpus": ["y"]},
    "/v1/forecast": {"sample": True},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/benchmark": {},
    "/api/load-model": {"model": "x"},
}


def test_a_misspelt_field_is_named_everywhere(service: Any) -> None:
    document = httpx.get(f"{service.url}/openapi.json", timeout=60).json()
    with_body = [
        (path, method) for path, methods in document["paths"].items() for method in methods
        if "requestBody" in methods[method] or method not in ("get", "delete")
    ]  # fmt: skip
    assert {path for path, _ in with_body} == LEAST.keys()
    for path, method in with_body:
        answered = httpx.request(method, f"{service.url}{path}", json={**LEAST[path], "dimentions": 3}, timeout=60)
        assert answered.status_code == 422, answered.text
        detail = answered.json()["detail"]
        assert "dimentions" in detail and "is not a field of this end point" in detail, path


def test_what_lies_within_a_body_is_as_strict(service: Any) -> None:
    """Every object that a request's schema names refuses what it does not know, and every number has limits."""
    document = httpx.get(f"{service.url}/openapi.json", timeout=60).json()
    schemas, seen = document["components"]["schemas"], set()
    free = {"metadata"}  # of the caller's own
    data = {"input", "open", "high", "low", "close", "volume", "amount", "values", "prompt"}

    def walk(part: Any, name: str) -> None:
        if isinstance(part, list):
            for one in part:
                walk(one, name)
        if not isinstance(part, dict) or name in free:
            return
        if "$ref" in part:
            target = part["$ref"].rpartition("/")[2]
            if target not in seen:
                seen.add(target)
                walk(schemas[target], target)
            return
        if part.get("type") == "object":
            assert part.get("additionalProperties") is False, f"{name} takes any field"
        if part.get("type") in ("integer", "number") and name not in data:
            low = {"minimum", "exclusiveMinimum", "const"} & part.keys()
            assert low and {"maximum", "exclusiveMaximum", "const"} & part.keys(), f"{name} has no limits: {part}"
        for key, value in part.get("properties", {}).items():
            walk(value, key)
        for key in ("anyOf", "allOf", "oneOf", "items", "prefixItems"):
            walk(part.get(key), name)

    for methods in document["paths"].values():
        for about in methods.values():
            for kind in about.get("requestBody", {}).get("content", {}).values():
                walk(kind["schema"], "body")
            for parameter in about.get("parameters", []):
                walk(parameter["schema"], parameter["name"])
    assert {"Candles", "ChatMessage", "StreamOptions"} <= seen and len(seen) > 8


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"horizn": "3"}, "horizn"), ({"horizn": ""}, "horizn"), ({"csv": "a"}, "twice"), ({"candles": "{}"}, "candles")],
)
def test_a_form_is_as_strict(forecaster: Any, fields: dict[str, str], word: str) -> None:
    table = b"timestamps,open,high,low,close\n2024-01-01,1,2,1,2\n2024-01-02,2,3,2,3\n"
    answer = forecaster.client.post("/v1/forecast", files={"file": ("a.csv", table)}, data=fields)
    assert answer.status_code == 422 and word in answer.json()["detail"], answer.text
    text = {"csv": table.decode(), "horizon": "2", "samples": "1", "seed": ""}  # without an upload
    made = forecaster.client.post("/v1/forecast", files={"symbol": (None, "")}, data=text)
    assert made.status_code == 200 and len(made.json()["forecast"]["close"]) == 2, made.text
