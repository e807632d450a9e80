"""Threads, which the system may refuse: a container's limit of processes is reached, or there is no memory for a stack."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from anytorch import logs
from anytorch.errors import NoThread

REFUSED = "can't start new thread"  # what Python says
log = logs.logger(__name__)


class Workers(ThreadPoolExecutor):
    """A ThreadPoolExecutor that works with fewer threads where the system does not give all of them.

    `submit` raises NoThread where there is none at all, and nothing is queued then. The executor it is made of raises
    RuntimeError for each thread that it does not get, and leaves the call in its queue: another thread does it later, for a
    caller that has been told that it failed and has given up the memory it is about.
    """

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as exc:
            if not self._threads:
                self._work_queue.get_nowait()  # ours: whoever queues holds a lock, and nobody takes anything out
                raise no_thread(self._thread_name_prefix or "", exc) from exc
            log.info("%s: %d of %d threads do the work: %s", self._thread_name_prefix, len(self._threads),
                     self._max_workers, exc)  # fmt: skip


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises NoThread where the system gives none."""
    try:
        thread.start()
    except RuntimeError as exc:
        raise no_thread(thread.name, exc) from exc


def no_thread(name: str, exc: RuntimeError) -> NoThread:
    return NoThread(
        f"the system gives no thread for {name or 'the work'}: {exc}",
        hint="end other programs, or raise the limit of processes (`ulimit -u`, a container's pids limit) and try again",
    )
