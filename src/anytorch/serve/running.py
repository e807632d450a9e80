"""The app in one process: uvicorn, signals that drain, and the measured start."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from anytorch.errors import ModelError
from anytorch.serve.app import Service
from anytorch.serve.options import ServeOptions
from anytorch.serve.protocol import protocol_class
from anytorch.serve.routes.health import status_of
from anytorch.serve.start import BACKLOG, Told, first_answer

INTERRUPTED = 128 + signal.SIGINT  # as a shell says it of a program that Ctrl-C has ended


def run_app(
    app: Service,
    options: ServeOptions,
    listening: socket.socket,
    told: Told | None,
    beat: Callable[[], None] | None = None,
) -> int:
    """Run an app in this process. `beat` is called about every second while the event loop turns."""
    # The worker thread of a queue needs the interpreter for moments only: 5 ms, the default, is as long as a small batch.
    sys.setswitchinterval(0.0005)
    config = uvicorn.Config(
        app,
        http=protocol_class(options),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=options.access_log,
        backlog=BACKLOG,
        timeout_keep_alive=int(options.keep_alive_s),
        timeout_graceful_shutdown=max(1, round(options.drain_s)),
        server_header=False,
        proxy_headers=False,
    )
    set_up_logs(options.access_log)
    server = Server(config, app, options.drain_delay_s, beat)
    failed: list[ModelError] = []
    if told is not None:
        threading.Thread(
            target=tell, args=(server, app, options, told, failed), name="anytorch-first-answer", daemon=True
        ).start()
    server.run(sockets=[listening])
    if failed:
        raise failed[0]
    return 0


def tell(server: Server, app: Service, options: ServeOptions, told: Told, failed: list[ModelError]) -> None:
    """In a thread: wait for the first answer, report how long it took, then load the other models."""
    keys = app.guard.keys
    service = app.state.service
    started = first_answer(
        options,
        key=keys.one if keys else None,
        stopped=lambda: server.should_exit,
        worth_asking=lambda: server.started and status_of(service)[0] != "starting",
    )
    if isinstance(started, ModelError):
        if not server.should_exit:
            failed.append(started)
            server.should_exit = True
        return
    try:
        told(started)
    finally:  # whoever listens may be gone; the service goes on all the same
        server.call(service.load_rest)


class Server(uvicorn.Server):
    """uvicorn's, but a signal drains and is not raised again afterwards: a stop that was asked for is a success."""

    def __init__(self, config: uvicorn.Config, app: Service, delay_s: float, beat: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._app, self._delay_s, self._beat = app, delay_s, beat
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, function: Callable[[], Any]) -> None:
        """Run a function on the event loop, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._beat is not None and counter % 10 == 0:
            self._beat()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [signal.SIGINT, signal.SIGTERM]
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        state = self._app.state.service
        if state.draining and sig == signal.SIGINT:  # the second one: engines that compute would be waited for
            logging.shutdown()
            os._exit(INTERRUPTED)
        state.draining = True
        if self._delay_s and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._delay_s, self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        self.should_exit = True


def set_up_logs(access: bool) -> None:
    """Log uvicorn's failures to standard error, but not malformed requests."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    quiet = logging.getLogger("uvicorn.access")
    quiet.handlers.clear()
    quiet.propagate = False
    if access:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        quiet.addHandler(handler)
        quiet.setLevel(logging.INFO)
