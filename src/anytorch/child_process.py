"""Python in another process: it sees the modules this one sees, has a time limit, and leaves nothing running.

`ask` puts one question to a fresh interpreter and returns what it answered, however it ended. Children that live longer
have protocols of their own, and take the command and the end from here:

    the embedding pool's workers    batches over pipes for as long as the engine lives; started again when one dies
    the service's workers           a listening socket and a heartbeat; drained with a signal, not timed
    the service's benchmark         an asyncio stream of events, whose reader may leave at any time
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from anytorch import logs
from anytorch.interrupts import held_back

log = logs.logger(__name__)

# The child sees the modules of its parent, in the same order, and nothing of the folder it happens to start in.
START = """
import json, sys
from importlib import import_module
sys.path[:] = json.loads(sys.argv[1])
module, _, function = sys.argv[2].partition(":")
sys.exit(getattr(import_module(module), function)(sys.argv[3:]))
"""
SYNCHRONIZE, WAIT_TIMEOUT, ERROR_INVALID_PARAMETER = 0x100000, 0x102, 87  # of Windows
OWN_GROUP = hasattr(os, "killpg")  # start it with start_new_session=OWN_GROUP, so that `kill_group` ends no other


def python_command(entry: str, *arguments: str) -> list[str]:
    """The command that calls `entry` ("package.module:function") with a list of arguments; it returns the exit status."""
    return [sys.executable, "-c", START, json.dumps(sys.path), entry, *arguments]


def ask(
    entry: str, arguments: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The lines of JSON a child wrote, and how it ended: "", "timed-out", or words such as "signal 11 (…): last line".

    `entry` is called with the path of the file to append lines to, then with `arguments`. A child that dies leaves the
    lines it had written; it and everything it started are gone when this returns.
    """
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="anytorch-") as folder:
        answer = Path(folder) / "answer.jsonl"
        with (Path(folder) / "words").open("w+b") as words:  # plug-ins print; a pipe nobody reads would block them
            started = monotonic()
            log.debug("child: starting, at most %.1f s, for %s", limit_s, ", ".join(arguments))
            log.debug("child: %s -c START %s %s %s", sys.executable, entry, answer, " ".join(arguments))
            child, status, end = None, 0, ""
            try:
                with held_back():  # until `child` says which process is to be ended
                    child = subprocess.Popen(
                        python_command(entry, str(answer), *arguments),
                        stdin=subprocess.DEVNULL,
                        stdout=words,
                        stderr=words,
                        # Its log would end up in `words`, where a crash's last line is looked for.
                        # And it asks about real devices, even below `anytorch run`, where another stands in for CUDA.
                        env={
                            **os.environ,
                            "ANYTORCH_LOG_LEVEL": "WARNING",
                            "ANYTORCH_STAND_IN": "",
                            **(environment or {}),
                        },
                        start_new_session=OWN_GROUP,
                    )
                status = child.wait(max(0.0, limit_s))
            except subprocess.TimeoutExpired:
                end = "timed-out"
            finally:  # also on Ctrl-C: no child outlives the question
                if child is not None:
                    kill_group(child.pid)
                    child.wait()
            if not end and status:
                words.seek(0)
                last = words.read()[-2000:].decode(errors="replace").strip().splitlines()
                end = f"{status_words(status)}{': ' + last[-1] if last else ''}"
            assert child is not None
            log.debug("child %d: ended after %.2f s: %s", child.pid, monotonic() - started, end or "exit status 0")
        return _read_lines(answer), end


def kill_group(pid: int) -> None:
    """End a child of this process that has a group of its own, with everything it started. It may be gone already."""
    import signal

    try:
        if OWN_GROUP:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)  # Windows: ends the process at once
    except (ProcessLookupError, PermissionError):
        log.debug("child %d: has already ended", pid)


def is_alive(process: int) -> bool:
    """True if a process of that number runs, also another user's; or if the system cannot say."""
    if sys.platform == "win32":  # os.kill(process, 0) is CTRL_C_EVENT there
        import ctypes

        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel.OpenProcess.restype = ctypes.c_void_p
        kernel.WaitForSingleObject.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
        kernel.CloseHandle.argtypes = [ctypes.c_void_p]
        handle = kernel.OpenProcess(SYNCHRONIZE, False, process)
        if not handle:  # another user's is refused with another error
            return ctypes.get_last_error() != ERROR_INVALID_PARAMETER
        try:
            return bool(kernel.WaitForSingleObject(handle, 0) == WAIT_TIMEOUT)
        finally:
            kernel.CloseHandle(handle)
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError as exc:
        log.debug("process %d: %s", process, exc)  # somebody else's
    return True


def status_words(status: int) -> str:
    """-11 → "signal 11 (Segmentation fault)", 3 → "exit status 3"."""
    import signal

    if status < 0:
        return f"signal {-status} ({signal.strsignal(-status) or 'unknown'})"
    return f"exit status {status:#x}" if status > 255 else f"exit status {status}"  # 0xC0000005 on Windows


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # the process died in the middle of a line
    return lines
