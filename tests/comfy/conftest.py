"""The host of the ComfyUI tests, with stand-ins for the few core nodes that the example workflows use."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


host = _load(Path(__file__).with_name("host.py"), "anytorch_tests_comfy_host")
contract = _load(Path(__file__).with_name("contract.py"), "anytorch_tests_comfy_contract")
workflows = _load(ROOT / "tools" / "comfy_workflows.py", "anytorch_tools_comfy_workflows")


class LoadImage:
    RETURN_TYPES, FUNCTION = ("IMAGE", "MASK"), "run"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": (["example.png"], {})}}

    def run(self, image: str) -> tuple[Any, Any]:
        pixels = torch.rand(1, 30, 41, 3, generator=torch.Generator().manual_seed(0))  # odd sizes on purpose
        return pixels, pixels[..., 0]


class PreviewImage:
    RETURN_TYPES, FUNCTION, OUTPUT_NODE = (), "run", True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE", {})}}

    def run(self, images: Any) -> dict[str, Any]:
        """As strict as ComfyUI's: what PIL would refuse fails here too."""
        assert images.ndim == 4 and images.shape[-1] in (3, 4) and images.dtype == torch.float32
        assert images.device.type == "cpu" and float(images.min()) >= 0 and float(images.max()) <= 1
        return {"ui": {"images": [f"{len(images)} of {images.shape[1]}×{images.shape[2]}"]}}


class PreviewAny:
    RETURN_TYPES, FUNCTION, OUTPUT_NODE = (), "run", True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"source": ("*", {})}}

    def run(self, source: Any = None) -> dict[str, Any]:
        return {"ui": {"text": (str(source),)}}


CORE = {"LoadImage": LoadImage, "PreviewImage": PreviewImage, "PreviewAny": PreviewAny}


@pytest.fixture(scope="session")
def built(shared_cache: Callable[[str], Path]) -> Path:
    """One cache for all of these tests: the text encoder is compiled once, and devices are tried once."""
    return shared_cache("comfy")


@pytest.fixture
def comfy(tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with the pack loaded as ComfyUI loads it, working in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(built))
    module = host.load_pack(ROOT / "comfyui" / "anytorch_nodes")
    return host.Host({**CORE, **module.NODE_CLASS_MAPPINGS})


@pytest.fixture
def running_comfyui(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The modules a running ComfyUI has imported, as far as nodes use them; records what was asked of them."""
    record = SimpleNamespace(progress=[], room=[], unloaded=0, cancel_at=None)

    class ProgressBar:
        def __init__(self, total: int, node_id: str | None = None) -> None:
            self.total = total

        def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
            record.progress.append((value, total or self.total))
            if record.cancel_at is not None and value >= record.cancel_at:
                raise InterruptedError("cancelled")

    def unload() -> None:
        record.unloaded += 1

    management = ModuleType("comfy.model_management")
    management.__dict__.update(
        get_torch_device=lambda: torch.device("cpu"),
        intermediate_device=lambda: torch.device("cpu"),
        free_memory=lambda nbytes, device: record.room.append(nbytes),
        unload_all_models=unload,
        soft_empty_cache=lambda: None,
    )
    utils = ModuleType("comfy.utils")
    utils.__dict__.update(ProgressBar=ProgressBar)
    paths = ModuleType("folder_paths")
    paths.__dict__.update(
        models_dir=str(tmp_path / "M"),
        get_input_directory=lambda: str(tmp_path / "I"),
        get_output_directory=lambda: str(tmp_path / "O"),
    )
    for module in (management, utils, paths):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return record


@pytest.fixture(autouse=True)
def engines_closed() -> Iterator[None]:
    yield
    if (kept := sys.modules.get("anytorch.comfy.jobs")) is not None:
        kept.forget()


@pytest.fixture
def prompt_of() -> Callable[[str], dict[str, Any]]:
    return lambda name: workflows.api_format(workflows.WORKFLOWS[name])  # type: ignore[no-any-return]
