"""The folder of a service with workers: kept while anybody of it lives, swept when nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from anytorch.serve import server as run_folder
from anytorch.serve.server import make_run_folder, sweep_run_folders

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="--workers needs POSIX")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run_folder, "YOUNG_S", 0.0)
    yield


def test_a_folder_is_swept_when_the_last_who_holds_it_is_gone() -> None:
    folder, lock = make_run_folder()
    (folder / "metrics").mkdir()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    try:
        assert sweep_run_folders() == []
        os.close(lock)  # the supervisor was killed, and a worker still drains
        assert sweep_run_folders() == [] and folder.exists()
    finally:
        child.communicate(b"\n", timeout=120)
    assert sweep_run_folders() == [folder] and not folder.exists()


def test_nothing_else_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "anytorch-serve-link").symlink_to(elsewhere)
    (tmp_path / "anytorch-serve-file").write_text("")
    (tmp_path / "anytorch-other").mkdir()
    assert sweep_run_folders() == []
    monkeypatch.setattr(run_folder, "YOUNG_S", 60.0)
    young = tmp_path / "anytorch-serve-young"  # made a moment ago, and not locked yet
    young.mkdir()
    assert sweep_run_folders() == []
    os.utime(young, (0, 0))
    assert sweep_run_folders() == [young] and elsewhere.exists()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can make a folder another's")
def test_the_folders_of_other_users_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "anytorch-serve-other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    assert sweep_run_folders() == [] and other.exists()
