"""The latest survey of the machine, made in the background: trying devices may take seconds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

from anytorch.devices.choose import Survey
from anytorch.serve import machine

T = TypeVar("T")
FRESH_S = 30.0
PATIENCE_S = 1.0  # then files alone are told, and the trial goes on


class Looks:
    """Surveys the machine in a thread, once at a time."""

    def __init__(self) -> None:
        self._tried: tuple[float, Survey] | None = None
        self._under_way: asyncio.Future[Survey] | None = None

    async def survey(self, *, refresh: bool = False, fresh_s: float = FRESH_S) -> tuple[Survey, bool]:
        """The devices, and whether they were tried. `refresh` waits for a trial that begins now."""
        if self._tried is not None and not refresh and time.monotonic() - self._tried[0] <= fresh_s:
            return self._tried[1], True
        task = self._under_way
        if task is None:
            task = self._under_way = asyncio.ensure_future(self._try(refresh))
        done, _ = await asyncio.wait({task}, timeout=None if refresh else PATIENCE_S)
        if done:
            return task.result(), True
        if self._tried is not None:
            return self._tried[1], True
        return await asyncio.to_thread(machine.look, tried=False), False

    async def _try(self, refresh: bool) -> Survey:
        try:
            found = await in_background(lambda: machine.look(tried=True, refresh=refresh))
            self._tried = (time.monotonic(), found)
            return found
        finally:
            self._under_way = None


async def in_background(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but in a daemon thread, so that stopping the service does not wait for it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def finish(value: T | None, exc: BaseException | None) -> None:
        if answer.done():
            return
        if exc is not None:
            answer.set_exception(exc)
        else:
            answer.set_result(cast("T", value))

    def run() -> None:
        value: T | None = None
        failed: BaseException | None = None
        try:
            value = work()
        except Exception as exc:  # noqa: BLE001  (raised again where it is awaited)
            failed = exc
        try:
            loop.call_soon_threadsafe(finish, value, failed)
        except RuntimeError:  # the loop has ended: nobody waits any more
            return

    threading.Thread(target=run, name="anytorch-look", daemon=True).start()
    return await answer
