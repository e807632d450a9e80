"""One service and one Chromium for all tests of the page. The service asks for a key, as it does off loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.graph.made import stored

from anytorch import settings
from anytorch.measured.verdict import Question, Trial, Verdict

REPOSITORY = Path(__file__).parents[2]
SCREENSHOTS = REPOSITORY / ".cache" / "screenshots"
# Compiled code and the devices tried outlive the test run: only the first one on a machine pays for them.
CACHE = REPOSITORY / ".cache" / "web-tests" / os.environ.get("PYTEST_XDIST_WORKER", "alone")
KEY = "a-key-only-for-the-tests-of-the-page"
START_S = 120
PATIENCE_MS = 150_000  # of every step: a first run tries the devices and loads torch, perhaps on a busy machine
# As anytorch.quant writes it (measured on a 2-core EPYC): the service shows what is in the cache.
TUNED = Verdict(
    Question("quantized product", "int8 weights 1536x512, 1 row of float32", "cpu", {"size": "1536x512", "rows": 1}),
    (
        Trial("torch int8pack", refused="rounds inputs to bfloat16; prefer='speed' allows that"),
        Trial("torch cast", refused="wrong: off by 0.1 of the answer's size; 0.001 is allowed"),
        Trial("unpack, then multiply", 0.00032637399999657646),
        Trial("cpp dot", 0.00010667800052033272),
        Trial("cpp panel", 0.00014613599887525197),
    ),
    "cpp dot",
    "107 µs; next is cpp panel, 146 µs",
)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a causal language model in it: random weights, so its text is nonsense, but real all the same.

    Written by hand: importing transformers to save it would cost more than all that the browser does.
    """
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("text-models") / "tiny-llama"
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<begin>", "<end>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["one word after another makes a text, and a text makes a page"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>", "eos_token": "<end>"}
    words["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(words))

    vocabulary, hidden, inner, layers = tokenizer.get_vocab_size(), 32, 64, 2
    shape: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary}
    shape |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "rms_norm_eps": 1e-6}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 512}
    shape |= {"bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "rope_theta": 10_000.0}
    shape |= {"hidden_act": "silu", "torch_dtype": "float32", "attention_bias": False, "mlp_bias": False}
    (folder / "config.json").write_text(json.dumps(shape))
    random = numpy.random.default_rng(3)

    def weight(*size: int) -> Any:
        return random.normal(0, 0.3, size).astype(numpy.float32)

    weights = {"model.embed_tokens.weight": weight(vocabulary, hidden), "lm_head.weight": weight(vocabulary, hidden)}
    weights["model.norm.weight"] = numpy.ones(hidden, numpy.float32)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = numpy.ones(hidden, numpy.float32)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{name}self_attn.{part}.weight"] = weight(hidden, hidden)
        for part in ("gate_proj", "up_proj"):
            weights[f"{name}mlp.{part}.weight"] = weight(inner, hidden)
        weights[f"{name}mlp.down_proj.weight"] = weight(hidden, inner)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder.parent


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, text_models: Path) -> Iterator[str]:
    """The address of the service, started as a person would start it."""
    for package in ("fastapi", "uvicorn", "orjson"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("service")
    keys = folder / "keys.txt"
    keys.write_text(f"tests:{KEY}\n")
    log = folder / "log.txt"
    CACHE.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(CACHE / "benchmarks", ignore_errors=True)  # earlier runs would change what the page shows
    shutil.rmtree(CACHE / "measured", ignore_errors=True)
    (CACHE / "measured").mkdir()
    (CACHE / "measured" / f"{TUNED.question.key}.json").write_text(json.dumps(TUNED.as_json()))
    shutil.rmtree(CACHE / "graph" / "records", ignore_errors=True)
    with settings.use(cache_dir=str(CACHE)):
        stored()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANYTORCH_")}
    environment |= {"ANYTORCH_CACHE_DIR": str(CACHE), "ANYTORCH_CONFIG": str(folder / "config.toml")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "anytorch", "serve", "--port", "0", "--no-browser", "--threads", "1"]
    command += ["--api-key-file", str(keys), "--model-folder", str(text_models), "--drain", "1"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        yield _address_of(process, log)
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address_of(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        found = re.search(r"ready at (http://\S+)", log.read_text())
        if found:
            return found[1].rstrip("/") + "/"
        if process.poll() is not None:
            break
        time.sleep(0.05)
    pytest.fail(f"the service did not start:\n{log.read_text()}", pytrace=False)


@pytest.fixture(scope="session")
def ask(service: str) -> Callable[[str], bytes]:
    """`ask("v1/graphs")`: what the service itself answers, to compare the page with."""

    def ask(path: str) -> bytes:
        request = urllib.request.Request(service + path, headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=PATIENCE_MS / 1000) as answer:
            return bytes(answer.read())

    return ask


@pytest.fixture(scope="module")  # not the session: while it is open, asyncio.run() is refused in this thread
def browser(missing: Callable[[str, str], NoReturn]) -> Iterator[Any]:
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        missing("chromium", "the page is opened in a real browser: apt install chromium")
    try:
        from playwright.sync_api import expect, sync_playwright
    except ModuleNotFoundError:
        missing("chromium", "playwright is not installed")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield opened
        opened.close()


@dataclass
class Visit:
    """A tab of its own, and what went wrong in it."""

    page: Any
    address: str
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def open(self, panel: str) -> Any:
        self.page.goto(f"{self.address}#{panel}")
        self.page.locator(f"#panel-{panel} h1").wait_for()
        return self.page.locator(f"#panel-{panel}")

    def shoot(self, name: str) -> None:
        """The whole page as a picture: the window is made as tall as what is in it, so that fixed parts stay put."""
        size = self.page.viewport_size
        self.page.evaluate("scrollTo(0, 0)")
        tall = self.page.evaluate("document.documentElement.scrollHeight")
        self.page.set_viewport_size({"width": size["width"], "height": max(size["height"], tall)})
        self.page.wait_for_timeout(120)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")
        self.page.set_viewport_size(size)


@pytest.fixture
def visit(browser: Any, service: str) -> Iterator[Callable[..., Visit]]:
    """`visit(width=…, theme=…, key=…)` opens a tab. At the end no console error and no foreign request is allowed."""
    opened: list[Visit] = []
    contexts = []

    def visit(*, width: int = 1280, height: int = 800, theme: str = "light", key: str | None = KEY) -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,
            reduced_motion="reduce",
            accept_downloads=True,
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.set_default_timeout(PATIENCE_MS)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('anytorch-api-key', '{key}')")
        page = context.new_page()
        made = Visit(page, service)
        page.on("console", lambda m: made.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: made.errors.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith((service, "blob:")) else made.outside.append(r.url))
        contexts.append(context)
        opened.append(made)
        return made

    yield visit
    for made in opened:
        assert not made.errors, made.errors
        assert not made.outside, made.outside
    for context in contexts:
        context.close()
