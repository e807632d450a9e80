"""The clients of soak.py: right requests whose answers are checked, and hostile ones. Each runs until `end` is set."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import malformed
import numpy as np
import requests
from load import request_bytes

MODEL = "all-MiniLM-L6-v2"
SLOW = 40  # connections that send a byte now and then
TEXTS = ["a short text", "two cats sit on a mat", "the market closed higher on Friday", "x", "Ein Satz auf Deutsch."]
LIKE_THE_FIRST = 0.97  # cosine of an answer and the first one: models are swapped for their int8 forms and back
ACCEPTED = {200, 429, 503, 504}  # a right request is answered, or refused with a reason while there is too much to do


@dataclass
class Tally:
    """What one kind of client sent and got; one thread writes, everybody reads afterwards."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of what was answered with 200
    wrong: list[str] = field(default_factory=list)

    def note(self, status: int, seconds: float) -> None:
        self.statuses[str(status)] += 1
        if status == 200:
            self.seconds.append(seconds)

    def summary(self) -> dict[str, Any]:
        times = np.array(self.seconds) if self.seconds else None
        return {
            "sent": sum(self.statuses.values()),
            "statuses": dict(sorted(self.statuses.items())),
            "p50_s": round(float(np.percentile(times, 50)), 3) if times is not None else None,
            "p99_s": round(float(np.percentile(times, 99)), 3) if times is not None else None,
            "most_s": round(float(times.max()), 3) if times is not None else None,
            "wrong": self.wrong[:10],
            "wrong_count": len(self.wrong),
        }


class Clients:
    """What they share: the port, the end, and the first vector that each text got."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.base = f"http://127.0.0.1:{port}"
        self.end = threading.Event()
        self.first: dict[str, np.ndarray[Any, Any]] = {}

    # --- right requests -----------------------------------------------------------------------------------------------

    def _asking(
        self, tally: Tally, requests_of: Iterator[tuple[str, dict[str, Any]]], check: Callable[[Any, Any], str]
    ) -> None:
        """Send one request after the other on a connection that is opened anew when it is lost, as clients do."""
        connection: http.client.HTTPConnection | None = None
        while not self.end.is_set():
            path, body = next(requests_of)
            began = time.perf_counter()
            try:
                connection = connection or http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                data = answer.read()
            except (OSError, http.client.HTTPException) as exc:
                tally.statuses[type(exc).__name__] += 1
                if connection is not None:
                    connection.close()
                connection = None
                self.end.wait(0.05)
                continue
            tally.note(answer.status, time.perf_counter() - began)
            if answer.status == 200:
                why = check(body, json.loads(data))
            else:
                why = "" if answer.status in ACCEPTED else f"{answer.status}: {data[:200]!r}"
                self.end.wait(min(1.0, float(answer.headers.get("retry-after") or 0.1)))
            if why:
                tally.wrong.append(f"{path}: {why}")
        if connection is not None:
            connection.close()

    def embeddings(self, tally: Tally, chance: random.Random) -> None:
        def made() -> Iterator[tuple[str, dict[str, Any]]]:
            while True:
                yield "/v1/embeddings", {"input": chance.choices(TEXTS, k=chance.choice([1, 1, 2, 16]))}
                self.end.wait(chance.random() * 0.1)

        def check(body: dict[str, Any], answer: dict[str, Any]) -> str:
            vectors = [np.array(row["embedding"]) for row in answer["data"]]
            if len(vectors) != len(body["input"]):
                return f"{len(vectors)} vectors for {len(body['input'])} texts"
            for text, vector in zip(body["input"], vectors, strict=True):
                wanted = self.first.setdefault(text, vector)
                near = float(vector @ wanted / (np.linalg.norm(vector) * np.linalg.norm(wanted)))
                if not near >= LIKE_THE_FIRST:
                    return f"the vector of {text!r} is another one: cosine {near:.3f}"
            return ""

        self._asking(tally, made(), check)

    def forecasts(self, tally: Tally, chance: random.Random) -> None:
        def made() -> Iterator[tuple[str, dict[str, Any]]]:
            while True:
                horizon = chance.choice([2, 3, 5])
                yield "/v1/forecast", {"sample": True, "horizon": horizon, "samples": 1, "seed": 1}
                self.end.wait(chance.random())

        def check(body: dict[str, Any], answer: dict[str, Any]) -> str:
            rows = answer.get("forecast") or answer.get("rows") or answer.get("mean") or answer.get("candles")
            if isinstance(rows, dict):
                rows = next(iter(rows.values()))
            return "" if rows and len(rows) == body["horizon"] else f"no {body['horizon']} bars: {str(answer)[:200]}"

        self._asking(tally, made(), check)

    def completions(self, tally: Tally, chance: random.Random) -> None:
        def made() -> Iterator[tuple[str, dict[str, Any]]]:
            while True:
                words = " ".join(chance.choices(["one", "word", "after", "another"], k=chance.choice([1, 5, 50])))
                yield "/v1/completions", {"prompt": words, "max_tokens": chance.choice([1, 8, 32]), "temperature": 0.7}
                self.end.wait(chance.random())

        def check(body: dict[str, Any], answer: dict[str, Any]) -> str:
            found = answer["usage"]["completion_tokens"]
            return "" if 1 <= found <= body["max_tokens"] else f"{found} tokens, {body['max_tokens']} were asked for"

        self._asking(tally, made(), check)

    # --- hostile ones -------------------------------------------------------------------------------------------------

    def malformed(self, tally: Tally, chance: random.Random) -> None:
        answers = malformed.Answers()
        session = requests.Session()
        for path, body, headers in malformed.broken_bodies(chance):
            if self.end.is_set():
                break
            if path == "/v1/benchmark":  # a right one would measure for seconds on all cores
                continue
            malformed.ask(
                session, answers, f"POST {path}", method="POST", url=self.base + path, data=body, headers=headers
            )
            self.end.wait(0.02)
        tally.statuses += Counter({name.removeprefix("POST "): count for name, count in answers.statuses.items()})
        lost = [one for one in answers.wrong if one["status"] == 0]  # by a worker that was killed meanwhile
        tally.statuses["lost"] += len(lost)
        tally.wrong += [str(one)[:400] for one in answers.wrong if one["status"] != 0]

    def huge(self, tally: Tally, chance: random.Random) -> None:
        """One at a time: bodies near and above the limit of 16 MiB, and small ones that ask for much."""
        columns = "timestamps,open,high,low,close," + ",".join(f"c{n}" for n in range(100_000))
        bodies: list[tuple[str, bytes]] = [
            ("/v1/embeddings", json.dumps({"input": "字" * 5_000_000}, ensure_ascii=False).encode()),
            ("/v1/embeddings", json.dumps({"input": "word " * 3_000_000}).encode()),
            ("/v1/embeddings", json.dumps({"input": "x" * (17 << 20)}).encode()),
            ("/v1/embeddings", json.dumps({"input": ["a text"] * 2048}).encode()),
            ("/v1/embeddings", json.dumps({"input": ["a text"] * 100_000}).encode()),
            ("/v1/forecast", json.dumps({"csv": columns + "\n" + "1," * 100_004 + "1\n", "horizon": 2}).encode()),
            ("/v1/completions", json.dumps({"prompt": "one " * 2_000_000, "max_tokens": 8}).encode()),
            ("/v1/completions", json.dumps({"prompt": "one", "max_tokens": 10**9}).encode()),
            ("/v1/similarity", json.dumps({"a": ["one two"] * 2048, "b": ["three"] * 2048, "map": False}).encode()),
        ]
        while not self.end.is_set():
            path, body = chance.choice(bodies)
            began = time.perf_counter()
            try:
                answer = requests.post(
                    self.base + path, data=body, headers={"Content-Type": "application/json"}, timeout=120
                )
            except requests.RequestException as exc:
                tally.statuses[type(exc).__name__] += 1
                continue
            tally.note(answer.status_code, time.perf_counter() - began)
            if answer.status_code in (500, 502):
                tally.wrong.append(f"{path} of {len(body):,} bytes: {answer.status_code} {answer.text[:200]}")
            self.end.wait(chance.random() * 2)

    def slow(self, tally: Tally, chance: random.Random) -> None:
        """Connections that send a byte now and then, of headers or of a body; each that is closed is opened again."""
        starts = [
            b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
            b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{",
            b"G",
        ]
        opened: list[socket.socket] = []
        while not self.end.is_set():
            while len(opened) < SLOW:
                try:
                    one = socket.create_connection(("127.0.0.1", self.port), timeout=30)
                    one.sendall(chance.choice(starts))
                except OSError as exc:
                    tally.statuses[type(exc).__name__] += 1
                    break
                one.setblocking(False)
                opened.append(one)
                tally.statuses["opened"] += 1
            for one in list(opened):
                try:
                    one.send(b"a")
                    closed = not one.recv(4096)
                except BlockingIOError:
                    closed = False
                except OSError:
                    closed = True
                if closed:
                    one.close()
                    opened.remove(one)
                    tally.statuses["closed by the service"] += 1
            self.end.wait(0.5)
        for one in opened:
            one.close()

    def leaving(self, tally: Tally, chance: random.Random) -> None:
        """Clients that ask for something long and are gone before it is there."""
        bodies = [
            ("/v1/embeddings", {"input": ["a text of some words " * 20] * 64}),
            ("/v1/completions", {"prompt": "one", "max_tokens": 500, "stream": True}),
            ("/v1/forecast", {"sample": True, "horizon": 20, "samples": 4}),
        ]
        while not self.end.is_set():
            path, body = chance.choice(bodies)
            data = json.dumps(body).encode()
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=30) as one:
                    one.sendall(request_bytes(path, data)[: -len(data) // 2 if chance.random() < 0.5 else None])
                    self.end.wait(chance.random() * 0.3)
                    if chance.random() < 0.5:  # a reset instead of an end
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                tally.statuses["left"] += 1
            except OSError as exc:
                tally.statuses[type(exc).__name__] += 1
            self.end.wait(chance.random())

    def loads(self, tally: Tally, chance: random.Random) -> None:
        """The embedding model in another format and back, and models that do not exist or may not be read."""
        wanted = [
            {"model": MODEL, "quantization": "int8"},
            {"model": MODEL},
            {"model": "no-such-model"},
            {"model": "../../../etc/passwd"},
            {"model": MODEL, "device": "cuda:99"},
        ]
        while not self.end.wait(5 + 10 * chance.random()):
            began = time.perf_counter()
            try:
                answer = requests.post(f"{self.base}/api/load-model", json=chance.choice(wanted), timeout=120)
            except requests.RequestException as exc:
                tally.statuses[type(exc).__name__] += 1
                continue
            tally.note(answer.status_code, time.perf_counter() - began)
            if answer.status_code == 500:
                tally.wrong.append(answer.text[:300])
