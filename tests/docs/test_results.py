"""Every results file says where it is from, and every measured table of the pages is what the files say."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from anytorch.errors import DeviceUnavailable

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
MESA = ROOT / ".cache" / "mesa" / "lvp.json"
LAVAPIPE = {"VK_ICD_FILENAMES": str(MESA)} if MESA.exists() else {}

sys.path[:0] = [str(ROOT / "docs" / "tools"), str(ROOT / "bench"), str(Path(__file__).parent)]
import benchmark_tables as tables  # noqa: E402
import kernel_tables  # noqa: E402
import modes_tables  # noqa: E402
import results_files  # noqa: E402
import writers  # noqa: E402
from provenance import lacking  # noqa: E402

del sys.path[1:3]  # other folders have modules of these names; the tools' own stays

# Written before 18 November 2026, when a file began to need all of NEEDED, and the script that wrote each. What is measured
# again leaves this list; nothing may be added to it. (Three of that day's own files are in it, comfyui-tiny, stand-in-h200
# and webgpu-h200-launcher: they were measured hours before their scripts wrote all of this.)
BEFORE = {
    **dict.fromkeys(("compile-h200", "compile-training-h200", "compile-webgpu-h200"), "bench/compile.py"),
    **dict.fromkeys(("decode-compiled-h200", "decode-h200"), "bench/decode.py"),
    "device-tests-h200": "tests/device/run.py",
    **dict.fromkeys(("embed-cpu-first", "embed-cpu-avx2"), "bench/embed_cpu.py"),
    **dict.fromkeys(("embed-h200", "embed-h200-first"), "bench/embed_gpu.py"),
    "embed-pool-h200": "bench/embed_pool.py",
    "finetune-forecast": "bench/finetune_example.py",
    "finetune-h200": "bench/finetune.py",
    **dict.fromkeys(
        ("forecast-cpu", "forecast-cpu-formats", "forecast-h200", "forecast-h200-engine-room", "forecast-h200-first",
         "forecast-h200-memory"), "bench/forecast.py",
    ),
    **dict.fromkeys(
        ("graphs-h200", "graphs-h200-block", "graphs-h200-block-16-rows", "graphs-h200-block-one-row",
         "graphs-webgpu-h200"), "bench/graphs.py",
    ),
    "h200-benchmark": "bench/backends.py",
    "comfyui-tiny": "bench/comfyui.py",
    **dict.fromkeys(("lite-cpu", "lite-cpu-h200"), "bench/lite.py"),
    "lite-gpu-h200": "bench/lite_gpu.py",
    **dict.fromkeys(("packed-encoder-busy", "packed-encoder-levels"), "bench/packed_encoder.py"),
    **dict.fromkeys(("quant-cpu", "quant-h200", "quant-h200-cold", "quant-memory", "quant-quality"), "bench/quant.py"),
    **dict.fromkeys(("seed-samples-cpu", "seed-samples-h200"), "tools/run_seed_samples.py"),
    "serve-cpu": "bench/serve.py",
    "serve-load": "bench/serve_load.py",
    "soak-cpu": "bench/soak.py",
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


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_a_results_file_says_where_it_is_from(name: str) -> None:
    if name in BEFORE:
        assert BEFORE[name] in writers.WRITERS, "its script is gone: so must the file be"
        assert lacking(read(name)), f"{name} says everything now: take it off BEFORE"
        return
    found = read(name)
    assert not lacking(found), "use write_results of bench/provenance.py"
    assert found["script"] in writers.WRITERS
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["commit"]) and isinstance(found["dirty"], bool)
    assert re.match(r"20\d\d-\d\d-\d\dT", found["date"]) and found["machine"]["cpu"]


def test_the_list_of_older_files_only_shrinks() -> None:
    assert set(BEFORE) <= set(FILES), f"gone: {set(BEFORE) - set(FILES)}"
    assert len(BEFORE) <= 58


def calls(path: Path) -> set[str]:
    """Names of the functions that a file calls, and of the options that it takes."""
    found = {node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)}
    names = {node.func.id for node in found if isinstance(node.func, ast.Name)}
    first = [node.args[0] for node in found if node.args]
    return names | {one.value for one in first if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def test_every_writer_of_a_results_file_is_known() -> None:
    """What takes a file for its results calls write_results; what calls it is run below."""
    called = {path: calls(path) for folder in ("bench", "tools") for path in sorted((ROOT / folder).glob("*.py"))}
    not_results = {"carried_kernels.py": "kernels", "dist.py": "wheels", "device_session.py": "an archive"}
    for path, names in called.items():
        if names & {"--output", "--out", "--json", "--results"} and path.name not in not_results:
            assert "write_results" in names, f"{path.name} writes a results file in a way of its own"
    known = {path.relative_to(ROOT).as_posix() for path, names in called.items() if "write_results" in names}
    # In a device's test run the interpreter that has our sources on its path writes: the call is in a string.
    assert set(writers.WRITERS) == known | {"tests/device/run.py"}


def run_writers(names: list[str], folder: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "docs" / "writers.py"), str(folder), *names],
        capture_output=True, text=True, check=False, timeout=900, cwd=folder,
        env={**LAVAPIPE, **os.environ, "OMP_NUM_THREADS": "1", "ANYTORCH_CACHE_DIR": str(folder)},
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("ANSWER ")), None)
    assert line is not None, done.stderr[-2000:]
    told: dict[str, str] = json.loads(line.removeprefix("ANSWER "))
    return told


@pytest.mark.long
def test_what_the_writers_write_says_where_it_is_from(tmp_path: Path) -> None:
    names = [name for name in writers.WRITERS if name not in writers.ON_WEBGPU]
    assert run_writers(names, tmp_path) == dict.fromkeys(names, "")


@pytest.mark.long
def test_what_the_writers_on_webgpu_write(tmp_path: Path, missing: Callable[[str, str], NoReturn]) -> None:
    pytest.importorskip("wgpu")
    from anytorch.gpu.adapters import list_adapters

    try:
        found = list_adapters()
    except DeviceUnavailable as exc:
        missing("webgpu-adapter", str(exc))
    if not found:
        missing("webgpu-adapter", "wgpu finds none")
    assert run_writers(list(writers.ON_WEBGPU), tmp_path) == dict.fromkeys(writers.ON_WEBGPU, "")


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_measured_tables_are_what_the_files_say(page: Path) -> None:
    text = page.read_text("utf-8")
    assert tables.written(text) == text, "run: python docs/tools/benchmark_tables.py"


def test_every_part_is_on_a_page() -> None:
    named = {name for page in tables.PAGES for name in tables.MARK.findall(page.read_text("utf-8"))}
    assert {name for name, _ in named} == set(tables.PARTS)


# Tables on these pages that hold numbers and are not written from files, each with its reason.
BY_HAND = {
    "| direct,": "noted while the work was done (†)",
    "| through the page cache": "the same",
    "| four threads": "the same, its head",
    "| of the device's free memory": "modes.md: a mode's settings, no measurement",
    "| weights of linear layers": "the same",
    "| float32 products": "the same",
}


def test_no_other_table_holds_measured_numbers() -> None:
    for page in tables.LEADING:
        text = re.sub(r"^```.*?^```", "", tables.MARK.sub("", page.read_text("utf-8")), flags=re.M | re.S)
        for line in text.splitlines():
            if not line.startswith("|") or not re.search(r"\d", re.sub(r"\]\([^)]*\)|`[^`]*`", "", line)):
                continue
            assert any(line.startswith(head) for head in BY_HAND), f"{page.name}: a number by hand: {line[:100]}"


def test_prose_with_measured_numbers_names_its_file() -> None:
    """Outside of tables: a paragraph with rates or times stands in a section that names a results file, or carries †."""
    whole = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    text = re.sub(r"^```.*?^```", "", whole, flags=re.M | re.S)
    measured = re.compile(r"\d(?:[\d.,]*)\s?(?:times|ms|µs|s\b|GB/s|MiB|TFLOP/s|%|tokens/s)")
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        named = set(re.findall(r"([a-z0-9]+(?:-[a-z0-9]+)+)\.json", section))
        for paragraph in section.split("\n\n"):
            if not paragraph.startswith(("|", "<!--")) and measured.search(paragraph):
                assert "†" in paragraph or named & set(FILES), paragraph[:120]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in the place of bench/results/."""
    monkeypatch.setattr(results_files, "RESULTS", tmp_path)
    results_files.read.cache_clear()
    yield tmp_path
    results_files.read.cache_clear()


ABOUT = {
    "machine": {"cpu": "A CPU", "features": ["avx2"], "gpus": []},
    "torch": "2",
    "date": "2026-11-19T00",
    "commit": "abcdef012",
}


def test_modes_are_told_from_their_file(results: Path) -> None:
    assert "Not measured yet" in modes_tables.modes() and "Not measured yet" in modes_tables.losses()
    assert modes_tables.headline() == "" and "Not measured yet" in modes_tables.guide()

    def one(seconds: float, *losses: float) -> dict[str, Any]:
        memory = {"peak_nbytes": 3 * 2**20, "held_nbytes": 2 * 2**20, "resident_nbytes": 2**20}
        return {"median_s": seconds, **memory, "dtype": "float32", "losses": losses, "least_cosine": 0.99}

    curves = {"plain": one(0.2, 4.0, 2.0, 1.0), "balanced": one(0.1, 4.0, 2.1, 1.0), "memory": one(0.4, 4.0, 2.0, 1.0)}
    options = {"layers": 2, "width": 8, "rows": 1, "tokens": 4, "rounds": 3}
    found = {**ABOUT, "device": "cpu", "options": options, "left_out": [], "inference": curves, "training": curves}
    (results / "modes-cpu.json").write_text(json.dumps(found), "utf-8")
    assert "| inference, `balanced` | 100 ms | 2.00 | 3 | 2 | 1 | 0.99000 |" in modes_tables.modes()
    assert "| training, `memory` | 400 ms | 0.50 | 3 | 2 | 1 | 4.0000, 1.0000 |" in modes_tables.modes()
    assert "| `balanced` | 4.0000 | 2.1000 | 1.0000 | 5 % |" in modes_tables.losses()
    assert "inference 2.00 times as fast in `balanced`, 0.50 in `memory`" in modes_tables.headline()


def test_decoding_on_the_cpu_is_told_from_its_files(results: Path) -> None:
    assert "Not measured yet" in kernel_tables.decode_cpu() and kernel_tables.decode_cpu_headline() == ""
    ours = {"ms_per_token": [2.0, 3.0], "weight_nbytes": 2**20, "share_of_bandwidth": [0.5], "times_ours": [1.0, 1.0]}
    theirs = {**ours, "ms_per_token": [4.0, 6.0], "times_ours": [1.5, 2.5]}
    off = {"logits_off": 1e-3, "logits_off_unrounded": None}
    entry = {"precision": "int8", "contenders": {"anytorch": {**ours, **off}, "llama.cpp": {**theirs, **off}}}
    found = {**ABOUT, "threads": 2, "llama_cpp": "b1", "results": [entry]}
    (results / "decode-cpu.json").write_text(json.dumps(found), "utf-8")
    assert "| A CPU, AVX2 | int8 | anytorch | 2.00, 2.50 | 50 % | 1 | 1 | 1.0e-03 |" in kernel_tables.decode_cpu()
    assert "| A CPU, AVX2 | int8 | llama.cpp | 4.00, 5.00 | 50 % | 2.00 | 1 | 1.0e-03 |" in kernel_tables.decode_cpu()
    assert (
        kernel_tables.decode_cpu_headline()
        == "the fastest of the others takes 2.00 (llama.cpp) in int8 times as long as ours"
    )
