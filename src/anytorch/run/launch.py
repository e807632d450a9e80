"""`anytorch run`: choose the device, then become `python SCRIPT …` with a hook that waits for `import torch`.

The program runs in an interpreter of its own, as if anytorch were not there: exit status, signals, `sys.argv`, tracebacks,
`breakpoint()` and profilers are Python's. Its child processes inherit the hook by the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from anytorch.errors import UsageError
from anytorch.run.child import DEVICE, FOLDER, MAIN, REPORT

if TYPE_CHECKING:
    from anytorch.devices.choose import Resolution

SITE = Path(__file__).parent / "site"
CUDA = "cuda"


def command(arguments: Sequence[str], *, module: bool) -> list[str]:
    """The command line of the program: this Python with its own options, then the script or module."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *(["-m"] if module else []), *arguments]


def environment(chosen: Resolution, report: str | None, before: Mapping[str, str]) -> dict[str, str]:
    """The program's environment: unchanged where CUDA itself does the work."""
    env = {name: value for name, value in before.items() if name not in (DEVICE, MAIN, REPORT, FOLDER)}
    if chosen.chosen.torch_type == CUDA:
        return env
    env[DEVICE] = chosen.name
    env["PYTHONPATH"] = os.pathsep.join([str(SITE), *([env["PYTHONPATH"]] if env.get("PYTHONPATH") else [])])
    if report:
        env[REPORT] = report
        env[FOLDER] = tempfile.mkdtemp(prefix="anytorch-run-")  # the program's own process removes it
    env[MAIN] = f"of {os.getpid()}" if os.name == "nt" else str(os.getpid())
    return env


def check(arguments: Sequence[str], *, module: bool) -> None:
    """Raise UsageError for a program that is not there, or a Python that would not read our hook."""
    if not arguments:
        raise UsageError("no program was named", hint="anytorch run SCRIPT ARGS…, or anytorch run -m MODULE ARGS…")
    if not module and not Path(arguments[0]).exists():
        raise UsageError(f"there is no file {arguments[0]}", hint="name a Python script, or a module with -m")
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise UsageError(
            "Python was started with -I, -E or -S, which keep the stand-in out of the program", hint="leave them out"
        )


def words(chosen: Resolution) -> str:
    """One line about the choice, for standard error."""
    if chosen.chosen.torch_type == CUDA:
        return f"anytorch: cuda is here ({chosen.chosen.name}); the program runs as it is"
    why = f"; {chosen.warning}" if chosen.warning else ""
    asked = "the best device here" if chosen.requested == "auto" else "as asked"
    return f"anytorch: {chosen.name} ({chosen.chosen.name}) stands in for cuda, {asked}{why}"


def become(line: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run the program in place of this process. Windows has no such thing: there, as a child whose status is ours."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    if os.name == "nt":
        sys.exit(subprocess.run(list(line), env=dict(env), check=False).returncode)
    os.execve(line[0], list(line), dict(env))
