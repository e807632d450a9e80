"""Every results file says where it is from, and every measured table of the pages is what the files say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
NEEDED = ("script", "arguments", "date", "commit", "dirty", "versions", "machine")

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import benchmark_tables as tables  # noqa: E402

# Written before 18 November 2026, when a file began to need all of NEEDED, and the script that wrote each. What is measured
# again leaves this list; nothing may be added to it. (Three of that day's own files are in it, comfyui-tiny, stand-in-h200
# and webgpu-h200-launcher: they were measured hours before their scripts wrote all of this.)
BEFORE = {
    **dict.fromkeys(("compile-cpu", "compile-h200", "compile-training-h200", "compile-webgpu-h200"), "bench/compile.py"),
    **dict.fromkeys(("decode-compiled-h200", "decode-h200"), "bench/decode.py"),
    "device-tests-h200": "tests/device/run.py",
    **dict.fromkeys(("embed-cpu", "embed-cpu-avx2"), "bench/embed_cpu.py"),
    **dict.fromkeys(("embed-h200", "embed-h200-first"), "bench/embed_gpu.py"),
    "embed-pool-h200": "bench/embed_pool.py",
    "finetune-forecast": "examples/finetune_forecast.py",
    "finetune-h200": "bench/finetune.py",
    **dict.fromkeys(
        ("forecast-cpu", "forecast-cpu-formats", "forecast-h200", "forecast-h200-engine-room", "forecast-h200-first",
         "forecast-h200-memory"), "bench/forecast.py",
    ),
    **dict.fromkeys(
        ("graphs-cpu", "graphs-h200", "graphs-h200-block", "graphs-h200-block-16-rows", "graphs-h200-block-one-row",
         "graphs-webgpu-h200"), "bench/graphs.py",
    ),
    "h200-benchmark": "bench/backends.py",
    "comfyui-tiny": "bench/comfyui.py",
    "info-startup": "bench/info_startup.py",
    **dict.fromkeys(("lite-cpu", "lite-cpu-h200"), "bench/lite.py"),
    "lite-gpu-h200": "bench/lite_gpu.py",
    **dict.fromkeys(("packed-encoder-busy", "packed-encoder-levels"), "bench/packed_encoder.py"),
    **dict.fromkeys(("quant-cpu", "quant-h200", "quant-h200-cold", "quant-memory", "quant-quality"), "bench/quant.py"),
    **dict.fromkeys(("seed-samples-cpu", "seed-samples-h200"), "tools/run_seed_samples.py"),
    "serve-cpu": "bench/serve.py",
    "serve-load": "bench/serve_load.py",
    "soak-cpu": "bench/soak.py",
    "stand-in": "bench/stand_in.py",
    "stand-in-h200": "bench/stand_in_cuda.py",
    **dict.fromkeys(("tiers-cpu", "tiers-cpu-engine-room", "tiers-h200"), "bench/tiers.py"),
    "tiers-training-h200": "bench/tiers_training.py",
    "trees": "bench/trees.py",
    **dict.fromkeys(
        ("webgpu-h200", "webgpu-h200-decode", "webgpu-h200-engine-room", "webgpu-h200-first", "webgpu-h200-interleaved",
         "webgpu-h200-launcher", "webgpu-h200-small-ops", "webgpu-overhead"), "bench/webgpu_gpu.py",
    ),
    "webgpu-peers": "bench/webgpu_peers.py",
    "webgpu-training": "bench/webgpu_training.py",
    "wheel": "bench/wheel.py",
}  # fmt: skip
FILES = sorted(path.stem for path in RESULTS.glob("*.json"))


def lacking(name: str) -> list[str]:
    found = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return [key for key in NEEDED if not isinstance(found, dict) or key not in found]


@pytest.mark.parametrize("name", FILES)
def test_a_results_file_says_where_it_is_from(name: str) -> None:
    if name in BEFORE:
        assert (ROOT / BEFORE[name]).exists(), "its script is gone: so must the file be"
        assert lacking(name), f"{name} says everything now: take it off BEFORE"
        return
    assert not lacking(name), "use write_results of bench/provenance.py"
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    script = ROOT / found["script"]
    assert script.exists() and script.suffix == ".py", found["script"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["commit"]) and isinstance(found["dirty"], bool)
    assert re.match(r"20\d\d-\d\d-\d\dT", found["date"]) and found["versions"]["torch"] and found["machine"]["cpu"]


def test_the_list_of_older_files_only_shrinks() -> None:
    assert set(BEFORE) <= set(FILES), f"gone: {set(BEFORE) - set(FILES)}"
    assert len(BEFORE) <= 62


def test_every_bench_that_writes_a_file_says_where_it_is_from() -> None:
    for path in sorted((ROOT / "bench").glob("*.py")):
        source = path.read_text("utf-8")
        if "--output" in source or '--out"' in source:
            writes = "write_results" in source or "embed_cpu" in path.name or path.name in ("backends.py",)
            assert writes, f"{path.name} writes a results file in a way of its own"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_measured_tables_are_what_the_files_say(page: Path) -> None:
    text = page.read_text("utf-8")
    assert tables.written(text) == text, "run: python docs/tools/benchmark_tables.py"


def test_every_part_is_on_a_page() -> None:
    named = {name for page in tables.PAGES for name in tables.MARK.findall(page.read_text("utf-8"))}
    assert {name for name, _ in named} == set(tables.PARTS)


# Tables on these pages that hold numbers and are not written from files, each with its reason.
BY_HAND = {
    "| [Kernel graphs](": "the four last rows of the overview: their sections are written by their own scripts",
    "| [Decoding texts](": "the same",
    "| quantized layers |": "the same",
    "| `anytorch.lite` |": "the same",
    "| BERT encoder": "bench/compile.py, compile-h200.json",
    "| Llama-style": "the same",
    "| ResNet-18": "the same",
    "| BERT, training": "the same",
    "| Llama, training": "the same",
    "| Qwen3": "bench/decode.py, decode-h200.json",
    "| Llama-3.2-1B": "the same",
    "|  |": "the same, its rows of several texts",
    "| direct,": "noted while the work was done (†)",
    "| through the page cache": "the same",
    "| four threads": "the same, its head",
}


# Sections whose table is still written by hand, each with its reason.
UNWRITTEN = {"bench/modes.py": "measured on the day this test came; its results file is not in the repository yet"}


def without_unwritten(text: str) -> str:
    parts = re.split(r"^(?=## )", text, flags=re.M)
    return "".join(part for part in parts if not any(name in part.partition("\n")[0] for name in UNWRITTEN))


def test_no_other_table_holds_measured_numbers() -> None:
    marked = re.compile(r"<!-- (?:results|bench)[^>]*-->.*?<!-- (?:end of [^>]*|bench/[^>]*: end) -->", re.S)
    for page in tables.PAGES:
        text = re.sub(r"^```.*?^```", "", marked.sub("", without_unwritten(page.read_text("utf-8"))), flags=re.M | re.S)
        for line in text.splitlines():
            if not line.startswith("|") or not re.search(r"\d", re.sub(r"\]\([^)]*\)|`[^`]*`", "", line)):
                continue
            assert any(line.startswith(head) for head in BY_HAND), f"{page.name}: a number by hand: {line[:100]}"


def test_prose_with_measured_numbers_names_its_file() -> None:
    """Outside of tables: a paragraph with rates or times stands in a section that names a results file, or carries †."""
    whole = without_unwritten((ROOT / "docs" / "benchmarks.md").read_text("utf-8"))
    text = re.sub(r"^```.*?^```", "", whole, flags=re.M | re.S)
    measured = re.compile(r"\d(?:[\d.,]*)\s?(?:times|ms|µs|s\b|GB/s|MiB|TFLOP/s|%|tokens/s)")
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        named = set(re.findall(r"([a-z0-9]+(?:-[a-z0-9]+)+)\.json", section))
        for paragraph in section.split("\n\n"):
            if not paragraph.startswith(("|", "<!--")) and measured.search(paragraph):
                assert "†" in paragraph or named & set(FILES), paragraph[:120]
