"""What runs in a program's process before the program: wait for torch, then begin the stand-in; report at the end.

Standard library only until torch is imported: programs that never import it pay 1 ms.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import MutableMapping

from anytorch.run.hooks import Waiting

DEVICE = "ANYTORCH_STAND_IN"  # the device; children find it here, too
REPORT = "ANYTORCH_STAND_IN_REPORT"  # "text" or "json": tell at the end
MAIN = "ANYTORCH_STAND_IN_MAIN"  # the process that tells: its own id, or "of" and its parent's


def begin(environment: MutableMapping[str, str] = os.environ) -> None:
    """Called by our sitecustomize in every Python process below `anytorch run`."""
    device = environment.get(DEVICE)
    if not device or "torch" in sys.modules:
        return
    started = time.monotonic()
    main = is_main(environment.get(MAIN, ""))

    def ready() -> None:
        from anytorch.run.stand_in import chosen_before, stand_in

        standing = stand_in(chosen_before(device)).start()
        if main and environment.get(REPORT):
            from anytorch.run import report

            pid = os.getpid()
            atexit.register(lambda: report.tell(standing, environment[REPORT], started) if os.getpid() == pid else None)

    sys.meta_path.insert(0, Waiting(ready))


def is_main(told: str) -> bool:
    """True in the process that `anytorch run` became, or started where a process cannot become another (Windows)."""
    kind, _, number = told.rpartition(" ")
    return number.isdigit() and int(number) == (os.getppid() if kind == "of" else os.getpid())
