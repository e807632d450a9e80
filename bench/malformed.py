"""Requests that a service must refuse politely: from its own OpenAPI schema (schemathesis), and bytes nobody meant.

Used by serve_load.py for ten thousand of them, and by tests/serve/load for a few hundred.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import requests

READ_NBYTES = 1 << 16  # of an answer: a stream that has begun is closed
TIMEOUT = (5.0, 60.0)
FEW = 8
# Bodies that are right, to be broken in many ways.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["one", "two"], "model": None, "dimensions": 8, "encoding_format": "float"},
    "/v1/similarity": {"a": ["one", "two"], "b": ["three"], "map": True},
    "/v1/search": {"queries": ["one"], "corpus": ["two", "three"], "k": 1},
    "/v1/forecast": {"sample": True, "horizon": 2, "samples": 1, "quantiles": [0.5], "seed": 1, "temperature": 1.0},
    "/v1/completions": {"prompt": "one", "max_tokens": 2, "temperature": 0.5, "stop": ["x"], "stream": False},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2, "stream": True},
    "/v1/benchmark": {"devices": ["cpu"], "seconds": 1},
    "/api/load-model": {"model": "../../etc/passwd", "job": "embeddings", "device": "cpu"},
}
STRANGE = [
    None, True, -1, 0, 1e308, 2**63, 2**1000, 0.5, "", "x", "\x00", "\u202e", "é" * 300, "a" * 70_000, [], [[]], [None],
    [[[[[]]]]], {}, {"a": {}}, ["x", 1], [1, "x"], [2**40], [-1], "NaN", "../../x", "cuda:99", ["x"] * 3000,
]  # fmt: skip


@dataclass
class Answers:
    """What came back: how often which status, and every answer that should not have been."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    slowest_s: float = 0.0

    def note(self, what: str, status: int, body: bytes, kind: str, seconds: float) -> None:
        self.sent += 1
        self.statuses[f"{what} {status}"] += 1
        self.slowest_s = max(self.slowest_s, seconds)
        refused = status >= 400
        if status == 500 or status < 200 or (refused and "problem+json" not in kind):
            self.wrong.append({"request": what, "status": status, "type": kind, "answer": body[:400].decode("latin-1")})


def ask(session: requests.Session, answers: Answers, what: str, **request: Any) -> None:
    began = time.perf_counter()
    # What is right after all is not waited for: a text of a thousand tokens says nothing here.
    request["headers"] = {**(request.get("headers") or {}), "X-Request-Timeout": "0.5"}
    try:
        with session.request(timeout=TIMEOUT, stream=True, allow_redirects=False, **request) as answer:
            body = next(answer.iter_content(READ_NBYTES), b"")
            kind = answer.headers.get("content-type", "")
            answers.note(what, answer.status_code, body, kind, time.perf_counter() - began)
    except (requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL, UnicodeError):
        return  # the client itself would not send this one
    except requests.RequestException as exc:
        answers.sent += 1
        answers.wrong.append({"request": what, "status": 0, "answer": f"{type(exc).__name__}: {exc}"[:400]})


def from_schema(base_url: str, schema: dict[str, Any], each: int, *, seed: int, skip: tuple[str, ...] = ()) -> Answers:
    """`each` requests for every operation of the schema with a body, half of them wrong on purpose; a few for others."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.errors import Unsatisfiable
    from schemathesis.generation import GenerationMode

    answers = Answers()
    session = requests.Session()

    def attack(strategy: Any, label: str, count: int) -> None:
        @seeded(seed)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def send(case: Any) -> None:
            ask(session, answers, label, **case.as_transport_kwargs(base_url=base_url))

        send()

    for found in schemathesis.openapi.from_dict(schema).get_all_operations():
        operation = found.ok()
        if operation.label in skip:
            continue
        number = min(each, FEW) if operation.label.startswith("GET ") else each  # these may try every device anew
        for mode, count in ((GenerationMode.NEGATIVE, number - number // 2), (GenerationMode.POSITIVE, number // 2)):
            try:
                attack(operation.as_strategy(generation_mode=mode), operation.label, max(1, count))
            except Unsatisfiable:
                continue  # an operation without parameters has nothing that could be wrong
    return answers


def broken_bodies(chance: random.Random) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Without end: (path, body, headers)."""
    json_type = {"Content-Type": "application/json"}
    while True:
        path = chance.choice(list(GOOD))
        good = GOOD[path]
        way = chance.randrange(9)
        text = json.dumps(good).encode()
        headers = json_type
        if way == 0:  # cut
            body = text[: chance.randrange(len(text))]
        elif way == 1:  # bytes turned over
            spoiled = bytearray(text)
            for _ in range(chance.randint(1, 8)):
                spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
            body = bytes(spoiled)
        elif way == 2:  # noise
            body = chance.randbytes(chance.randrange(200))
        elif way == 3:  # deeper than any parser should go
            body = b'{"input":' + b"[" * chance.choice([10, 1000, 50_000]) + b"]" * chance.choice([0, 10, 1000])
        elif way == 4:  # a field of another kind
            body = json.dumps({**good, chance.choice(list(good)): chance.choice(STRANGE)}).encode()
        elif way == 5:  # one field less, or one that nobody knows
            left = {name: value for name, value in good.items() if chance.random() < 0.6}
            body = json.dumps({**left, chance.choice(["x", "", "input", "__proto__"]): chance.choice(STRANGE)}).encode()
        elif way == 6:  # not an object
            body = json.dumps(chance.choice(STRANGE)).encode()
        elif way == 7:  # another type, or none
            kinds = ["text/plain", "multipart/form-data; boundary=x", "application/xml", "", "application/json; q"]
            body, headers = text, {"Content-Type": chance.choice(kinds)}
        else:  # numbers that are none, half characters, keys twice
            tail = chance.choice([b'"n":NaN', b'"n":1e999', b'"n":"\\ud800"', b'"input":1,"input":2', b'"n":\xff'])
            body = text[:-1] + b"," + tail + b"}"
        yield path, body, headers


def from_bytes(base_url: str, count: int, *, seed: int, skip: tuple[str, ...] = ()) -> Answers:
    answers = Answers()
    session = requests.Session()
    for path, body, headers in broken_bodies(random.Random(seed)):
        if answers.sent >= count:
            return answers
        if f"POST {path}" not in skip:
            ask(session, answers, f"POST {path}", method="POST", url=base_url + path, data=body, headers=headers)
    return answers
