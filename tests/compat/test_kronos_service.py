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


@pytest.fixture(params=["auto", "xpu"])
def service(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
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
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "services.kronos_fastapi.main:app", "--host", "0.0.0.0", "--port", str(port)],
        cwd=FOLDER, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield request.param, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=300)


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
        assert httpx.get(f"{url}/v1/readyz", headers={"Host": "kronos.example"}).status_code == 421


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
