"""The app in one process: uvicorn, signals that drain, and the measured start."""

from __future__ import annotations

import asyncio
import faulthandler
import http.client
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anytorch import logs
from anytorch.errors import ModelError
from anytorch.serve.app import Service
from anytorch.serve.ending import end_later, end_now
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem
from anytorch.serve.routes.health import status_of

log = logs.logger(__name__)

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
    server = Server(
        config, app, options.drain_delay_s, beat, options.drain_delay_s + max(1.0, options.drain_s) + LEAVE_S
    )
    failed: list[ModelError] = []
    if told is not None:
        threading.Thread(
            target=tell, args=(server, app, options, told, failed), name="anytorch-first-answer", daemon=True
        ).start()
    others = set(threading.enumerate())
    server.run(sockets=[listening])
    pools = app.state.service.pools
    pools.wait(LEAVE_S if failed else 0.0)
    if pools.unfinished() and not failed:
        end_now(app, 0)  # an interpreter that ends under a thread of native code may crash
    if all(one.daemon or one in others for one in threading.enumerate()):  # else the interpreter will wait for it
        server.ended.set()
    if failed:
        raise failed[0]
    return 0


LEAVE_S = 3.0  # after the time to drain: engines are closed, and the process ends
STUBBORN_S = 1.0  # later still it ends without the interpreter, which a thread may keep


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

    def __init__(
        self,
        config: uvicorn.Config,
        app: Service,
        delay_s: float,
        beat: Callable[[], None] | None,
        leave_s: float | None = None,
    ) -> None:
        """`leave_s`: after the first signal, when the process ends whatever hangs; None: it waits."""
        super().__init__(config)
        self._app, self._delay_s, self._beat, self._leave_s = app, delay_s, beat, leave_s
        self.ended = threading.Event()
        self._asked = threading.Event()  # to leave, by the first signal; or there will be none any more
        self._leaving = False
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
        if self._leave_s is not None:
            # Not in the handler: the code that it interrupts may have the lock that starting a thread waits for.
            threading.Thread(target=self._leave, name="anytorch-leave", daemon=True).start()
        try:
            with signals_to(self.handle_exit):
                yield
        finally:
            self._asked.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        state = self._app.state.service
        if state.draining and sig == signal.SIGINT:  # the second one: engines that compute would be waited for
            logging.shutdown()
            os._exit(INTERRUPTED)
        first, state.draining = not state.draining, True
        if self._leave_s is not None and first:
            self._leaving = True
            self._asked.set()
            end_later(self._leave_s + STUBBORN_S)
        if self._delay_s and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._delay_s, self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        self.should_exit = True

    def _leave(self) -> None:
        self._asked.wait()
        if not self._leaving:
            return
        if self.ended.wait(self._leave_s):
            faulthandler.cancel_dump_traceback_later()
        else:
            log.warning("requests or engines did not end within the time to drain")
            end_now(self._app, 0)


@contextmanager
def signals_to(stop: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """A block in which SIGTERM and Ctrl-C call `stop`. Only the main thread can have them; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def set_up_logs(access: bool) -> None:
    """Log uvicorn's failures to standard error, but not malformed requests, of which a client may send any number."""
    for name in ("uvicorn.error", "python_multipart"):
        logging.getLogger(name).setLevel(logging.ERROR)
    quiet = logging.getLogger("uvicorn.access")
    quiet.handlers.clear()
    quiet.propagate = False
    if access:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        quiet.addHandler(handler)
        quiet.setLevel(logging.INFO)


# --- the measured start: from the beginning of the process to the first request that was answered over the port -------

PAUSE_S = 0.01
BACKLOG = 2048  # connections the kernel keeps until a process takes them
GENERAL_HINT = "`anytorch doctor` says what is wrong with a device; -v shows more"
BEGAN = time.monotonic()  # where the operating system does not tell when a process began


@dataclass(frozen=True)
class Started:
    """What the start line reports once the service answers."""

    url: str
    device: str
    models: dict[str, list[str]]
    seconds: float  # from the start of the process to the first answered request
    workers: int = 1
    device_warning: str | None = None


Told = Callable[[Started], None]


def process_age_s() -> float:
    """Seconds since this process started, or since this module was imported where that is unknown."""
    try:
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - BEGAN


def first_answer(
    options: ServeOptions,
    *,
    key: str | None,
    stopped: Callable[[], bool],
    limit_s: float = math.inf,
    worth_asking: Callable[[], bool] = lambda: True,
) -> Started | ModelError:
    """Send a request until the service answers; return why it cannot, with a hint, if it never does.

    `worth_asking`: a caller in the same process knows when there is something to hear; the metrics count every question.
    """
    host = options.host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    headers = {"Host": f"{'localhost' if options.loopback else (*options.allow_hosts, host)[0]}:{options.port}"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    last = time.monotonic() + limit_s
    while not stopped():
        if time.monotonic() > last:
            return ModelError(f"nothing was ready on {options.url} within {limit_s:g} s", hint=GENERAL_HINT)
        if not worth_asking():
            time.sleep(PAUSE_S)
            continue
        try:
            health = _ask(host, options.port, "GET", "/v1/readyz", headers)
        except OSError:
            time.sleep(PAUSE_S)
            continue
        status = health["status"]
        if status == "failed":
            words = health.get("detail") or "a model could not be loaded"
            return ModelError(words, hint=health.get("hint") or GENERAL_HINT)
        if status != "ready":
            time.sleep(PAUSE_S)
            continue
        if health["models"]["embeddings"]:
            try:
                _ask(host, options.port, "POST", "/v1/embeddings", headers, b'{"input":"hello"}')
            except OSError as exc:
                return ModelError(f"the first request was not answered: {exc}", hint=GENERAL_HINT)
        return Started(
            options.url,
            health["device"],
            {job: [model["id"] for model in models] for job, models in health["models"].items()},
            round(process_age_s(), 2),
            options.workers,
            health["device_warning"],
        )
    return ModelError("stopped before it was ready")


def _ask(host: str, port: int, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> dict:  # type: ignore[type-arg]
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        sent = {**headers, "Content-Type": "application/json"} if body is not None else headers
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        document = json.loads(answer.read())
    except (ValueError, http.client.HTTPException) as exc:
        raise OSError(f"{type(exc).__name__}: {exc}") from exc
    finally:
        connection.close()
    if body is not None and answer.status != 200:
        raise OSError(f"{answer.status}: {document.get('detail', '')}")
    assert isinstance(document, dict)
    return document


# --- time limits ------------------------------------------------------------------------------------------------------

# uvicorn waits for ever for the headers of a new connection and for a body: a client that sends byte by byte (slow loris)
# stays. Here both have a time and the headers a size. A timer per connection costs about a microsecond per request. It waits
# for ever, too, for a client to read its answer, which lies in memory meanwhile: here a client that reads nothing is
# disconnected, and all unread answers together are bounded.

HEADER_NBYTES = 64 * 1024
READ_NBYTES_PER_S = 1024  # a client that reads an answer more slowly is disconnected
UNREAD_AT_ONCE = 32  # times the largest body: the answers that wait in memory to be read, over all connections


class PatientProtocol(HttpToolsProtocol):
    """`options` is set by `protocol_class`."""

    options: ServeOptions
    unread: dict[PatientProtocol, None]  # connections with an answer that waits to be read, the oldest first
    _reading: asyncio.TimerHandle | None = None
    _unread_nbytes = 0
    _timer: asyncio.TimerHandle | None = None
    _in_headers = True
    _header_nbytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait(self.options.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._is_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_nbytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_nbytes > HEADER_NBYTES:
            self._refuse(Problem(431, "headers-too-large", "The headers are too large"))

    def on_message_begin(self) -> None:
        self._in_headers, self._header_nbytes = True, 0
        self._wait(self.options.header_timeout_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        if not self.url.startswith(b"/") and self.url != b"*":
            # Its host may be another than the header's: the guard refuses it.
            self.scope["anytorch.target"] = "absolute"  # type: ignore[typeddict-unknown-key]  # uvicorn has only its own
        self._wait(self.options.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_waiting()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Called by the transport when more than 64 KiB wait to be sent; not for short answers."""
        super().pause_writing()
        self.unread[self] = None
        self._watch_reader()
        most = UNREAD_AT_ONCE * self.options.max_body_nbytes
        sizes = {one: one.transport.get_write_buffer_size() for one in self.unread}
        total = sum(sizes.values())
        for one, nbytes in sizes.items():
            if total <= most or one is self:
                break
            one.transport.abort()
            total -= nbytes

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # to close would wait for the rest to be read
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _watch_reader(self) -> None:
        self._unread_nbytes = self._left()
        if self._reading is not None:
            self._reading.cancel()
        self._reading = self.loop.call_later(self.options.body_timeout_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        read = self._unread_nbytes - self._left()
        if read < READ_NBYTES_PER_S * self.options.body_timeout_s:
            self.transport.abort()
        else:
            self._watch_reader()

    def _left(self) -> int:
        """Bytes the client has not received yet: here and in the kernel, which buffers megabytes."""
        return int(self.transport.get_write_buffer_size()) + kernel_nbytes(self.transport.get_extra_info("socket"))

    def _is_read(self) -> None:
        self.unread.pop(self, None)
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(Problem(400, "not-http", "The request is not HTTP", msg))

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        first_under_way = self._in_headers and self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or first_under_way:
            # A request sent behind one that is being answered: it is not read while that takes its time.
            self._wait(self.options.header_timeout_s)
            return
        what = "headers" if self._in_headers else "body"
        self._refuse(Problem(408, "too-slow", "The request came too slowly", f"the {what} did not arrive in time"))

    def _refuse(self, problem: Problem) -> None:
        """Answer (unless an answer has begun) and close: what follows on this connection cannot be trusted."""
        self._stop_waiting()
        if self.transport is None or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = problem.body("")
            head = [f"HTTP/1.1 {problem.status} {problem.title}\r\n".encode()]
            head += [name + b": " + value + b"\r\n" for name, value in problem.raw_headers(len(body))]
            self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", body]))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the end point learns of it as of a client that went away
            self.cycle.message_event.set()
        self.transport.close()


def kernel_nbytes(connection: Any) -> int:
    """Bytes of a socket that the other side has not acknowledged; 0 where the system does not tell."""
    if sys.platform != "linux" or connection is None or connection.fileno() < 0:
        return 0
    import fcntl
    import termios

    try:
        told = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return int.from_bytes(told, sys.byteorder)


def protocol_class(options: ServeOptions) -> type[PatientProtocol]:
    return type("PatientProtocol", (PatientProtocol,), {"options": options, "unread": {}})
