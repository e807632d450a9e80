"""The compatibility distribution: its import paths, its environment variables, its command lines, its wheel."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

COMPAT = Path(__file__).resolve().parents[2] / "compat"
SOURCES = COMPAT / "src"

PATHS = {
    "ai_os_diffusion.inference": ["ArrowEngine", "get_best_device"],
    "ai_os_diffusion.inference.device_utils": ["get_best_device"],
    "ai_os_diffusion.inference.inference_core": ["ArrowEngine"],
    "yirage": [
        "BackendOptimizer",
        "BackendType",
        "auto_configure_backend",
        "benchmark_backends",
        "bfloat16",
        "float16",
        "float32",
        "get_available_backends",
        "get_backend",
        "get_memory_info",
        "new_kernel_graph",
        "new_threadblock_graph",
        "set_backend",
    ],
    "apt_model.core.system": ["get_device", "get_device_info", "get_memory_info", "memory_cleanup", "set_seed"],
    "apt_model.optimization.npu_backend": [
        "DeviceBackend",
        "UnifiedDeviceManager",
        "get_accelerator_type",
        "get_device_manager",
        "get_unified_backend",
        "is_cuda_available",
        "is_npu_available",
    ],
}


@pytest.fixture
def ask(
    run_script: Callable[..., dict[str, Any]], shared_cache: Callable[[str], Path]
) -> Callable[..., dict[str, Any]]:
    def run(
        code: str, env: dict[str, str | None] | None = None, path: Sequence[Path] = (), warm: bool = True
    ) -> dict[str, Any]:
        cached = {"ANYTORCH_CACHE_DIR": str(shared_cache("compat")), **(env or {})}
        return run_script(code, cached, path=[SOURCES, *path], warm=warm)

    return run


def test_every_path_has_its_names_and_no_more(ask: Callable[..., dict[str, Any]]) -> None:
    """One object under every path that documents it, and it is anytorch's own where anytorch has it; without torch."""
    told = ask(
        f"""
        import importlib, sys
        import anytorch
        wrong, seen = [], {{}}
        for path, names in {PATHS!r}.items():
            module = importlib.import_module(path)
            if sorted(module.__all__) != sorted(names):
                wrong.append([path, module.__all__])
            for name in names:
                value = getattr(module, name)
                if seen.setdefault(name, value) is not value or not (value.__doc__ or "").strip():
                    wrong.append([path, name])
                if name in dir(anytorch) and getattr(anytorch, name) is not value:
                    wrong.append([path, name])
        answer(wrong=wrong, torch="torch" in sys.modules)
        """,
        warm=False,
    )
    assert told == {"wrong": [], "torch": False}


def test_anytorch_says_where_a_name_has_moved(ask: Callable[..., dict[str, Any]]) -> None:
    """`anytorch.get_device` was public: whoever asks for it is told the path that has it, and that path is right."""
    told = ask(
        """
        import importlib, anytorch
        said, wrong = {}, []
        moved = {name: path for path, names in anytorch.MOVED.items() for name in names.split()}
        for name, path in moved.items():
            try:
                exec(f"from anytorch import {name}")
            except ImportError as exc:
                said[name] = str(exc)
            try:
                getattr(anytorch, name)
            except AttributeError as exc:
                wrong += [name] if str(exc) != said.get(name) else []
            if not hasattr(importlib.import_module(path), name) or hasattr(anytorch, name):
                wrong.append(name)
        answer(said=said, wrong=wrong, paths=moved)
        """,
        path=[COMPAT / "gitSource"],
    )
    assert told["wrong"] == [] and len(told["said"]) == 21
    assert told["paths"]["get_device"] == "apt_model.core.system"
    wanted = "anytorch.get_device has moved to anytorch-compat: from apt_model.core.system import get_device"
    assert told["said"]["get_device"] == wanted


def test_memory_says_where_the_stack_has_moved(ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        """
        from apt_model.optimization import vgpu_stack
        import anytorch
        said = []
        for name in vgpu_stack.__all__:
            try:
                getattr(anytorch.memory, name)
            except AttributeError as exc:
                said.append(str(exc))
        stack = vgpu_stack.VGPUStack({"levels": [{"capacity_mb": 1, "device": "cpu", "speed_gbps": 1}]})
        answer(said=said, ours=isinstance(stack, anytorch.memory.TensorStack))
        """
    )
    assert told["ours"] is True and len(told["said"]) == 4
    moved = "anytorch.memory.VGPULevel has moved to anytorch-compat: from apt_model.optimization.vgpu_stack import VGPULevel"
    assert told["said"][0] == moved


def test_importing_prints_nothing(run_python: Callable[..., Any]) -> None:
    code = "import yirage, ai_os_diffusion.inference, apt_model.core.system, apt_model.optimization.npu_backend"
    done = run_python(code, path=[SOURCES], env={"YIRAGE_LOG_LEVEL": "DEBUG"})
    assert done.stdout == done.stderr == ""


def test_a_name_that_needs_torch_is_anytorchs_own(ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        """
        import sys, yirage
        before = "torch" in sys.modules
        from yirage import PersistentKernel
        import anytorch
        answer(before=before, same=PersistentKernel is anytorch.PersistentKernel is yirage.PersistentKernel)
        """,
        warm=False,
    )
    assert told == {"before": False, "same": True}


def test_a_name_nobody_documented(ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        """
        import yirage
        try:
            yirage.nonsense
        except AttributeError as exc:
            answer(said=str(exc))
        """
    )
    assert told["said"] == "module 'yirage' has no attribute 'nonsense'"


# Programs that a document names for trying things out: they call, check and print, as a user's own would.
PROGRAMS = {"test_device_resolution.py", "test_npu_integration.py", "train.py", "pytorch_custom_demo.py"}


def test_no_logic() -> None:
    """Re-exports and the one sentence: no function, no branch outside the helper both sentences come from.

    (What a file does when it is run as a program may loop over the lines it prints. Kronos's service is a program: it speaks
    the original page's protocol, which nothing else does. The shim for Intel's extension defines that package's functions.)
    """
    own = ("anytorch_compat", "tests", "build", "kronos_fastapi", "intel_extension_for_pytorch")
    for path in COMPAT.rglob("*.py"):
        if path.parent.name in own or path.name in PROGRAMS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        main = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "__name__ == '__main__'"]
        tree.body = [node for node in tree.body if node not in main]
        for node in ast.walk(tree):
            assert not isinstance(node, (ast.FunctionDef, ast.If, ast.For, ast.While, ast.Try, ast.Lambda)) and (
                path.name == "config.py" or not isinstance(node, ast.ClassDef)
            ), f"{path}:{getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize("variable", ["YIRAGE_BACKEND", "KRONOS_DEVICE", "ANYTORCH_BACKEND"])
def test_the_documented_variables_choose(variable: str, ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        """
        import warnings, yirage
        from anytorch import settings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backend = yirage.get_backend().value
        answer(backend=backend, source=settings.lookup("backend").source, said=[str(w.message) for w in caught])
        """,
        {variable: "mps"},
    )
    assert told["source"] == variable
    assert told["backend"] == "cpu" and f"'mps' (from {variable}) cannot be used" in told["said"][0]


def test_our_own_variable_comes_first(ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        "from anytorch import settings; answer(value=settings.get('backend'))",
        {"ANYTORCH_BACKEND": "cpu", "YIRAGE_BACKEND": "cuda", "KRONOS_DEVICE": "mps"},
    )
    assert told["value"] == "cpu"


def test_a_log_level_set_after_the_import_takes_effect(ask: Callable[..., dict[str, Any]]) -> None:
    told = ask(
        """
        import yirage
        import logging, os
        os.environ["YIRAGE_LOG_LEVEL"] = "debug"
        from anytorch import logs
        logs.configure()
        answer(level=logging.getLevelName(logging.getLogger("anytorch").level))
        """
    )
    assert told["level"] == "DEBUG"


# --- command lines ---------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path, run_python: Callable[..., Any], shared_cache: Callable[[str], Path]) -> Callable[..., Any]:
    """`script(name, *arguments)`: `python <name> <arguments>` in the test's folder, as the document types it."""
    cached = {"ANYTORCH_CACHE_DIR": str(shared_cache("compat"))}

    def run(name: str, *arguments: str, check: bool = True) -> Any:
        return run_python(
            f"import os, runpy, sys; os.chdir({str(tmp_path)!r}); sys.argv = {[name, *arguments]!r}\n"
            f"runpy.run_path({str(COMPAT / name)!r}, run_name='__main__')",
            env=cached,
            path=[SOURCES],
            timeout_s=400,
            check=check,
            warm=True,
        )

    return run


MANAGER = "tools/yirage_backend_manager.py"
DEMO = "demo/demo_multi_backend.py"
BENCHMARK = "benchmark/multi_backend_benchmark.py"

# Each as documented; the durations and sizes of the long ones are cut, their flags are not.
COMMANDS: list[tuple[str, list[str], int]] = [
    (MANAGER, ["info"], 0),
    (MANAGER, ["test", "cpu"], 0),
    (MANAGER, ["test", "cuda"], 1),  # there is none here, and that is what a test must say
    (MANAGER, ["set", "cpu"], 0),
    (MANAGER, ["optimize", "--backend", "auto", "--duration", "1"], 0),
    (MANAGER, ["benchmark", "--duration", "1"], 0),
    (DEMO, ["--backend", "all", "--iterations", "2"], 0),
    (DEMO, ["--backend", "cpu"], 0),
    (DEMO, ["--skip-persistent", "--iterations", "1"], 0),
    (BENCHMARK, ["--iterations", "2", "--output", "results.json", "--duration", "1"], 0),
    (
        BENCHMARK,
        [
            *("--batch-sizes", "1", "4", "--seq-lengths", "16", "32", "--hidden-sizes", "64", "128"),
            *("--dtype", "float16", "--duration", "1"),
        ],
        0,
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "arguments", "status"), COMMANDS, ids=[" ".join([c[0], *c[1]]) for c in COMMANDS])
def test_command_line(name: str, arguments: list[str], status: int, tmp_path: Path, script: Callable[..., Any]) -> None:
    done = script(name, *arguments, check=False)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    if "--output" in arguments:
        assert (tmp_path / "results.json").stat().st_size > 100


def test_manager_alone_prints_the_help(script: Callable[..., Any]) -> None:
    done = script(MANAGER)
    assert "optimize" in done.stdout and "benchmark" in done.stdout


# --- the distribution ------------------------------------------------------------------------------------------------


def test_wheel(tmp_path: Path) -> None:
    """It builds, and holds the packages and nothing else: no top-level `tools`, `demo`, `benchmark` or `model`."""
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--no-index",
            ),
            *("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(COMPAT)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("anytorch_compat-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"anytorch_compat", "ai_os_diffusion", "yirage", "apt_model", "pytorch_custom_backend.py"}
    assert {f"{package}/py.typed" for package in top if not package.endswith(".py")} <= set(names)
