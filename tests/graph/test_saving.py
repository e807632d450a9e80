"""`save_kernels`: prepared texts in a folder, each once, with the graph and the schedule in the first line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import anytorch
from anytorch.graph.back import saving, triton
from anytorch.graph.emit import triton as emit
from anytorch.graph.emit.triton_schedules import schedules
from anytorch.graph.partition import partition
from tests.graph.cases import CASES


def test_a_triton_kernel_is_saved_as_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton, "_module", lambda text, cache: SimpleNamespace(kernel=None))  # needs no Triton
    graph, known = CASES["gated mlp"]()
    cut = partition(graph, known)
    kernel = next(cut.kernel(group) for group in cut.groups if not group.library)
    schedule = schedules(kernel, known)[0]
    with anytorch.use(save_kernels=str(tmp_path / "new")), saving.kernels_of("graph abc, b=4"):
        triton.prepare(kernel, schedule)
    (path,) = (tmp_path / "new").iterdir()
    first, _, rest = path.read_text().partition("\n")
    assert first == f"# graph abc, b=4; schedule: {schedule.name}" and rest == emit.render(kernel, schedule)
    assert path.suffix == ".py" and len(path.stem) == 24
    compile(path.read_text(), str(path), "exec")


def test_nothing_is_saved_unless_a_folder_is_named_and_the_first_graph_stays(tmp_path: Path) -> None:
    saving.save("x", "m=1", suffix=".cpp", comment="//")
    with anytorch.use(save_kernels=str(tmp_path / "new")):
        saving.save("x", "m=1", suffix=".cpp", comment="//")
        with saving.kernels_of("graph b"):
            saving.save("x", "m=1", suffix=".cpp", comment="//")
    (path,) = (tmp_path / "new").iterdir()
    assert path.read_text() == "// a kernel outside of a search; schedule: m=1\nx"


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with anytorch.use(save_kernels=str(tmp_path / "file")):
        saving.save("x", "m=1", suffix=".cpp", comment="//")
    assert "is not saved" in caplog.text and "ANYTORCH_SAVE_KERNELS" in caplog.text
