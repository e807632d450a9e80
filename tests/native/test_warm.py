"""Scripts in a process forked from a warm one: each gets its own answer, also after one that was interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native import warm
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "pidfd_open"), reason="pidfd_open of Linux")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[warm.Warm]:
    monkeypatch.setattr(warm, "SERVER", warm.SERVER.replace("import numpy, torch", "import numpy"))  # none needs torch
    made = warm.Warm()
    yield made
    made.close()


def test_each_script_gets_its_own_answer(scripts: warm.Warm) -> None:
    for number in (3, 0):
        done = scripts.run(f"import sys; print({number}); sys.exit({number})", os.environ, 120)
        assert (done.returncode, done.stdout, done.stderr) == (number, f"{number}\n", "")


@pytest.mark.parametrize("started", [True, False], ids=["in a script", "at the start"])
def test_the_answer_of_a_script_that_was_interrupted_is_nobody_s(
    scripts: warm.Warm, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    if started:
        scripts.run("pass", os.environ, 120)
    with monkeypatch.context() as patch:
        patch.setattr(scripts, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scripts.run("import sys; sys.exit(3)", os.environ, 120)
    done = scripts.run("print('mine')", os.environ, 120)
    assert (done.returncode, done.stdout) == (0, "mine\n")


def test_a_script_that_is_interrupted_ends(scripts: warm.Warm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "pid"

    def interrupted() -> str:
        until(lambda: told.exists() and told.read_text().endswith("."), "the script to run")
        raise KeyboardInterrupt

    scripts.run("pass", os.environ, 120)
    code = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(f'{{os.getpid()}}.'); time.sleep(3600)"
    with monkeypatch.context() as patch:
        patch.setattr(scripts, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scripts.run(code, os.environ, 120)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text().rstrip(".")), 0)


def test_a_script_that_takes_too_long_ends_and_the_process_stays(scripts: warm.Warm) -> None:
    scripts.run("pass", os.environ, 120)
    process = scripts._process
    with pytest.raises(subprocess.TimeoutExpired):
        scripts.run("import time; time.sleep(3600)", os.environ, 0.05)
    assert scripts.run("print(1)", os.environ, 120).stdout == "1\n" and scripts._process is process
