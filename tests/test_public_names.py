"""The public names, listed once more: adding or losing one is a decision, not an accident."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anytorch

NAMES = [
    "AnytorchError",
    "ArrowEngine",
    "DeviceFallbackWarning",
    "EngineQueue",
    "Kronos",
    "KronosPredictor",
    "KronosTokenizer",
    "PersistentKernel",
    "PredictorPool",
    "Resolution",
    "TextGenerator",
    "TextPool",
    "__version__",
    "autocast",
    "best_device",
    "cleanup",
    "devices",
    "diagnose",
    "enable",
    "encode_file",
    "explain",
    "finetune_predictor",
    "finetune_tokenizer",
    "fit_batch",
    "graph",
    "is_out_of_memory",
    "lite",
    "load_decoder",
    "load_predictor",
    "memory",
    "mode",
    "new_kernel_graph",
    "quant",
    "read_candles",
    "resolve",
    "sample_candles",
    "seed",
    "stand_in",
    "synchronize",
    "train",
    "use",
    "use_tuned",
    "webgpu",
]


# Modules that cannot be called: `devices` and `memory` can.
MODULES = {"graph", "lite", "quant", "train", "webgpu"}


def test_the_list() -> None:
    assert dir(anytorch) == sorted(NAMES)
    assert sorted(anytorch.__all__) == sorted(set(NAMES) - {"webgpu"}), "importing webgpu changes torch"


def test_the_page_of_names_has_them_all() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    missing = [name for name in NAMES if not re.search(rf"(`|\.){name}\b", page)]
    assert missing == ["__version__"]


@pytest.mark.long
def test_modules_load_when_they_are_used(run_script: Callable[..., dict[str, Any]]) -> None:
    told = run_script(
        """
        import sys, anytorch
        before = sorted(name for name in sys.modules if name.startswith("anytorch."))
        graph = anytorch.graph.new_kernel_graph()
        graph.mark_output(graph.exp(graph.new_input((2, 3))))
        built_without = "torch" not in sys.modules
        quantize, tensor = anytorch.quant.quantize, anytorch.lite.tensor([1.0])
        import torch
        registered = hasattr(torch, "webgpu")
        same = graph.__class__ is anytorch.graph.KernelGraph and anytorch.new_kernel_graph is anytorch.graph.new_kernel_graph
        answer(before=before, graphs=[built_without, same], quantize=quantize.__module__, value=tensor.item(),
               registered=registered,
               name=anytorch.webgpu.NAME, after=hasattr(torch, "webgpu"))
        """
    )
    assert told["before"] == ["anytorch._version", "anytorch.lazy"] and told["graphs"] == [True, True]
    assert told["quantize"] == "anytorch.quant.model" and told["value"] == 1.0
    assert (told["registered"], told["name"], told["after"]) == (False, "webgpu", True)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_loads(name: str) -> None:
    if name == "webgpu":
        return  # in a process of its own, above
    value = getattr(anytorch, name)
    assert name == "__version__" or name in MODULES or callable(value)
    # Public things say what they do.
    assert name == "__version__" or (value.__doc__ or "").strip()


@pytest.mark.long
@pytest.mark.parametrize(
    ("packages", "gone"),
    [(["transformers"], {"TextGenerator", "TextPool"}), (["pandas"], {"finetune_predictor", "finetune_tokenizer"})],
)
def test_everything_that_is_installed(
    packages: list[str], gone: set[str], run_script: Callable[..., dict[str, Any]]
) -> None:
    """`from anytorch import *` with one extra installed brings what that extra can do, and does not fail."""
    told = run_script(
        f"""
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {packages!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Absent())
        brought = {{}}
        exec("from anytorch import *", brought)
        answer(brought=sorted(set(brought) - {{"__builtins__"}}))
        """
    )
    brought = set(told["brought"])
    assert {"resolve", "autocast", "__version__"} <= brought <= set(NAMES)
    assert set(NAMES) - brought == gone | {"webgpu"}


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'anytorch' has no attribute 'nonsense'"):
        anytorch.nonsense  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(anytorch.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names:
            assert alias.asname == alias.name, "`import x as x` is what makes it public to type checkers"
            seen[alias.name] = node.module
    listed = {name: f"anytorch.{module}" for module, names in anytorch.PUBLIC.items() for name in names.split()}
    # Packages that can be called, which a type checker would not believe: it is shown one as a function.
    assert (listed.pop("devices"), listed.pop("memory")) == ("anytorch.devices", "anytorch.memory")
    assert seen.pop("devices") == "anytorch.devices.choose"
    assert seen == {name: "anytorch" if module == f"anytorch.{name}" else module for name, module in listed.items()}


HEAVY = ("torch", "numpy", "wgpu", "rich", "matplotlib", "tomli_w", "importlib.metadata", "subprocess", "logging")


def test_importing_costs_nothing(run_script: Callable[..., dict[str, Any]]) -> None:
    told = run_script(
        f"""
        import sys
        before = set(sys.modules)
        import anytorch
        loaded = set(sys.modules) - before
        ours = sorted(name for name in loaded if name.startswith("anytorch"))
        answer(heavy=sorted(loaded & set({HEAVY!r})), ours=ours)
        """
    )
    assert told["heavy"] == []
    assert told["ours"] == ["anytorch", "anytorch._version", "anytorch.lazy"]


def test_choosing_by_name_imports_no_torch(run_script: Callable[..., dict[str, Any]]) -> None:
    """A program may ask for the device before it pays for torch; only `.device` needs it."""
    told = run_script(
        """
        import sys, anytorch
        from anytorch_compat.selection import get_available_backends
        from anytorch_compat.system import get_best_device, get_memory_info
        get_best_device(), get_available_backends(), get_memory_info("cuda")
        answer(name=anytorch.resolve("cpu").name, loaded=sorted({"torch", "numpy", "wgpu", "rich"} & set(sys.modules)))
        """
    )
    assert told == {"name": "cpu", "loaded": []}
