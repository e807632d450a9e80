"""One page per diagnosis, written from the registry, and an index that lists them all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from anytorch.devices.doctor import DIAGNOSES, DIAGNOSIS_FAILED, Diagnosis, explain

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "doctor"
EVERY = (*DIAGNOSES, DIAGNOSIS_FAILED)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doctor_index", ROOT / "docs" / "tools" / "doctor_index.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_diagnosis_has_a_page_and_every_page_a_diagnosis() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {known.code for known in EVERY} | {"index"}


def test_pages_and_index_are_up_to_date(tool: ModuleType) -> None:
    assert tool.stale() == [], "run: python docs/tools/doctor_index.py"


def test_a_stray_and_a_changed_page_are_noticed(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "FOLDER", tmp_path)
    assert tool.main([]) == 0 and tool.stale() == []
    (tmp_path / "rosetta.md").write_text("changed", "utf-8")
    (tmp_path / "stray.md").write_text("no such diagnosis", "utf-8")
    assert [path.name for path in tool.stale()] == ["rosetta.md", "stray.md"]
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 0 and tool.main(["--check"]) == 0
    assert not (tmp_path / "stray.md").exists()


@pytest.mark.parametrize("known", EVERY, ids=lambda known: known.code)
def test_a_page_says_symptom_evidence_and_fix(known: Diagnosis) -> None:
    text = explain(known.code)
    for part in (known.title, known.symptom, known.evidence, known.fix, known.level.value):
        assert part and part in text
    assert "`" in known.fix or known.code == "too-little-memory", "the fix names a command"
    assert all(link.startswith("https://") for link in known.background.split())


def test_the_index_links_to_every_page() -> None:
    index = (FOLDER / "index.md").read_text("utf-8")
    for known in EVERY:
        assert f"({known.code}.md)" in index
