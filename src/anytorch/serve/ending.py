"""The end of a process whose threads cannot be waited for."""

from __future__ import annotations

import faulthandler
import logging
import os
import stat
import sys
import threading
from contextlib import suppress
from typing import Any

from anytorch import logs
from anytorch.serve.app import Service

log = logs.logger(__name__)

SAYING_S = 1.0  # for last words


def end_now(app: Service, status: int) -> None:
    """End the process, whatever its threads do, and say what they were doing, if somebody reads that."""

    def say() -> None:
        if unfinished := app.state.service.pools.unfinished():
            log.warning("ended while this was still computed: %s", ", ".join(unfinished[:10]))
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    try:  # apart: a pipe that is full, with nobody who reads it, would hold whoever writes
        saying = threading.Thread(target=say, daemon=True)
        saying.start()
        saying.join(SAYING_S)
    finally:
        os._exit(status)


def end_later(seconds: float) -> None:
    """End the process after so long, by a thread of the interpreter's own, which needs no turn of the interpreter."""
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=_never_full())
    except (RuntimeError, AttributeError, OSError, ValueError):  # standard error is no file: pythonw, a Windows service
        with suppress(OSError, RuntimeError):  # then our own thread ends it alone
            faulthandler.dump_traceback_later(seconds, exit=True, file=os.open(os.devnull, os.O_WRONLY))


def _never_full() -> Any:
    """Standard error; of a pipe another end, which loses what does not fit instead of waiting until somebody reads."""
    with suppress(OSError, AttributeError, ValueError):
        number = sys.stderr.fileno()
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            return os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
    return sys.stderr
