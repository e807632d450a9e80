"""The page of operators says what is registered."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.scripts import module_at

TOOL = Path(__file__).parents[2] / "docs" / "tools" / "webgpu_operators.py"


@pytest.fixture(scope="module")
def tool(webgpu: Any) -> ModuleType:
    return module_at(TOOL)


def test_the_page_is_up_to_date(tool: ModuleType, webgpu: Any) -> None:
    stored = tool.PAGE.read_text("utf-8")
    version = webgpu.__version__.split("+")[0]
    if f"PyTorch {version} " not in stored:
        pytest.skip(f"the page is about another torch than {version}, whose operators are others")
    assert stored == tool.page(), "run: python docs/tools/webgpu_operators.py"


def test_operators_are_told_apart(tool: ModuleType) -> None:
    found = tool.classify()
    assert found["aten::add.Tensor"] == "native" and found["aten::add_.Tensor"] == "native"
    assert found["aten::gather"] == "native", "torch makes it of gather.out, which is ours"
    assert found["aten::gather.out"] == "native"
    assert found["aten::_linalg_svd"] == "fallback" and found["aten::_linalg_svd.U"] == "fallback"
    assert found["aten::_cdist_forward"] == "decomposed", "of other ops, by us"
    assert found["aten::matmul"] == "decomposed", "of other ops, by torch"
    assert "aten::transpose.int" not in found, "a view"


def test_enough_is_on_the_device(tool: ModuleType) -> None:
    kinds = list(tool.classify().values())
    assert kinds.count("native") >= 400
