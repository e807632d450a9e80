"""Health, metrics, devices, the doctor, the page, the API's own documentation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest

import anytorch.serve
from anytorch import __version__
from anytorch.devices.types import Candidate, State
from anytorch.probe.activity import Activity
from anytorch.serve import machine, schemas
from anytorch.serve.app import create_app
from anytorch.serve.options import ServeOptions


def test_readyz_is_red_until_the_model_is_loaded() -> None:
    async def run() -> None:
        app = create_app(ServeOptions(forecast=False, threads=1))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            before = await client.get("/v1/readyz")
            assert before.status_code == 503 and before.json()["status"] == "starting"
            assert (await client.get("/v1/healthz")).status_code == 503
            async with app.router.lifespan_context(app):
                # A request that comes before the model is there waits for it.
                assert (await client.post("/v1/embeddings", json={"input": "x"})).status_code == 200
                after = await client.get("/v1/readyz")
                assert after.status_code == 200 and after.json()["status"] == "ready"

    asyncio.run(run())


def test_what_health_says(service: Any) -> None:
    health = service.client.get("/v1/readyz").json()
    assert health["device"] == "cpu" and health["device_warning"] is None
    assert health["versions"]["anytorch"] == __version__ and health["versions"]["python"]
    (model,) = health["models"]["embeddings"]
    assert model["id"] == "all-MiniLM-L6-v2" and model["loaded"] and model["default"]
    assert model["dim"] == 384 and model["max_length"] == 256
    assert health["models"]["text"] == [] and health["uptime_seconds"] > 0


def test_a_file_that_the_page_has_not_is_a_problem_as_everywhere(service: Any) -> None:
    answer = service.client.get("/web/nothing.js")
    assert answer.status_code == 404 and answer.headers["content-type"] == "application/problem+json"


def test_what_every_request_needs_is_found_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI calls a plain function in a thread, for every request anew, and waits where all threads are taken."""
    entered: list[Any] = []

    async def refused(function: Callable[..., Any], *_: Any, **__: Any) -> Any:
        entered.append(function)
        raise AssertionError(f"{function} was sent to a thread")

    async def run() -> None:
        app = create_app(ServeOptions(forecast=False, threads=1))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            with monkeypatch.context() as patch:
                patch.setattr(anyio.to_thread, "run_sync", refused)  # all of Starlette's and FastAPI's threads
                assert (await client.get("/v1/readyz")).json()["status"] == "starting"
                assert (await client.get("/v1/models")).status_code == 200
        assert not entered

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/readyz", "/v1/healthz"])
def test_health_checks_may_ask_for_the_head_alone(service: Any, path: str) -> None:
    answer = service.client.head(path)
    assert answer.status_code == 200 and answer.content == b""


@pytest.mark.parametrize(("host", "words"), [("127.0.0.1", "the disk is on fire"), ("0.0.0.0", "log says why")])
def test_a_model_that_cannot_be_loaded_is_told(host: str, words: str) -> None:
    """To whom it may concern: health checks need no key, and an error may name folders."""

    async def run() -> None:
        app = create_app(ServeOptions(forecast=False, host=host))

        def broken(_: Any) -> Any:
            raise RuntimeError("the disk is on fire")

        app.state.service.models._build = broken
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
            app.router.lifespan_context(app),
        ):
            for _ in range(12_000):
                health = (await client.get("/v1/readyz")).json()
                if health["status"] != "starting":
                    break
                await asyncio.sleep(0.01)
            assert health["status"] == "failed" and words in health["detail"]
            assert ("disk" in health["detail"]) is (host == "127.0.0.1")
            answer = await client.post("/v1/embeddings", json={"input": "x"})
            assert answer.status_code == 503 and answer.json()["type"].endswith("model-not-loaded")

    asyncio.run(run())


def test_metrics_count_what_happened(serve: Callable[..., Any]) -> None:
    service = serve()
    for _ in range(3):
        service.client.post("/v1/embeddings", json={"input": ["one", "two"]})
    service.client.post("/v1/embeddings", content=b"{")
    service.client.get("/no/such/path/1")
    service.client.get("/no/such/path/2")
    answer = service.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")

    def value(name: str, **labels: str) -> float:
        told = ",".join(f'{key}="{word}"' for key, word in sorted(labels.items()))
        found = re.search(rf"^{name}{re.escape('{' + told + '}') if told else ''} (\S+)$", answer.text, re.M)
        assert found, f"{name} {labels} is not in\n{answer.text}"
        return float(found[1])

    assert value("anytorch_requests_total", route="/v1/embeddings", status="200") == 3
    assert value("anytorch_requests_total", route="/v1/embeddings", status="400") == 1
    assert value("anytorch_requests_total", route="other", status="404") == 2  # one series for all that is not ours
    assert value("anytorch_request_seconds_count", route="/v1/embeddings") == 4
    assert value("anytorch_tokens_total", job="embeddings") == 3 * 6
    assert value("anytorch_batch_texts_sum") == 6 and value("anytorch_batch_tokens_sum") == 18
    assert value("anytorch_compute_seconds_count") == 3 and value("anytorch_queue_seconds_count") == 3
    assert value("anytorch_tokenize_seconds_count") == 3
    assert value("anytorch_queue_requests", model="all-MiniLM-L6-v2") == 0
    assert value("anytorch_memory_bytes", device="cpu") > 10_000_000
    assert value("anytorch_model_loaded", device="cpu", job="embeddings", model="all-MiniLM-L6-v2") == 1


def test_devices_are_listed_with_their_reasons(service: Any) -> None:
    pytest.importorskip("torch")
    document = service.client.get("/v1/devices").json()
    cpu = next(device for device in document["devices"] if device["id"] == "cpu")
    assert cpu["usable"] and cpu["memory"]["total"] > cpu["memory"]["used"] > 0
    absent = [device for device in document["devices"] if device["state"] == "absent"]
    assert absent and all(device["reasons"] for device in absent)
    live = service.client.get("/v1/devices/live").json()["devices"]
    assert next(one for one in live if one["id"] == "cpu")["memory"]["total"] == cpu["memory"]["total"]


def test_a_device_whose_memory_cannot_be_asked_for_is_listed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unaskable:
        def memory(self, index: int) -> Any:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(machine, "registry", lambda: {"webgpu": Unaskable()})
    seen = Candidate("webgpu", "webgpu", 0, "a card that the files name", State.SEEN, 1)
    assert machine.live_of(seen, {}, Activity()) == schemas.LiveDevice(id="webgpu:0")


def test_the_doctor_s_pages(service: Any) -> None:
    for finding in service.client.get("/v1/doctor").json()["findings"]:
        assert finding["severity"] in ("error", "warning", "note") and finding["title"]
    page = service.client.get("/v1/doctor/cpu-only-wheel")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/markdown")
    assert service.client.get("/v1/doctor/no-such-thing").status_code == 404


def test_the_page_s_files(service: Any) -> None:
    page = service.client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    again = service.client.get("/", headers={"If-None-Match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert service.client.head("/").status_code == 200
    for name in re.findall(r'(?:src|href)="(web/[^"#]+)', page.text):
        assert service.client.get(f"/{name}").status_code == 200, name
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.text), "the page loads something from elsewhere"


def test_a_service_without_its_page(serve: Callable[..., Any]) -> None:
    assert serve(page=False).client.get("/").status_code == 404


def test_the_api_documents_itself(service: Any) -> None:
    document = service.client.get("/openapi.json").json()
    wanted = {
        "/v1/readyz", "/v1/healthz", "/v1/devices", "/v1/devices/live", "/v1/doctor", "/v1/embeddings", "/v1/similarity",
        "/v1/search", "/v1/forecast", "/v1/completions", "/v1/chat/completions", "/v1/benchmark", "/v1/benchmark/runs",
        "/v1/graphs", "/v1/graphs/{key}", "/v1/graphs/{key}/picture.svg",
        "/v1/models", "/api/models", "/api/load-model", "/metrics",
    }  # fmt: skip
    assert wanted <= document["paths"].keys()
    names = set(re.findall(r"#/components/schemas/(\w+)", service.client.get("/openapi.json").text))
    assert names <= document["components"]["schemas"].keys(), "a schema is named and not there"
    page = service.client.get("/docs")
    assert all(path in page.text for path in wanted) and "<script" not in page.text and "http" not in page.text


def test_the_reference_names_every_end_point_and_problem(service: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
    for path in service.client.get("/openapi.json").json()["paths"]:
        assert path.replace("{code}", "CODE").replace("{key}", "KEY") in page, path
    sources = "".join(file.read_text() for file in Path(anytorch.serve.__file__).parent.rglob("*.py"))
    codes = set(re.findall(r'Problem\(\s*\d{3}, "([a-z-]+)"', sources))
    assert len(codes) > 15
    assert not [code for code in codes if f"`{code}`" not in page], "a problem that the reference does not name"
