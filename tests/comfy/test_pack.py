"""The folder that users copy: how it loads, what it says where it cannot, and its workflows."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "comfyui" / "anytorch_nodes"
workflows = sys.modules["anytorch_tools_comfy_workflows"]
host = sys.modules["anytorch_tests_comfy_host"]


def test_loads_under_a_name_that_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "custom_nodes" / "any.torch nodes"
    shutil.copytree(PACK, folder)
    module = host.load_pack(folder)
    assert module.NODE_CLASS_MAPPINGS == NODE_CLASS_MAPPINGS
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == NODE_CLASS_MAPPINGS.keys()
    assert (folder / module.WEB_DIRECTORY).is_dir() and not hasattr(module, "comfy_entrypoint")


def test_the_documented_single_file(tmp_path: Path) -> None:
    """`cp pytorch_custom_nodes.py ComfyUI/custom_nodes/`"""
    shutil.copy(ROOT / "compat" / "src" / "pytorch_custom_nodes.py", tmp_path)
    module = host.load_pack(tmp_path / "pytorch_custom_nodes.py")
    assert module.NODE_CLASS_MAPPINGS == NODE_CLASS_MAPPINGS


def run_without_anytorch(code: str, folder: Path) -> Any:
    """In a Python that has torch and NumPy, but where `import anytorch` finds nothing."""
    hide = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return None\n"
        "sys.path = [p for p in sys.path if not p.endswith('/src')]\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
    )
    return subprocess.run(
        [sys.executable, "-c", hide + code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


LOADING = """
import importlib.util
spec = importlib.util.spec_from_file_location("pack", {path!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import anytorch
print(anytorch.__file__)
print(len(module.NODE_CLASS_MAPPINGS))
"""


def test_without_anytorch_one_sentence(tmp_path: Path) -> None:
    done = run_without_anytorch(LOADING.format(path=str(PACK / "__init__.py")), tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the anytorch nodes need anytorch in ComfyUI's Python: ")
    assert "-m pip install /path/to/anytorch" in last


def test_a_folder_with_everything_inside(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("anytorch_tools_comfy_pack", ROOT / "tools" / "comfy_pack.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    folder = tool.build(tmp_path / "anytorch_nodes")
    done = run_without_anytorch(LOADING.format(path=str(folder / "__init__.py")), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(folder / "vendor/anytorch/__init__.py"), str(len(NODE_CLASS_MAPPINGS))]


def test_the_registrys_conventions() -> None:
    about = tomllib.loads((PACK / "pyproject.toml").read_text())
    project = about["project"]
    assert "comfyui" not in project["name"].lower() and len(project["name"]) < 100
    assert [int(part) for part in project["version"].split(".")] and "DisplayName" in about["tool"]["comfy"]
    required = [line for line in (PACK / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert required == project["dependencies"]
    assert not any(line.startswith("torch") for line in required), "ComfyUI's torch is the right one"


def test_the_workflow_files_are_what_the_tool_makes() -> None:
    for path, text in workflows.files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run tools/comfy_workflows.py"
    there = {*PACK.glob("api_workflows/*"), *PACK.glob("example_workflows/*.json")}
    assert there == set(workflows.files())


@pytest.mark.parametrize("name", [name for name in workflows.WORKFLOWS if name not in ("load_weights", "devices")])
def test_workflow_runs(name: str, comfy: Any) -> None:
    """The other two run in test_weights.py and test_running.py, where what they do is looked at."""
    made = comfy.run(json.loads((PACK / "api_workflows" / f"{name}.json").read_text()))
    assert made.succeeded, made
    assert made.ui


def as_prompt(document: dict[str, Any], inputs_of: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What the page sends for a workflow it has opened: links by number, widgets' values by their order."""
    links = {link[0]: [str(link[1]), link[2]] for link in document["links"]}
    prompt = {}
    for node in document["nodes"]:
        widgets = [name for name, spec in inputs_of(node["type"]).items() if workflows.is_widget(spec)]
        inputs = dict(zip(widgets, node["widgets_values"], strict=False))
        inputs |= {one["name"]: links[one["link"]] for one in node["inputs"] if one["link"] is not None}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


@pytest.mark.parametrize("name", ["mlp", "loss", "devices"])
def test_both_formats_say_the_same(name: str, comfy: Any) -> None:
    """The page's format, read back as the page reads it, gives the values of the other one."""

    def inputs_of(kind: str) -> dict[str, Any]:
        groups = comfy.nodes[kind].INPUT_TYPES()
        return {**groups.get("required", {}), **groups.get("optional", {})}

    document = json.loads((PACK / "example_workflows" / f"{name}.json").read_text())
    ours = json.loads((PACK / "api_workflows" / f"{name}.json").read_text())
    theirs = as_prompt(document, inputs_of)
    for key, node in ours.items():
        assert node["class_type"] == theirs[key]["class_type"]
        assert node["inputs"].items() <= theirs[key]["inputs"].items(), key
    for link in document["links"]:
        number, source, output, target, slot, kind = link
        made = next(node for node in document["nodes"] if node["id"] == source)["outputs"][output]
        taken = next(node for node in document["nodes"] if node["id"] == target)["inputs"][slot]
        assert number in made["links"] and taken["link"] == number and host.types_meet(made["type"], taken["type"])
        assert kind == made["type"]
