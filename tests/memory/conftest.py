"""A disk level for every test, with speeds that need no measuring; and nothing left on it afterwards."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anytorch.memory.types import Speeds
from anytorch.quant import choose


@pytest.fixture
def models() -> Any:
    path = Path(__file__).with_name("models.py")  # by its path: pytest's importlib mode keeps this folder off sys.path
    name = "anytorch_tests_memory_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    yield folder
    import gc

    gc.collect()
    left = [path for path in folder.rglob("*")] if folder.exists() else []
    assert not left, f"left behind: {left}"


@pytest.fixture
def given(disk: Path) -> dict[str, Any]:
    """The arguments of `fit` that most tests share."""
    return {"disk": disk, "speeds": Speeds(10.0, 2.0)}


@pytest.fixture
def quant_builds(isolation: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that tests/quant compiled; here it does not matter which is fastest, but it has to stay the same one."""
    from anytorch.measured import store
    from anytorch.quant import choose

    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(Path(__file__).parents[2] / ".cache" / "quant"))
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "measured")
    monkeypatch.setattr(choose, "ROUNDS", 1)


@pytest.fixture
def quick_packed_layers(shared_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed layers whose C++ is compiled once for all tests, and whose kernels are tried once: any right one will do."""
    monkeypatch.setattr(choose, "ROUNDS", 1)
