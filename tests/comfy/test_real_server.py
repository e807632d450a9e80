"""The pack in the real ComfyUI, over its HTTP interface.

    ANYTORCH_COMFYUI=/path/to/ComfyUI ANYTORCH_COMFYUI_PYTHON=/its/venv/bin/python pytest tests/comfy/test_real_server.py

ANYTORCH_COMFYUI_PYTHON is the Python that has ComfyUI's requirements and anytorch; the running one if it is not named.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

contract = sys.modules["anytorch_tests_comfy_contract"]
ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "comfyui" / "anytorch_nodes"
# Read when the tests are collected: every test's environment is cleared of our own variables.
COMFYUI = os.environ.get("ANYTORCH_COMFYUI", "")
PYTHON = os.environ.get("ANYTORCH_COMFYUI_PYTHON", sys.executable)
STARTS_WITHIN_S, RUNS_WITHIN_S = 180, 120

pytestmark = [
    pytest.mark.skipif(not COMFYUI, reason="ANYTORCH_COMFYUI does not name a folder with ComfyUI"),
    pytest.mark.slow,
]


@dataclass(frozen=True)
class Server:
    url: str
    base: Path

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """What /history says of the prompt once it is done."""
        number = self.ask("/prompt", {"prompt": prompt})["prompt_id"]
        for _ in range(RUNS_WITHIN_S * 5):
            history = self.ask(f"/history/{number}")
            if number in history and history[number]["status"]["completed"] is not None:
                done: dict[str, Any] = history[number]
                return done
            time.sleep(0.2)
        pytest.fail(f"not done after {RUNS_WITHIN_S} s")

    def picture(self, about: dict[str, str]) -> Any:
        import numpy as np
        from PIL import Image

        with urllib.request.urlopen(f"{self.url}/view?{urllib.parse.urlencode(about)}", timeout=120) as answer:
            return np.asarray(Image.open(io.BytesIO(answer.read())).convert("RGB"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("comfyui")
    for name in ("custom_nodes", "input", "output", "models", "temp", "user"):
        (base / name).mkdir()
    shutil.copytree(PACK, base / "custom_nodes" / "anytorch_nodes")
    shutil.copy(Path(COMFYUI) / "input" / "example.png", base / "input")
    shutil.copy(Path(__file__).with_name("contract.py"), base / "custom_nodes")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "ANYTORCH_CACHE_DIR": str(base / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    log = base / "log.txt"
    with log.open("w") as written:
        process = subprocess.Popen(
            [
                *(PYTHON, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port), "--disable-api-nodes"),
                *("--base-directory", str(base), "--database-url", f"sqlite:///{base}/comfyui.db"),
            ],
            cwd=COMFYUI,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    made = Server(f"http://127.0.0.1:{port}", base)
    try:
        wait_for(made, process, log)
        yield made
    finally:
        process.terminate()
        process.wait(120)


def wait_for(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(STARTS_WITHIN_S * 2):
        try:
            server.ask("/system_stats")
            return
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None:
                break
            time.sleep(0.5)
    pytest.fail(f"ComfyUI did not start:\n{log.read_text()[-3000:]}", pytrace=False)


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((PACK / "api_workflows" / f"{name}.json").read_text())
    return loaded


def test_every_node_is_there(server: Server) -> None:
    known = server.ask("/object_info")
    for name, title in NODE_DISPLAY_NAME_MAPPINGS.items():
        assert known[name]["display_name"] == title
        assert known[name]["category"].startswith("PyTorch Custom")
        assert known[name]["output"] == list(NODE_CLASS_MAPPINGS[name].RETURN_TYPES)  # type: ignore[attr-defined]


def test_the_page_finds_the_workflows_and_the_script(server: Server) -> None:
    names = server.ask("/workflow_templates")["anytorch_nodes"]
    assert sorted(names) == sorted(path.stem for path in (PACK / "example_workflows").glob("*.json"))
    assert "/extensions/anytorch_nodes/anytorch_text.js" in server.ask("/extensions")


@pytest.mark.parametrize("name", contract.CASES)
def test_our_host_does_as_this_one(server: Server, name: str) -> None:
    """The contract of the host that the other tests run on, kept by the original."""
    for run in contract.CASES[name]:
        if run.refused:
            with pytest.raises(urllib.error.HTTPError) as caught:
                server.ask("/prompt", {"prompt": run.prompt})
            assert run.refused in caught.value.read().decode()
            continue
        done = server.run(run.prompt)
        messages = dict(done["status"]["messages"])
        if run.error is not None:
            error = messages["execution_error"]
            assert (error["node_id"], error["exception_message"].strip()) == run.error
        else:
            assert done["status"]["status_str"] == "success", done["status"]
        if run.ui is not None:
            assert {key: ui["text"] for key, ui in done["outputs"].items()} == run.ui
        if run.cached is not None:
            assert sorted(messages["execution_cached"]["nodes"]) == run.cached


# save_weights comes before load_weights, which needs its file.
ORDER = ["mlp", "loss", "tensor_operations", "save_weights", "load_weights", "devices", "text_embedding", "forecast"]


@pytest.mark.parametrize("name", ORDER)
def test_workflow(server: Server, name: str) -> None:
    done = server.run(workflow(name))
    assert done["status"]["status_str"] == "success", done["status"]
    assert done["outputs"]
    for output in done["outputs"].values():
        for about in output.get("images", []):
            pixels = server.picture(about)
            assert pixels.ndim == 3 and pixels.std() > 0, "a picture of one colour"


def test_the_second_run_is_cached(server: Server) -> None:
    server.run(workflow("mlp"))
    messages = dict(server.run(workflow("mlp"))["status"]["messages"])
    assert sorted(messages["execution_cached"]["nodes"]) == [str(n) for n in range(1, 9)]


def test_the_loss_is_right(server: Server) -> None:
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(server.base / "input" / "example.png") as picture:
        pixels = torch.from_numpy(np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0)
    given = pixels.movedim(-1, 0)[None]
    blurred = torch.nn.functional.avg_pool2d(given, 3, 1, padding=1)
    wanted = float(torch.nn.functional.mse_loss(blurred.clamp(0, 1), given))
    told = server.run(workflow("loss"))["outputs"]["3"]["text"][0]
    assert told.startswith("mse: ") and float(told[5:]) == pytest.approx(wanted, rel=1e-3)


def test_a_message_on_the_node(server: Server) -> None:
    prompt = workflow("mlp")
    prompt["2"]["inputs"]["in_channels"] = 4
    status = server.run(prompt)["status"]
    assert status["status_str"] == "error"
    error = dict(status["messages"])["execution_error"]
    assert error["node_id"] == "2" and error["exception_type"] == "anytorch.errors.InputError"
    assert error["exception_message"].startswith("in_channels is 4, but the image has 3 channels")
    assert "hint: set in_channels to 3" in error["exception_message"]


def test_refused_before_it_runs(server: Server) -> None:
    prompt = workflow("load_weights")
    prompt["2"]["inputs"]["file"] = "gone.safetensors"
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.ask("/prompt", {"prompt": prompt})
    errors = json.loads(caught.value.read())["node_errors"]["2"]["errors"]
    assert "gone.safetensors does not exist" in errors[0]["details"]


def test_words_on_the_nodes(server: Server, missing: Callable[[str, str], NoReturn]) -> None:
    """In the page: an error's sentence on the node that failed, gone with the next run; a text where a node shows one."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        missing("chromium", "the nodes' words are read in a real browser")
    document = json.loads((PACK / "example_workflows" / "mlp.json").read_text(encoding="utf-8"))
    document["nodes"][1]["widgets_values"][0] = 4  # in_channels
    shown = "id => window.app.graph.getNodeById(id).widgets?.find(one => one.name === 'shown_text')?.value"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_function("window.app?.graph && window.app.extensionManager", timeout=120_000)
        page.evaluate("async d => { await window.app.loadGraphData(d) }", document)
        page.evaluate("async () => { await window.app.queuePrompt(0, 1) }")
        page.wait_for_function(f"() => ({shown})(2)", timeout=60_000)
        assert page.evaluate(shown, 2).startswith("in_channels is 4, but the image has 3 channels")
        saved = page.evaluate("() => window.app.graph.serialize().nodes.find(one => one.id === 2).widgets_values")
        assert saved[:2] == [4, 8] and len(saved) == 10, "the words are not part of the workflow"
        page.evaluate("() => { window.app.graph.getNodeById(2).widgets[0].value = 3 }")
        page.evaluate("async () => { await window.app.queuePrompt(0, 1) }")
        page.wait_for_function(f"() => ({shown})(8)", timeout=60_000)
        assert "float32 on cpu" in page.evaluate(shown, 8) and page.evaluate(shown, 2) is None
        browser.close()
