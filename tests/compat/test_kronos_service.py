"""Kronos's service where its document has it: `uvicorn services.kronos_fastapi.main:app` from the folder gitSource."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("tried")  # the trial itself is tests/devices/test_try_out.py
FOLDER = ROOT / "compat" / "gitSource"
pytest.importorskip("uvicorn")


def started(port: int, environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """It writes a line for each question. To a file: a pipe that nobody reads would be full where the start takes long."""
    command = ["uvicorn", "services.kronos_fastapi.main:app", "--host", "0.0.0.0", "--port", str(port)]
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command], cwd=FOLDER, env=environment, stdout=log, stderr=subprocess.STDOUT
        )


@pytest.fixture(params=["auto", "xpu"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The device that was asked for, and the address of the service."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "KRONOS_DEVICE": request.param,
        "OMP_NUM_THREADS": "1",
    }
    process = started(port, environment, tmp_path)
    try:
        yield request.param, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(300)


@pytest.mark.long
def test_readyz_says_the_device(service: tuple[str, str]) -> None:
    asked, url = service
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline
        try:
            answer = httpx.get(f"{url}/v1/readyz")
        except httpx.TransportError:
            time.sleep(0.05)
            continue
        if answer.status_code == 200:
            break
        assert answer.json()["status"] == "starting", answer.text
        time.sleep(0.05)
    health = answer.json()
    assert health["device"] == "cpu" or asked == "auto"
    if asked == "auto":
        assert health["device_warning"] is None
    else:
        assert asked in health["device_warning"]
    assert [model["id"] for model in health["models"]["forecast"]] == ["tiny"]
    if asked == "auto":
        body = {"sample": True, "horizon": 3, "samples": 2}
        made = httpx.post(f"{url}/v1/forecast", json=body, timeout=120)
        assert made.status_code == 200 and made.json()["device"] == health["device"]
        # It listens on every address, but without a key it answers to this machine's own names alone.
        assert httpx.get(f"{url}/v1/readyz", headers={"Host": "kronos.example"}, timeout=120).status_code == 421


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/ with Kronos-mini and its tokenizer as published, with random weights, and data/ with candles."""
    torch = pytest.importorskip("torch")
    import anytorch
    from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer

    torch.manual_seed(0)
    root, pair = tmp_path_factory.mktemp("kronos"), PUBLISHED["kronos-mini"]
    Kronos(**pair.config).save_pretrained(root / "models" / "Kronos-mini")
    KronosTokenizer(**pair.tokenizer_config).save_pretrained(root / "models" / "Kronos-Tokenizer-2k")
    (root / "data").mkdir()
    anytorch.sample_candles(80).to_csv(root / "data" / "prices.csv", index=False)
    (root / "secret.csv").write_text("open,high,low,close\n1,1,1,1\n")
    (root / "keys.txt").write_text("page:a-key-of-sixteen-or-more\n")
    (root / "keys.txt").chmod(0o600)
    return root


@pytest.mark.slow
def test_the_service_of_another_model_with_the_original_page_s_requests(published: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "KRONOS_DEVICE": "cpu",
        "KRONOS_MODEL": "kronos-mini",
        "KRONOS_MODEL_FOLDER": str(published / "models"),
        "KRONOS_DATA_FOLDER": str(published / "data"),
        "KRONOS_API_KEY_FILE": str(published / "keys.txt"),
    }
    process = started(port, environment, published)
    try:
        ready(f"http://127.0.0.1:{port}")
        named = {"Authorization": "Bearer a-key-of-sixteen-or-more", "Host": "kronos.example"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=named, timeout=300) as client:
            assert httpx.get(f"{client.base_url}/api/model-status", timeout=120).status_code == 401
            status = client.get("/api/model-status").json()
            assert status["loaded"] and status["current_model"]["device"] == "cpu"
            assert client.get("/api/available-models").json()["models"]["kronos-mini"]["context_length"] == 2048
            loaded = client.post("/api/load-model", json={"model_key": "kronos-mini", "device": "cpu"}).json()
            assert loaded["success"] and loaded["device"] == "cpu", loaded
            assert loaded["model_info"]["context_length"] == 2048
            unknown = client.post("/api/load-model", json={"model_key": "kronos-huge"})
            assert unknown.status_code == 404 and "kronos-huge" in unknown.json()["error"]
            (file,) = client.get("/api/data-files").json()
            info = client.post("/api/load-data", json={"file_path": file["path"]}).json()["data_info"]
            assert info["rows"] == 80 and "close" in info["prediction_columns"]
            for path in (str(published / "secret.csv"), "../secret.csv", "/etc/passwd", ""):
                assert client.post("/api/load-data", json={"file_path": path}).status_code == 400
            body = {"file_path": file["path"], "lookback": 60, "pred_len": 4, "sample_count": 2}
            made = client.post("/api/predict", json=body).json()
            assert made["success"] and len(made["prediction_results"]) == 4 == len(made["actual_data"]), made
            assert [row["timestamp"] for row in made["prediction_results"]] == [
                row["timestamp"] for row in made["actual_data"]
            ]
            assert client.post("/api/predict", json={**body, "lookback": 500}).status_code == 400
            assert client.post("/api/predict", json={**body, "temperature": "hot"}).status_code == 400
            beyond = client.post("/api/predict", json={**body, "lookback": 79}).json()
            assert not beyond["has_comparison"] and beyond["prediction_results"][0]["timestamp"] > info["end_date"]
    finally:
        process.terminate()
        process.wait(300)


def ready(url: str) -> None:
    deadline = time.monotonic() + 300
    while True:
        assert time.monotonic() < deadline
        try:
            if httpx.get(f"{url}/v1/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "environment", "why"),
    [
        (["--host", "0.0.0.0"], {}, "admits other machines without an API key"),
        ([], {"KRONOS_HOST": "0.0.0.0"}, "admits other machines without an API key"),
        ([], {"KRONOS_MODEL_FOLDER": "/nowhere"}, "there is no such folder"),
        ([], {"KRONOS_DATA_FOLDER": "/nowhere"}, "there is no such folder"),
        ([], {"KRONOS_PORT": "99999"}, "--port (KRONOS_PORT) 99999: use a whole number from 0 to 65,535"),
    ],
)
def test_options_that_cannot_work_say_so(arguments: list[str], environment: dict[str, str], why: str) -> None:
    code = "import sys, os; from services.kronos_fastapi.config import parse; parse(sys.argv[1:], os.environ)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=FOLDER, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0 and why in done.stderr


REFUSALS = """
import sys
from pathlib import Path
from types import SimpleNamespace

from fastapi import FastAPI
from fastapi.testclient import TestClient
from services.kronos_fastapi.page import page_routes, window

import anytorch
from anytorch.serve.options import ServeOptions

folder = Path(sys.argv[1])
anytorch.sample_candles(40, freq="1h").to_csv(folder / "plain.csv", index=False)
app = FastAPI()
app.include_router(page_routes(folder))
app.state.service = SimpleNamespace(options=ServeOptions())
client = TestClient(app)
fine = {"file_path": "plain.csv", "lookback": 20, "pred_len": 4}
for path, body, status, why in [
    ("load-data", {"file_path": "plain.csv", "rows": 3}, 422, "unknown field 'rows'; use file_path"),
    ("load-model", {"model_key": "tiny", "devise": "cpu"}, 422, "unknown field 'devise'"),
    ("load-model", {"model_key": "tiny", "device": 3}, 400, "device is '3', not a name"),
    ("predict", {**fine, "sample_cuont": 4}, 422, "unknown field 'sample_cuont'"),
    ("predict", {**fine, "pred_len": 2.5}, 400, "use a whole number"),
    ("predict", {**fine, "pred_len": 1200000}, 400, "pred_len is 1,200,000; use a number from 1 to"),
    ("predict", {**fine, "start_date": ["2024"]}, 400, "is not a time"),
    ("predict", {**fine, "start_date": "soon"}, 400, "is not a time"),
]:
    answer = client.post(f"/api/{path}", json=body)
    assert answer.status_code == status and why in answer.json()["error"], (body, answer.status_code, answer.text)
frame = anytorch.sample_candles(40, freq="1h")
for zone in (None, "Europe/Berlin"):
    frame["timestamps"] = frame["timestamps"].dt.tz_localize(zone)
    begin = frame["timestamps"].iloc[5]
    for text in (begin.isoformat()[:16], begin.tz_localize("UTC").isoformat() if zone is None else begin.isoformat()):
        rows, _ = window(SimpleNamespace(frame=frame), text, 8, 4)
        assert rows["timestamps"].iloc[0] == begin and len(rows) == 12, (zone, text)
"""


def test_what_the_page_would_ignore_is_refused_and_a_start_may_have_a_zone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS, str(tmp_path)],
        cwd=FOLDER, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_names_are_anytorch_s_own() -> None:
    code = (
        "from services.kronos_fastapi import predictor, routes, schemas\n"
        "import anytorch, anytorch.serve.schemas\n"
        "assert predictor.KronosPredictor is anytorch.KronosPredictor\n"
        "assert schemas.ReadyResponse is anytorch.serve.schemas.Health and 'device' in schemas.ReadyResponse.model_fields\n"
        "assert any(route.path == '/v1/readyz' for route in routes.router.routes)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
