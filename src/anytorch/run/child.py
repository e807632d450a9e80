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
    form, folder = environment.get(REPORT, ""), environment.get(FOLDER, "")
    telling = Telling(form, folder, main=is_main(environment.get(MAIN, ""))) if form and folder else None

    def ready() -> None:
        from anytorch.run.stand_in import chosen_before, stand_in

        standing = stand_in(chosen_before(device)).start()
        if telling is not None:
            telling.begin(standing)

    sys.meta_path.insert(0, Waiting(ready))


class Telling:
    """Tells at the end of this process what the stand-in did: itself if it is the program's own, else by a file."""

    def __init__(self, form: str, folder: str, *, main: bool) -> None:
        self._form, self._folder, self._main = form, folder, main
        self._started = time.monotonic()
        self._standing: stand_in | None = None
        self._told = False
        atexit.register(self.end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def begin(self, standing: stand_in) -> None:
        """The stand-in holds from now on. (torch has imported multiprocessing by now.)"""
        from multiprocessing import util

        self._standing = standing
        if standing.place is not None:
            standing.place.start_timing()
        # Children of multiprocessing leave by os._exit, which runs its own list of what is to be done at the end.
        util.register_after_fork(self, Telling._at_the_end_of_a_child)
        self._at_the_end_of_a_child()

    def _at_the_end_of_a_child(self) -> None:
        from multiprocessing import util
        from multiprocessing.process import parent_process

        if parent_process() is not None:
            util.Finalize(None, self.end, exitpriority=-1000)

    def _forked(self) -> None:
        """In a forked child (a DataLoader's worker): what its parent did is not its own."""
        self._main, self._told, self._started = False, False, time.monotonic()
        if self._standing is not None:
            from anytorch.run.ledger import ledger

            ledger.clear()

    def end(self) -> None:
        """Tell, once."""
        if self._told or not (self._main or self._standing):
            return
        self._told = True
        from pathlib import Path

        from anytorch.run import report

        if self._main:
            report.tell(self._standing, Path(self._folder), self._form, self._started)
        elif self._standing is not None:
            report.leave(self._standing, Path(self._folder), self._started)


def is_main(told: str) -> bool:
    """True in the process that `anytorch run` became, or started where a process cannot become another (Windows)."""
    kind, _, number = told.rpartition(" ")
    return number.isdigit() and int(number) == (os.getppid() if kind == "of" else os.getpid())
