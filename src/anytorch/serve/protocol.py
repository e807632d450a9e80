"""uvicorn's HTTP protocol with time limits: a client that sends byte by byte (slow loris) is disconnected.

uvicorn itself waits for ever for the headers of a new connection and for a body. Here both have a time and the headers a
size. A timer per connection costs about a microsecond per request. It waits for ever, too, for a client to read its answer,
which lies in memory meanwhile: here who reads nothing is let go, and all unread answers together are bounded.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem

HEADER_NBYTES = 64 * 1024
READ_NBYTES_PER_S = 1024  # who reads an answer more slowly than that is let go
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
