"""Runs every sample of the five documents anytorch grew out of, as written, and prints what became of each.

    python tools/run_seed_samples.py                                  # all of them, on the devices of this machine
    python tools/run_seed_samples.py --quick --jobs 8 --json out.json # shorter measurements, several at once
    python tools/run_seed_samples.py --page                           # docs/migrating/samples.md from stored results

The Python samples are the copies in tests/compat/samples (a test compares them with the documents word for word), with
what the document had brought into play before each; the command lines are in `COMMANDS` below. Each runs in a process and a
folder of its own, with a settings file of its own, and is right if it ends with the status it should.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from provenance import provenance, write_results  # noqa: E402

sys.path.pop(0)
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "migrating" / "samples.md"
TIMEOUT_S = 300
DOCUMENTS = {
    "1": "AI-OS Diffusion",
    "2": "YiRage",
    "3": "Kronos",
    "4": "PyTorch custom back end",
    "5": "Virtual Blackwell",
}


@dataclass(frozen=True)
class Command:
    """A command line of a document: where it is run, what makes it shorter, and what else is to be said."""

    document: str
    block: int
    line: str
    folder: str = "."  # inside compat/
    quick: str = ""  # added, so that it takes seconds; the last of two equal flags counts
    statuses: tuple[int, ...] = (0,)
    env: tuple[tuple[str, str], ...] = ()
    action: str = "run"  # or "parse" (installing), "serve" (asks it once), "skip"
    note: str = ""


NO_NETWORK = "an installation line: parsed, not run"
MANAGER = "python tools/yirage_backend_manager.py"
CMAKE_LINE = "cmake -DYIRAGE_USE_CUDA=ON -DYIRAGE_USE_CPU=ON -DYIRAGE_USE_MPS=ON -DCMAKE_BUILD_TYPE=Release .."
ROCM_LINE = "pip install torch torchvision --index-url https://download.pytorch.org/whl/rocm5.7"
BENCHMARK = "python benchmark/multi_backend_benchmark.py"
ASK_YIRAGE = 'python -c "import yirage; print(yirage.get_backend().value)"'

COMMANDS = [
    Command("1", 0, ROCM_LINE, action="parse", note=NO_NETWORK + " (`anytorch doctor` prints the line for your card)"),
    Command(
        "1",
        1,
        "pip install intel-extension-for-pytorch",
        action="parse",
        note=NO_NETWORK + "; no longer needed, torch has `torch.xpu` itself",
    ),
    Command(
        "1",
        2,
        "pip install torch-vulkan",
        action="parse",
        note=NO_NETWORK + "; use `pip install 'anytorch[webgpu]'` instead",
    ),
    Command("1", 3, "pip install intel-extension-for-pytorch", action="parse", note=NO_NETWORK + "; no longer needed"),
    Command("1", 4, "sudo apt install vulkan-tools", action="parse", note="a comment in the document: parsed, not run"),
    Command("1", 5, "python -m pytest ai_os_diffusion/tests/test_device_backends.py -v", "src"),
    Command("2", 0, f"{MANAGER} info"),
    Command(
        "2",
        0,
        f"{MANAGER} optimize --backend cuda --apply",
        quick="--duration 2",
        statuses=(0, 1),
        note="without CUDA it says so and ends with status 1",
    ),
    Command("2", 0, f"{MANAGER} benchmark --duration 30", quick="--duration 5"),
    Command(
        "2",
        0,
        f"{MANAGER} set cuda",
        statuses=(0, 1),
        note="stored; without CUDA what runs later falls back to the CPU and says why",
    ),
    Command("2", 0, f"{MANAGER} test cpu"),
    Command("2", 1, "python demo/demo_multi_backend.py --backend all --iterations 20"),
    Command("2", 1, "python demo/demo_multi_backend.py --backend cpu"),
    Command("2", 1, "python demo/demo_multi_backend.py --skip-persistent"),
    Command("2", 2, f"{BENCHMARK} --iterations 50 --output results.json", quick="--duration 5"),
    Command(
        "2",
        2,
        f"{BENCHMARK} --batch-sizes 1 4 8 --seq-lengths 128 512 1024 --hidden-sizes 768 1024 --dtype float16",
        quick="--duration 5",
    ),
    *(
        Command("2", 3, f"export YIRAGE_BACKEND={name}", env=(("YIRAGE_BACKEND", name),), note=f"then `{ASK_YIRAGE}`")
        for name in ("cuda", "cpu", "mps", "auto")
    ),
    Command("2", 3, "export YIRAGE_LOG_LEVEL=DEBUG", env=(("YIRAGE_LOG_LEVEL", "DEBUG"),), note=f"then `{ASK_YIRAGE}`"),
    Command(
        "2",
        4,
        CMAKE_LINE,
        action="skip",
        note="nothing is built beforehand: back ends are found when asked for, our C++ is compiled on first use",
    ),
    Command("2", 5, f"{MANAGER} info"),
    Command("2", 5, f"{MANAGER} optimize --backend auto", quick="--duration 2"),
    Command("2", 6, "python tests/test_multi_backend.py"),
    Command("2", 6, f"{MANAGER} test cuda", statuses=(0, 1), note="without CUDA it says so and ends with status 1"),
    Command("3", 0, "pip install -r gitSource/requirements.txt", action="parse", note=NO_NETWORK),
    Command("3", 1, "pip install -r gitSource/requirements-cuda.txt", action="parse", note=NO_NETWORK),
    Command("3", 2, "python test_device_resolution.py", "services"),
    Command("3", 3, "python gitSource/finetune/train_tokenizer.py --device cpu", quick="--steps-per-epoch 3"),
    Command(
        "3",
        3,
        "torchrun --nproc_per_node=2 gitSource/finetune/train_tokenizer.py",
        quick="--steps-per-epoch 3",
        note="with one card alone both processes share it",
    ),
    Command(
        "3",
        4,
        "uvicorn services.kronos_fastapi.main:app --host 0.0.0.0 --port 8000",
        "gitSource",
        env=(("KRONOS_DEVICE", "auto"),),
        action="serve",
        note="asked for /v1/readyz; on a free port instead of 8000",
    ),
    Command("4", 0, "git clone <repository-url>", action="skip", note="the document does not say which"),
    Command("4", 1, "pip install numpy torch matplotlib", action="parse", note=NO_NETWORK),
    Command("4", 2, "python pytorch_custom_backend.py", "src"),
    Command(
        "4",
        3,
        "cp pytorch_custom_nodes.py /path/to/ComfyUI/custom_nodes/",
        "src",
        note="to a folder of that shape; the server itself is run by tests/comfy/test_real_server.py",
    ),
    Command(
        "4",
        4,
        "export PYTHONPATH=$PYTHONPATH:/path/to/pytorch-custom-backend",
        action="skip",
        note="a path to fill in; installing anytorch-compat does it",
    ),
    Command("4", 5, "pip install -r requirements-dev.txt", "src", action="parse", note=NO_NETWORK),
    Command("4", 6, "python -m pytest tests/", action="skip", note="`tests/` is all of anytorch's suite: `make test`"),
    Command("4", 6, "python pytorch_custom_demo.py", "src"),
    Command("5", 0, "python training/train.py", env=(("ENABLE_VIRTUAL_BLACKWELL", "1"), ("VB_MODE", "balanced"))),
    Command("5", 1, "python training/test_npu_integration.py"),
    Command(
        "5",
        2,
        'python -c "import torch_npu; print(torch_npu.__version__)"',
        statuses=(0, 1),
        note="Huawei's package, where it is installed",
    ),
    Command("5", 3, "pip install torch-npu", action="parse", note=NO_NETWORK),
    Command("5", 4, "npu-smi info", action="skip", note="Huawei's tool; `anytorch info` needs none"),
]

# What is to be said of Python samples beyond "ran".
NOTES = {
    "1_02_detect_xpu": "with `compat/shims` on the path: Intel has ended its extension, torch has `torch.xpu` itself",
    "1_06_encode": "`./models/minilm` is all-MiniLM-L6-v2",
    "1_07_forced_device": "after the import of an earlier sample",
    "1_09_autocast": "`engine`, `device` and `texts` from before; `import torch`, which it leaves out",
    "1_10_quantization": "after the import of an earlier sample",
    "2_01_graphs": "after the import of an earlier sample; tests then build, run and check each graph",
    "2_02_persistent_kernel": "`step` and `tokens`, which it leaves out; tests then write a program down and run it",
    "3_00_predictor": "no network: both repositories are in the hub's cache by name, with our tiny weights inside",
    "4_01_custom_tensor": "`import numpy as np`, which it leaves out",
    "4_02_basic_use": "`import numpy as np`, which it leaves out",
    "4_05_autograd_tensor": "after the import of an earlier sample",
    "4_07_debug_logging": "`tensor` is one of ours: it leaves out where it comes from",
    "5_09_several_npus": "`model` and `nn`, which it leaves out",
    "5_13_manager_methods": "`device` and the import from before",
}


OUTCOMES = ("ran", "asked", "defined", "in part", "refused", "parsed", "not run", "failed")

# Calls that compute nothing: they ask what the machine has, choose, set or print something. A sample made of these alone is
# "asked"; one that only has classes and functions is "defined". Everything else that ended as it should computed something.
QUESTIONS = frozenset(
    """print len str hasattr isinstance super format join upper append items is_available get_device_name device_count
    device cpu_count is_cuda_available is_npu_available get_best_device get_available_backends get_backend set_backend
    get_accelerator_type get_unified_backend get_device get_device_info get_memory_info get_device_manager
    get_all_devices get_device_summary auto_configure_backend BackendOptimizer print_system_info save_config load_config
    basicConfig getLogger debug enable_balanced_mode enable_memory_mode set_seed memory_cleanup cleanup_all
    CustomDevice""".split()  # noqa: SIM905
)
ASKING = (" info", " set cuda", "import torch_npu", "export ")  # of command lines: beginnings and ends of such


def kind_of(text: str) -> str:
    """What a sample that ended well did: "ran" if it computed something, else "asked" or "defined"."""
    tree = ast.parse(text)
    if all(isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)) for node in tree.body):
        return "defined"
    outside = [node for node in tree.body if not isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    calls = [node.func for top in outside for node in ast.walk(top) if isinstance(node, ast.Call)]
    names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
    operators = any(isinstance(node, (ast.BinOp, ast.AugAssign)) for top in outside for node in ast.walk(top))
    return "ran" if operators or names - QUESTIONS else "asked"


def outcome_of(result: dict[str, Any]) -> str:
    """The outcome as the page tells it: of what ended well, whether it computed something."""
    if result["outcome"] != "ran":
        return str(result["outcome"])
    name = result["name"]
    if result["kind"] == "python":
        return kind_of((ROOT / "tests" / "compat" / "samples" / f"{name}.py").read_text(encoding="utf-8"))
    return "asked" if name.startswith(ASKING[-1]) or any(part in name for part in ASKING[:-1]) else "ran"


@dataclass(frozen=True)
class Result:
    document: str
    kind: str  # "python" or "shell"
    name: str
    outcome: str  # one of OUTCOMES
    seconds: float = 0.0
    note: str = ""
    told: str = ""  # the last line it printed, or the last of its error


class Runner:
    def __init__(self, folder: Path, *, quick: bool, minilm: str, seconds: float) -> None:
        self.folder, self.quick, self.minilm = folder, quick, minilm
        self.end = time.monotonic() + seconds
        self.compat = folder / "compat"
        shutil.copytree(ROOT / "compat", self.compat, ignore=shutil.ignore_patterns("__pycache__"))

    def environment(self, extra: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
        paths = [ROOT / "src", self.compat / "src", self.compat / "shims", self.compat / "gitSource", self.compat]
        earlier = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        # Relative ones are relative to where this was started.
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *(str(Path(path).resolve()) for path in earlier)]),
            "PYTHONIOENCODING": "utf-8",
            "ANYTORCH_CACHE_DIR": str(self.folder / "cache"),
            "ANYTORCH_CONFIG": str(Path(tempfile.mkdtemp(dir=self.folder)) / "config.toml"),
            **dict(extra),
        }

    def call(self, words: Sequence[str], folder: Path, extra: Sequence[tuple[str, str]] = ()) -> tuple[int, float, str]:
        start = time.perf_counter()
        limit_s = min(TIMEOUT_S, self.end - time.monotonic())
        if limit_s <= 0:
            return -1, 0.0, "no time was left (--seconds)"
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=self.environment(extra),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, limit_s, f"not done after {limit_s:.0f} s"
        text = done.stdout if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = [line for line in lines if re.match(r"(\[\w+\]:)?error: ", line)] if done.returncode else []
        told = (said or lines or [""])[-1]
        return done.returncode, time.perf_counter() - start, told[:200]

    # --- Python ------------------------------------------------------------------------------------------------------

    def python(self, samples: Any, name: str) -> Result:
        document = name[0]
        if name in samples.SHAPES:
            ast.parse(samples.text_of(name))
            return Result(
                document,
                "python",
                name,
                "parsed",
                note="the shape of a dictionary, not a program; tests hold the answer to it",
            )
        sample = samples.RUN.get(name) or samples.NEEDS_NPU[name]
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        given = sample.given.replace("find_model(None)", repr(self.minilm)) if self.minilm else sample.given
        given = "\n".join(
            line for line in given.splitlines() if not line.startswith('os.environ["ANYTORCH_CACHE_DIR"]')
        )
        (folder / f"{name}.py").write_text(f"{given}\n{samples.text_of(name)}\n", encoding="utf-8")
        status, seconds, told = self.call([sys.executable, f"{name}.py"], folder)
        if name in samples.NEEDS_NPU and status != 0:
            note = "written for an Ascend NPU that is there; tests run it on a compiled stand-in for one"
            return Result(document, "python", name, "not run", seconds, note, told)
        cut = name in samples.LEFT_OUT
        outcome = "failed" if status != 0 else "in part" if cut else "ran"
        return Result(document, "python", name, outcome, seconds, NOTES.get(name, ""), told)

    # --- command lines -----------------------------------------------------------------------------------------------

    def shell(self, command: Command) -> Result:
        name = command.line
        if command.action == "skip":
            return Result(command.document, "shell", name, "not run", note=command.note)
        words = shlex.split(command.line)
        folder = self.compat / command.folder
        if command.action == "parse":
            for flag, value in pairwise(words):
                assert flag != "-r" or (folder / value).is_file(), f"{value} is not there"
            return Result(command.document, "shell", name, "parsed", note=command.note)
        if command.action == "serve":
            return self.serve(command, words, folder)
        note = command.note
        if words[0] == "export":
            words = shlex.split(ASK_YIRAGE)
        if words[0] == "cp":
            target = self.folder / "ComfyUI" / "custom_nodes"
            target.mkdir(parents=True)
            words[-1] = str(target)
        if self.quick and command.quick:
            words += shlex.split(command.quick)
            note = "; ".join(part for part in (note, f"with {command.quick}") if part)
        if words[0] == "python":
            words[0] = sys.executable
        if words[0] == "torchrun":
            words[:1] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        status, seconds, told = self.call(words, folder, command.env)
        outcome = "ran" if status == 0 else "refused" if status in command.statuses else "failed"
        return Result(command.document, "shell", name, outcome, seconds, note, told)

    def serve(self, command: Command, words: list[str], folder: Path) -> Result:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        words = [sys.executable, "-m", *words]
        words[words.index("8000")] = str(port)
        start = time.perf_counter()
        log = self.folder / "served.txt"
        told, outcome = "", "failed"
        with log.open("w") as written:
            process = subprocess.Popen(
                words, cwd=folder, env=self.environment(command.env), stdout=written, stderr=subprocess.STDOUT
            )
            try:
                while process.poll() is None and time.perf_counter() - start < 120 and time.monotonic() < self.end:
                    try:
                        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/readyz", timeout=5) as answer:
                            told, outcome = answer.read().decode()[:200], "ran"
                            break
                    except OSError as exc:  # not yet; or a service that answers, but is not ready
                        told = str(exc)
                        time.sleep(0.5)
            finally:
                process.terminate()
                process.wait(30)
        if outcome == "failed":
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            told = lines[-1][:200] if lines else told
        seconds = time.perf_counter() - start
        return Result(command.document, "shell", command.line, outcome, seconds, command.note, told)


def load_samples() -> Any:
    """tests/compat/test_seed_samples.py: what each sample needs. Where pytest is missing, its marks mean nothing."""
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = MagicMock()
    path = ROOT / "tests" / "compat" / "test_seed_samples.py"
    spec = importlib.util.spec_from_file_location("anytorch_seed_samples", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_all(options: argparse.Namespace) -> list[Result]:
    samples = load_samples()
    minilm = str(Path(options.minilm).resolve()) if options.minilm else ""
    with tempfile.TemporaryDirectory(prefix="seed-samples-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        runner = Runner(Path(folder), quick=options.quick, minilm=minilm, seconds=options.seconds)
        wanted = re.compile(options.only)
        earlier = stored(options.json) if options.again else None
        asked: list[Any] = []

        def is_wanted(document: str, name: str) -> bool:
            if earlier is not None:
                return any((r.document, r.name, r.outcome) == (document, name, "failed") for r in earlier)
            return bool(wanted.search(f"{document} {name}"))

        for name in samples.names():
            if is_wanted(name[0], name):
                asked.append(pool.submit(runner.python, samples, name))
        for command in COMMANDS:
            if is_wanted(command.document, command.line):
                asked.append(pool.submit(runner.shell, command))
        results = []
        for one in asked:
            results.append(one.result())
            show(results[-1])
            if options.json and not options.again:
                save(options, results)  # what there is, should the rest be cut off
    for (document, block), why in samples.LATER.items():
        title = f"{document}_{block:02}"
        known = [*results, *(earlier or ())]
        if not any(result.name.startswith(title) for result in known) and wanted.search(f"{document} {title}"):
            results.append(Result(document, "python", title, "not run", note=f"not part of this version: {why}"))
            show(results[-1])
    if earlier is None:
        return results
    anew = {(result.document, result.name): result for result in results}
    return [anew.pop((result.document, result.name), result) for result in earlier] + list(anew.values())


def save(options: argparse.Namespace, results: Sequence[Result]) -> None:
    rows = [asdict(result) for result in results]
    write_results(options.json, {**begun(), "on": machine(), "quick": options.quick, "results": rows})


def stored(path: Path) -> list[Result]:
    return [Result(**result) for result in json.loads(path.read_text(encoding="utf-8"))["results"]]


def show(result: Result) -> None:
    print(
        f"{result.outcome:8}{result.seconds:6.1f} s  {result.document} {result.name[:90]:90}  {result.told[:80]}",
        flush=True,
    )


# --- the page --------------------------------------------------------------------------------------------------------


INTRODUCTION = """\
# Every sample, and what became of it

Each Python sample and each command line of the five documents, run as written in a process of its own by
`tools/run_seed_samples.py`; this page is what it found (`--page`). "ran" means that it computed something and ended as it
should, "asked" that it asked what the machine has, set or printed something, "defined" that it is a class or a function that
nothing calls, "in part" that a line was left out, "refused" that it said that what it asks for is not on this machine,
"parsed" that it is a line for installing something, which was only read. The column on the right says what had to be added,
and why something was not run.
Names with numbers are the files in `tests/compat/samples`: a test compares them with the documents word for word, and most
are also checked for what they print.

"""


def page() -> str:
    """docs/migrating/samples.md, from what was stored on each machine."""
    found_on = {
        path.stem.removeprefix("seed-samples-"): json.loads(path.read_text())
        for path in sorted(RESULTS.glob("seed-samples-*.json"))
    }
    machines = list(found_on)
    lines = INTRODUCTION.splitlines()
    for name, found in found_on.items():
        counts = {kind: sum(outcome_of(r) == kind for r in found["results"]) for kind in OUTCOMES}
        told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        lines.append(
            f"- **{name}**: {found.get('on') or found['machine']}; {told}"
            + ("; measurements shortened (`--quick`)" if found["quick"] else "")
            + "."
        )
    by_name = {name: {(r["document"], r["name"]): r for r in found["results"]} for name, found in found_on.items()}
    for document, title in DOCUMENTS.items():
        lines += ["", f"## {title}", "", f"| sample | {' | '.join(machines)} | |", f"|---|{'---|' * len(machines)}---|"]
        keys = list(dict.fromkeys(key for found in by_name.values() for key in found if key[0] == document))
        for key in sorted(keys, key=lambda key: not key[1][:1].isdigit()):
            rows = [by_name[name].get(key) for name in machines]
            outcomes = " | ".join(outcome_of(row) if row else "" for row in rows)
            note = next((row["note"] for row in rows if row and row["note"]), "")
            note = re.sub(r"(; )?with --[\w-]+ \d+$", "", note)
            note = "; ".join(part for part in (note, *reasons(machines, rows)) if part)
            lines.append(f"| `{key[1]}` | {outcomes} | {note.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def reasons(machines: Sequence[str], rows: Sequence[dict[str, Any] | None]) -> list[str]:
    """Why one machine did not run what another did, in what the sample itself said there."""
    ran = any(row and row["outcome"] in ("ran", "in part") for row in rows)
    return [
        f"{name}: {row['told'].strip('= ') or row['note'] or 'no reason was kept'}".replace("|", "/")
        for name, row in zip(machines, rows, strict=True)
        if ran and row and row["outcome"] in ("not run", "failed", "refused")
    ]


@cache
def begun() -> dict[str, Any]:
    """Where and of what the results are, asked for once: they are saved after every sample."""
    return provenance()


@cache
def machine() -> str:
    from anytorch import devices

    names = ", ".join(device.name for device in devices() if device.state.value == "usable")
    return f"{names}; Python {platform.python_version()}, torch {version('torch')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--only", default="", metavar="PATTERN", help="samples whose name matches")
    parser.add_argument("--quick", action="store_true", help="shorter measurements and trainings")
    parser.add_argument(
        "--minilm", default="", metavar="FOLDER", help="the model of ./models/minilm, where its package is missing"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing after so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--again", action="store_true", help="of those in the --json file, run what failed once more")
    parser.add_argument("--page", action="store_true", help="only write docs/migrating/samples.md from stored results")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    results = run_all(options)
    failed = [result for result in results if result.outcome == "failed"]
    counts = {kind: sum(result.outcome == kind for result in results) for kind in OUTCOMES}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if options.json:
        save(options, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
