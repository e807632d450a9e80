"""Who may ask, and how much: keys, hosts, origins, rates, sizes, slow clients, headers."""

from __future__ import annotations

import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.waiting import until

from anytorch.errors import UsageError
from anytorch.serve.keys import add_key, read_keys
from anytorch.serve.limits import Rates
from anytorch.serve.options import ServeOptions, from_json, to_json

KEY = "sesame-" + "x" * 20


def raw(port: int, *parts: bytes, pause_s: float = 0.0, wait_s: float = 60.0) -> bytes:
    """Send bytes as they are and read until the service closes the connection or is silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as made:
        found = b""
        try:
            for part in parts:
                made.sendall(part)
                time.sleep(pause_s)
            while chunk := made.recv(65536):
                found += chunk
        except (TimeoutError, ConnectionError):
            pass
        return found


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.txt"
    path.write_text(f"# who may ask\nalice:{KEY}\n\nplain-key-without-a-name\n")
    return path


def test_a_key_is_needed_where_one_is_configured(serve: Callable[..., Any], key_file: Path) -> None:
    service = serve(api_key_file=key_file)
    body = {"input": "x"}
    missing = service.client.post("/v1/embeddings", json=body)
    assert missing.status_code == 401 and missing.headers["www-authenticate"] == "Bearer"
    assert missing.json()["error"]["type"] == "authentication_error"
    for wrong in ("x", KEY[:-1], KEY + "x", "alice", f"alice:{KEY}"):
        answer = service.client.post("/v1/embeddings", json=body, headers={"Authorization": f"Bearer {wrong}"})
        assert answer.status_code == 401, wrong
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"X-API-Key": "plain-key-without-a-name"}):
        assert service.client.post("/v1/embeddings", json=body, headers=headers).status_code == 200
    # The page, the API's documentation and the health checks are open; nothing else is.
    assert service.client.get("/v1/readyz").status_code == 200
    assert service.client.get("/").status_code == 200
    for path in ("/v1/devices", "/v1/models", "/metrics", "/api/models", "/nowhere"):
        assert service.client.get(path).status_code == 401, path
    named = service.client.get("/openapi.json").json()  # what there is, is no secret
    assert named["components"]["securitySchemes"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no key"), ("short\n", "at least"), ("a:" + "k" * 20 + "\na:" + "q" * 20, "used twice"), ("ä" * 20, "ASCII")],
)
def test_a_key_file_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_keys(tmp_path / "keys")


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "keys")


def test_new_keys_are_appended_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice:{KEY}")  # without a line's end
    made = add_key(path, "bob")
    keys = read_keys(path)
    assert keys.name_of(KEY.encode()) == "alice" and keys.name_of(made.encode()) == "bob"
    assert keys.name_of(b"") is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_network_is_refused_without_keys(key_file: Path) -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        with pytest.raises(UsageError, match="API key") as caught:
            ServeOptions(host=host).require_safe()
        assert "--new-key" in caught.value.hint
        ServeOptions(host=host, api_key_file=key_file).require_safe()
    for host in ("127.0.0.1", "localhost", "::1", "127.5.5.5"):
        ServeOptions(host=host).require_safe()


# --- hosts and origins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::2]", "localhost.evil"])
def test_another_host_s_name_is_refused_on_loopback(service: Any, host: str) -> None:
    answer = service.client.get("/v1/readyz", headers={"Host": host})
    assert answer.status_code == 421 and answer.json()["type"].endswith("unknown-host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]:8765"])
def test_this_machine_s_names_are_taken(service: Any, host: str) -> None:
    assert service.client.get("/v1/readyz", headers={"Host": host}).status_code == 200


def test_a_request_without_a_host_is_refused(service: Any) -> None:
    assert b" 421 " in raw(service.port, b"GET /v1/readyz HTTP/1.0\r\n\r\n")


def test_another_name_can_be_allowed(serve: Callable[..., Any]) -> None:
    service = serve(allow_hosts=("box.local",))
    assert service.client.get("/v1/readyz", headers={"Host": "box.local:80"}).status_code == 200


def test_pages_of_other_sites_may_not_post(service: Any) -> None:
    body = b'{"model": "all-MiniLM-L6-v2"}'
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        answer = service.client.post("/api/load-model", content=body, headers={"Origin": origin})
        assert answer.status_code == 403, origin
        assert "access-control-allow-origin" not in answer.headers
    own = service.client.post("/v1/embeddings", json={"input": "x"}, headers={"Origin": service.url})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


def test_an_allowed_origin_gets_its_headers(serve: Callable[..., Any]) -> None:
    service = serve(allow_origins=("https://app.example",))
    headers = {"Origin": "https://app.example"}
    asked = service.client.options("/v1/embeddings", headers={**headers, "Access-Control-Request-Method": "POST"})
    assert asked.status_code == 204 and "authorization" in asked.headers["access-control-allow-headers"]
    for answer in (
        asked,
        service.client.post("/v1/embeddings", json={"input": "x"}, headers=headers),
        service.client.post("/v1/embeddings", json={}, headers=headers),
        service.client.get("/v1/models", headers=headers),
    ):
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
    other = service.client.post("/v1/embeddings", json={"input": "x"}, headers={"Origin": "https://b.example"})
    assert other.status_code == 403


# --- how much --------------------------------------------------------------------------------------------------------


def test_a_client_that_asks_too_often_waits(serve: Callable[..., Any]) -> None:
    service = serve(rate_limit=0.01)  # the next one in a hundred seconds
    answers = [service.client.get("/v1/models") for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["type"].endswith("rate-limit")
    for path in ("/v1/readyz", "/metrics"):  # who watches is never too often
        assert service.client.get(path).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere this machine has one loopback address")
def test_preflights_of_one_address_do_not_use_up_another_s(serve: Callable[..., Any], key_file: Path) -> None:
    service = serve(rate_limit=0.01, api_key_file=key_file, allow_origins=("https://a.example",))
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    for address in ("127.0.0.2", "127.0.0.3"):
        with httpx.Client(
            transport=httpx.HTTPTransport(local_address=address), base_url=service.url, timeout=120
        ) as client:
            found = [client.options("/v1/embeddings", headers=headers).status_code for _ in range(2)]
        assert found == [204, 429]


def test_a_bucket_fills_again() -> None:
    now = [0.0]
    rates = Rates(2.0, burst=2, clock=lambda: now[0])
    assert [rates.wait_s("a") for _ in range(2)] == [0, 0]
    assert rates.wait_s("a") == pytest.approx(0.5)
    assert rates.wait_s("b") == 0
    now[0] = 0.5
    assert rates.wait_s("a") == 0 and rates.wait_s("a") > 0
    for number in range(20_000):
        rates.wait_s(str(number))
    assert len(rates._buckets) <= 10_000


def test_a_body_that_is_too_large(serve: Callable[..., Any]) -> None:
    service = serve(max_body_nbytes=2000)
    body = b'{"input": "' + b"x" * 3000 + b'"}'
    answer = service.client.post("/v1/embeddings", content=body)
    assert answer.status_code == 413 and answer.json()["type"].endswith("body-too-large")
    for path in ("/v1/embeddings", "/v1/similarity"):  # without saying how long it is
        chunked = service.client.post(path, content=iter([body[:1500], body[1500:]]))
        assert chunked.status_code == 413, path
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
    assert b" 413 " in raw(service.port, head)
    assert service.client.post("/v1/embeddings", json={"input": "x"}).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", "1e400x"])
def test_a_timeout_that_makes_no_sense(service: Any, value: str) -> None:
    answer = service.client.post("/v1/embeddings", json={"input": "x"}, headers={"X-Request-Timeout": value})
    assert answer.status_code == 400 and answer.json()["type"].endswith("bad-timeout")


# --- slow and malformed clients --------------------------------------------------------------------------------------


def test_a_client_that_sends_its_headers_slowly_is_let_go(serve: Callable[..., Any]) -> None:
    service = serve(header_timeout_s=0.3, body_timeout_s=0.3)
    assert b" 408 " in raw(service.port, b"POST /v1/embeddings HTTP/1.1\r\nHost: lo")
    assert b" 408 " in raw(service.port, b"")
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    assert b" 408 " in raw(service.port, head, b'{"input"')
    assert b" 408 " in raw(service.port, head.replace(b"embeddings", b"similarity"), b'{"a"')
    until(lambda: service.app.guard.under_way == 0, "the last one to be let go")
    # Byte by byte, each in time, the whole too slow:
    slow = raw(service.port, *[bytes([byte]) for byte in b"GET /v1/readyz HTTP/1.1\r\n"], pause_s=0.03)
    assert b" 408 " in slow or slow == b""
    # Head and body are sent one after the other: between them a busy machine may be as slow as those.
    until(lambda: service.client.post("/v1/embeddings", json={"input": "x"}).status_code == 200, "a quick one")


def test_a_connection_that_is_kept_may_rest_between_requests(serve: Callable[..., Any]) -> None:
    service = serve(header_timeout_s=0.3, body_timeout_s=0.3)

    def rests() -> bool:  # again where this client was too slow between connecting and asking
        with httpx.Client(base_url=service.url, timeout=120) as client:
            first = client.get("/v1/readyz").status_code
            time.sleep(0.6)
            return (first, client.get("/v1/readyz").status_code) == (200, 200)

    until(rests, "two answers on one connection")


def test_a_request_behind_a_slow_one_waits_for_its_turn(serve: Callable[..., Any], gate: Callable[[Any], Any]) -> None:
    service = serve(header_timeout_s=0.5, body_timeout_s=0.5)
    closed = gate(service)
    body = b'{"input":"x"}'
    one = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    threading.Timer(1.5, closed.open.set).start()
    answer = raw(service.port, one + one + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert answer.count(b" 200 OK") == 3 and b" 408 " not in answer


def test_headers_have_a_limit(service: Any) -> None:
    head = b"GET /v1/readyz HTTP/1.1\r\nHost: localhost\r\nX-Long: "
    assert b" 431 " in raw(service.port, head + b"x" * 200_000)


@pytest.mark.parametrize(
    "line", [b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"]
)
def test_what_is_not_http_is_told(service: Any, line: bytes) -> None:
    answer = raw(service.port, line)
    assert b" 400 " in answer and b"application/problem+json" in answer


# --- answers ---------------------------------------------------------------------------------------------------------


def test_every_answer_has_its_safety_headers(service: Any) -> None:
    for answer in (
        service.client.get("/v1/readyz"),
        service.client.post("/v1/embeddings", json={"input": "x"}),
        service.client.get("/nowhere"),
        service.client.post("/v1/embeddings", content=b"{"),
        service.client.get("/docs"),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "server" not in answer.headers
    assert "script-src 'self'" in service.client.get("/docs").headers["content-security-policy"]
    assert service.client.get("/nowhere").headers["content-security-policy"].startswith("default-src 'none'")


def test_a_failure_of_ours_shows_no_traceback(serve: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    service = serve()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret of the engine")

    service.embedding.engine.tokenize = broken
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/similarity", {"a": ["x"]})):
        answer = service.client.post(path, json=body)
        assert answer.status_code == 500 and answer.json()["type"].endswith(":internal")
        assert "secret" not in answer.text and "Traceback" not in answer.text
        reference = answer.json()["detail"].rpartition(" ")[2]
        assert "a secret of the engine" in caplog.text and reference in caplog.text


def test_paths_lead_nowhere(service: Any) -> None:
    for path in (
        "/web/../app.py",
        "/web/%2e%2e/app.py",
        "/web/..%2f..%2fapp.py",
        "/web//etc/passwd",
        "/web/%00",
        "/web/",
    ):
        answer = raw(service.port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert b" 404 " in answer.partition(b"\r\n")[0], path
        assert b"create_app" not in answer and b"root:" not in answer


def test_options_survive_the_way_to_a_worker(tmp_path: Path) -> None:
    options = ServeOptions(
        port=1, models=("a", "b"), model_folders=(tmp_path,), api_key_file=tmp_path / "k", rate_limit=2.5,
        allow_hosts=("x",), run_folder=tmp_path, text_model=None,
    )  # fmt: skip
    assert from_json(to_json(options)) == options


@pytest.mark.parametrize(
    "wrong",
    [{"workers": 0}, {"port": 70_000}, {"timeout_s": 0}, {"drain_s": -1}, {"rate_limit": 0.0}, {"max_texts": 0},
     {"model_folders": (Path("/nowhere/at/all"),)}, {"allow_origins": ("example.org",)}],
)  # fmt: skip
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServeOptions(**wrong)
