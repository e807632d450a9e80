"""One question to another process: the answer comes back however it ends, and nothing is left running."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anytorch import child_process
from anytorch.child_process import ask, kill_group, python_command, status_words

Ask = Callable[..., tuple[list[dict[str, Any]], str]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Ask a child whose `main(out, arguments)` has the given body."""

    def run(body: str, *arguments: str, limit_s: float = 60.0, **options: Any) -> tuple[list[dict[str, Any]], str]:
        source = "import json, os, subprocess, sys, time\ndef main(arguments):\n    with open(arguments.pop(0), 'a') as out:\n"  # noqa: E501
        (tmp_path / "asked_child.py").write_text(source + textwrap.indent(textwrap.dedent(body), 8 * " "))
        monkeypatch.syspath_prepend(tmp_path)
        return ask("asked_child:main", arguments, limit_s=limit_s, **options)

    return run


def is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().split(")")[1].split()[0] == "Z":
            return True  # ended; whoever adopted it has not looked yet
        time.sleep(0.05)
    return False


def test_the_answer_comes_back(asked: Ask) -> None:
    lines, end = asked(
        "print('noise'); out.write(json.dumps({'said': arguments, 'path': sys.path, 'x': os.environ['X']}))",
        "one",
        "two words",
        environment={"X": "y"},
    )
    assert end == "" and lines[0]["said"] == ["one", "two words"] and lines[0]["x"] == "y"
    assert lines[0]["path"] == sys.path, "the child sees what this process sees, and nothing of the current folder"


def test_what_was_written_before_a_crash_is_kept(asked: Ask) -> None:
    body = """
        out.write('{"step": 1}\\n{"step": 2}\\n{"half')
        out.flush()
        sys.stderr.write('the last words')
        sys.stderr.flush()
        os.kill(os.getpid(), 11)
    """
    lines, end = asked(body)
    assert lines == [{"step": 1}, {"step": 2}]
    assert end.startswith("signal 11 (") and end.endswith("): the last words")
    assert asked("sys.exit(3)")[1] == "exit status 3"
    assert asked("raise ValueError('why')")[1] == "exit status 1: ValueError: why"


def test_the_limit_ends_the_child_and_what_it_started(asked: Ask) -> None:
    body = """
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        out.write(json.dumps([os.getpid(), inner.pid]) + "\\n")
        out.flush()
        time.sleep(600)
    """
    for limit_s in (2.0, 20.0):  # again where a busy machine did not come so far
        began = time.monotonic()
        lines, end = asked(body, limit_s=limit_s)
        assert end == "timed-out" and time.monotonic() - began < limit_s + 40
        if lines:
            break
    assert all(is_gone(pid) for pid in lines[0])


def test_what_it_started_goes_with_a_child_that_ends_well(asked: Ask) -> None:
    body = """
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        out.write(json.dumps(inner.pid) + "\\n")
    """
    lines, end = asked(body)
    assert end == "" and is_gone(lines[0])  # type: ignore[arg-type]


def test_no_time_left_starts_nothing_that_stays(asked: Ask) -> None:
    assert asked("time.sleep(600)", limit_s=-1.0) == ([], "timed-out")


def test_ctrl_c_while_the_child_is_being_started_leaves_none(asked: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, where the child is far on before its parent has its number."""
    made: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def pressed(*given: Any, **named: Any) -> subprocess.Popen[bytes]:
        made.append(start(*given, **named))
        signal.raise_signal(signal.SIGINT)
        return made[0]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subprocess, "Popen", pressed)
        asked("time.sleep(600)")
    try:
        assert made[0].poll() is not None
    finally:
        made[0].kill()
        made[0].wait()


def test_a_command_for_children_that_live_longer() -> None:
    child = subprocess.Popen(
        python_command("platform:python_version_tuple"), start_new_session=True
    )  # takes no argument
    assert child.wait(60) == 1
    kill_group(child.pid)  # gone already: no error


def test_ends_in_words() -> None:
    assert status_words(0) == "exit status 0" and status_words(-9).startswith("signal 9 (")
    assert status_words(0xC0000005) == "exit status 0xc0000005"


def test_which_processes_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert child_process.is_alive(os.getpid()) and not child_process.is_alive(child.pid)
    assert not child_process.is_alive(10**12)


@pytest.mark.parametrize(
    ("handle", "error", "waited", "alive"),
    [(7, 0, 0x102, True), (7, 0, 0, False), (None, 87, 0, False), (None, 5, 0, True)],
    ids=["runs", "has ended", "unknown", "another user's"],
)
def test_on_windows_a_process_is_looked_at_and_not_interrupted(
    monkeypatch: pytest.MonkeyPatch, handle: int | None, error: int, waited: int, alive: bool
) -> None:
    """os.kill(process, 0) sends Ctrl-C there."""
    closed: list[int] = []
    kernel = SimpleNamespace(
        OpenProcess=lambda *_: handle, WaitForSingleObject=lambda *_: waited, CloseHandle=lambda one: closed.append(one)
    )
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", lambda *_, **__: kernel, raising=False)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: error, raising=False)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("it was sent a signal"))
    assert child_process.is_alive(1234) is alive
    assert closed == ([handle] if handle else [])
