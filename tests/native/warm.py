"""Python processes that need not import torch: forked from one that has, which saves each of them two seconds of a core.

What a script does from `import torch` on is what it does in a process of its own. What torch or a library of C reads from
the environment while it is loaded has been read: a script `fits` only if it differs in nothing but variables read LATER.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LATER = ("ANYTORCH_", "YIRAGE_", "TRITON_INTERPRET", "TRITON_CACHE_DIR", "FOLDERS", "PYTHONPATH", "PYTEST_CURRENT_TEST")
LATER += ("VK_ICD_FILENAMES",)

# The child leaves the loop and runs its script at the end of this one, so that it ends as every Python process ends.
SERVER = """
import gc, json, os, random, select, signal, sys, types
import numpy, torch
asked, answers = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "w")
gc.freeze()  # a collection in a child would copy all of torch's pages
print("ready", file=answers, flush=True)
while line := asked.readline():
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    watched = os.pidfd_open(child)
    # Nobody asks again before the answer: if there is something to read, it is the end.
    happened, _, _ = select.select([watched, asked], [], [], request["timeout_s"])
    ended = watched in happened
    os.close(watched)
    if not ended:
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:  # it has not come to setsid yet
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), ended]), file=answers, flush=True)
else:
    sys.exit(0)
os.setsid()
asked.close()
answers.close()
for number, name in enumerate(("/dev/null", request["stdout"], request["stderr"])):
    opened = os.open(name, os.O_RDWR)
    os.dup2(opened, number)
    os.close(opened)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
random.seed()
numpy.random.seed()
sys.argv = ["-c"]
more = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder not in sys.path]
sys.path[1:1] = more
code = request["code"]
module = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(code, "<string>", "exec"), module.__dict__)
"""


class Warm:
    """A process with torch in it, started when it is first asked. One script runs at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._ask: Any = None
        self._answers: Any = None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """True if a script with this environment may start in the middle: only variables read LATER are others."""
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            return False
        if self._process is None:
            return True
        names = {n for n in environment.keys() | self._environment if environment.get(n) != self._environment.get(n)}
        return all(name.startswith(LATER) for name in names)

    def run(self, code: str, environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """What `python -c code` gives, from a process that has torch already. Raises subprocess.TimeoutExpired."""
        try:
            return self._run(code, environment, timeout_s)
        except subprocess.TimeoutExpired:
            raise
        except BaseException:  # interrupted, the answer would be taken for the next script's
            self.close()
            raise

    def _run(self, code: str, environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        if self._process is None:
            self._start(environment)
        with tempfile.TemporaryDirectory(prefix="anytorch-warm-") as folder:
            outputs = [Path(folder, name) for name in ("stdout", "stderr")]
            for output in outputs:
                output.touch()
            request = {
                "code": code,
                "environment": dict(environment),
                "folder": str(Path.cwd()),
                "timeout_s": timeout_s,
                "stdout": str(outputs[0]),
                "stderr": str(outputs[1]),
            }
            self._ask.write(json.dumps(request).encode() + b"\n")
            status, ended = json.loads(self._answer())
            stdout, stderr = (output.read_text("utf-8", errors="replace") for output in outputs)
        if not ended:
            raise subprocess.TimeoutExpired(["python", "-c", code], timeout_s, stdout, stderr)
        return subprocess.CompletedProcess([sys.executable, "-c", code], status, stdout, stderr)

    def _answer(self) -> str:
        line: str = self._answers.readline()
        assert line, "the process that scripts are forked from is gone"
        return line

    def _start(self, environment: Mapping[str, str]) -> None:
        asked, ask = os.pipe()
        answers, answer = os.pipe()
        plain = {name: value for name, value in environment.items() if not name.startswith(LATER)}
        command = [sys.executable, "-c", SERVER, str(asked), str(answer)]
        speaking = {**plain, "PYTHONIOENCODING": "utf-8"}  # as `run` reads it, whatever the locale
        self._ask, self._answers = os.fdopen(ask, "wb", buffering=0), os.fdopen(answers)
        self._environment = plain
        # In a session of its own: Ctrl-C ends it through `close`, which ends its script as well.
        self._process = subprocess.Popen(
            command, env=speaking, pass_fds=(asked, answer), stdin=subprocess.DEVNULL, start_new_session=True
        )
        os.close(asked)
        os.close(answer)
        atexit.register(self.close)
        assert self._answer() == "ready\n"

    def close(self) -> None:
        """End the process, and the script that runs in it. The next script starts another."""
        if self._process is not None:
            self._ask.close()
            self._process.wait()
            self._answers.close()
            self._process = None
            atexit.unregister(self.close)
