"""What runs in a program's process before the program: wait for torch, then begin the stand-in; report at the end.

Standard library only until torch is imported: programs that never import it pay 1 ms.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from anytorch.run.hooks import Waiting

if TYPE_CHECKING:
    from anytorch.run.stand_in import stand_in

DEVICE = "ANYTORCH_STAND_IN"  # the device; children find it here, too
REPORT = "ANYTORCH_STAND_IN_REPORT"  # "text" or "json": tell at the end
FOLDER = "ANYTORCH_STAND_IN_FOLDER"  # where children leave their reports
MAIN = "ANYTORCH_STAND_IN_MAIN"  # the process that tells: its own id, or "of" and its parent's


def begin(environment: MutableMapping[str, str] = os.environ) -> None:
    """Called by our sitecustomize in every Python process below `anytorch run`."""
    device = environment.get(DEVICE)
    if not device or "torch" in sys.modules:
        return
    started, pid, main = time.monotonic(), os.getpid(), is_main(environment.get(MAIN, ""))
    form, folder = environment.get(REPORT, ""), environment.get(FOLDER, "")
    begun: list[stand_in] = []

    def ready() -> None:
        from anytorch.run.stand_in import chosen_before, stand_in

        begun.append(stand_in(chosen_before(device)).start())

    def end() -> None:
        if os.getpid() != pid or not (main or begun):  # a forked child has its parent's list of what to do at the end
            return
        from pathlib import Path

        from anytorch.run import report

        if main:
            report.tell(begun[0] if begun else None, Path(folder), form, started)
        else:
            report.leave(begun[0], Path(folder), started)

    if form and folder:
        atexit.register(end)
    sys.meta_path.insert(0, Waiting(ready))


def is_main(told: str) -> bool:
    """True in the process that `anytorch run` became, or started where a process cannot become another (Windows)."""
    kind, _, number = told.rpartition(" ")
    return number.isdigit() and int(number) == (os.getppid() if kind == "of" else os.getpid())
