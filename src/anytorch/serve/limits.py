"""Access and limits: the first code every request meets, in pure ASGI because it runs for each of them.

In this order: the Host header (a web page of another site must not reach a loopback service through its own name), the
origin, the key, the rate, the size of the body, the time it may take. What is refused is counted and answered with a
problem document; what fails inside becomes one as well, without a stack trace.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from anytorch import logs
from anytorch.serve.bodies import MOST_NESTED, refuse_crowds
from anytorch.serve.keys import Keys
from anytorch.serve.metrics import Metrics
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem, problem_of, retry_after, unexpected
from anytorch.serve.threads import HOLDER

log = logs.logger(__name__)

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN_PATHS = frozenset({"/", "/v1/healthz", "/v1/readyz", "/favicon.ico", "/docs", "/openapi.json"})  # no key needed
OPEN_PREFIX = "/web/"
UNTIMED = frozenset({"/api/load-model", "/v1/benchmark", "/v1/completions", "/v1/chat/completions"})
BODIES_AT_ONCE = 8  # times the largest body, over all requests under way: what reading bodies may take of the memory
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NOT_A_PAGE = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")


class ClientGone(Exception):
    """The client closed the connection; no response is needed."""


class Call:
    """One request: its headers and its outcome."""

    __slots__ = ("_give_back", "_given_back", "body_nbytes", "client", "ended", "headers", "hosts", "method", "over",
                 "path", "receive", "route", "send", "started", "status", "threads", "timeout_s")  # fmt: skip

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, give_back: Callable[[int], None] = lambda _: None
    ) -> None:
        self.started = time.perf_counter()
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = {}
        self.hosts = 0
        for name, value in scope["headers"]:
            self.headers.setdefault(name, value)
            if name == b"host":
                self.hosts += 1
        self.client = ""
        self.receive = receive
        self.send = send
        self.route = "other"
        self.status = 0
        self.timeout_s = 0.0
        self.body_nbytes = 0
        self.ended = False
        self.over = False
        self.threads = 0  # that work for it; some may go on when it is over
        self._give_back = give_back
        self._given_back = False

    def end(self) -> None:
        """Give back what it holds of the memory for bodies, now or when its last thread has ended."""
        self.over = True
        self._settle()

    def thread_ended(self) -> None:
        self.threads -= 1
        self._settle()

    def _settle(self) -> None:
        # Once: what a request leaves behind, such as a task that goes on, may use a thread after it.
        if self.over and not self.threads and not self._given_back:
            self._given_back = True
            self._give_back(self.body_nbytes)


class Guard:
    """The ASGI middleware. `hot` are end points called with the Call itself; everything else goes to `inner`."""

    def __init__(
        self,
        inner: Callable[[Scope, Receive, Send], Awaitable[None]],
        hot: dict[tuple[str, str], Callable[[Call], Awaitable[None]]],
        routes: frozenset[str],
        options: ServeOptions,
        keys: Keys | None,
        metrics: Metrics,
    ) -> None:
        self._inner, self._hot, self._routes = inner, hot, routes
        self._options, self._metrics = options, metrics
        self.keys = keys
        self._rates = None if options.rate_limit is None else Rates(options.rate_limit / options.workers)
        self._hosts = allowed_hosts(options)
        self._origins = frozenset(options.allow_origins)
        self._bodies_left = BODIES_AT_ONCE * options.max_body_nbytes
        self._most_nested = max(MOST_NESTED, 2 * options.max_texts)  # token ids are a list for each text
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send, self._give_back)
        HOLDER.set(call)
        self.under_way += 1
        try:
            await self._answer(call, scope)
        except ClientGone:
            call.status = 499
        except asyncio.CancelledError:  # the time to drain is over; the client still gets a status
            if call.status:
                raise
            await self.send_problem(call, stopped())
        except Exception as exc:  # noqa: BLE001  (the last line of defence: every request gets a status)
            await self._fail(call, exc)
        finally:
            self.under_way -= 1
            call.end()
            self._metrics.request(call.route, call.status, time.perf_counter() - call.started)

    def _give_back(self, nbytes: int) -> None:
        self._bodies_left += nbytes

    async def _answer(self, call: Call, scope: Scope) -> None:
        if call.path in self._routes:
            call.route = call.path
        elif call.path.startswith(OPEN_PREFIX):
            call.route = OPEN_PREFIX
        self._check(call, scope)
        hot = self._hot.get((call.method, call.path))
        if hot is not None:
            await hot(call)
            return
        sending = self._sending(call)
        if call.method == "OPTIONS" and b"origin" in call.headers and self._origins:
            await sending({"type": "http.response.start", "status": 204, "headers": PREFLIGHT})
            await sending({"type": "http.response.body", "body": b""})
            return
        await self._with_body(call, scope, sending)

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check(self, call: Call, scope: Scope) -> None:
        headers = call.headers
        if call.hosts > 1 or "anytorch.target" in scope:
            what = "several Host headers" if call.hosts > 1 else "an absolute URL as its target"
            raise Problem(
                400, "ambiguous-host", "The host is ambiguous", f"the request has {what}",
                hint="send one Host header, and a target that begins with /", headers={"Connection": "close"},
            )  # fmt: skip
        if self._hosts is not None and host_name(headers.get(b"host", b"")) not in self._hosts:
            raise Problem(
                421,
                "unknown-host",
                "Unknown host name",
                "this service accepts only its own host names: " + ", ".join(sorted(self._hosts)),
                hint="add a name with --allow-host",
            )
        origin = headers.get(b"origin")
        if origin is not None and call.method not in SAFE_METHODS and not self._may_come_from(origin, headers):
            raise Problem(
                403,
                "foreign-origin",
                "Origin not allowed",
                "the request comes from a web page of another origin",
                hint="allow it with --allow-origin",
            )
        call.client = self._client(call, scope)
        if self._rates is not None and not is_unrated(call.path) and (wait_s := self._rates.wait_s(call.client)) > 0:
            raise Problem(
                429,
                "rate-limit",
                "Too many requests",
                f"the limit is {self._options.rate_limit:g} requests per second and client",
                headers=retry_after(wait_s),
            )
        if self.under_way > self._options.max_connections:
            raise Problem(503, "busy", "Too many requests at once", headers=retry_after())
        call.timeout_s = self._timeout(headers.get(b"x-request-timeout"))
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > self._options.max_body_nbytes):
            raise self._too_large()

    def _client(self, call: Call, scope: Scope) -> str:
        """The client: its key's name, or its address. Raises a 401 Problem if a required key is missing."""
        address = scope.get("client")
        if self.keys is None:
            return address[0] if address else ""
        given = call.headers.get(b"authorization", b"")
        given = given[7:].strip() if given[:7].lower() == b"bearer " else call.headers.get(b"x-api-key", b"")
        name = self.keys.name_of(given) if given else None
        if name is None and not is_open(call.path):
            if call.method == "OPTIONS" and self._origins:
                return address[0] if address else ""  # a preflight never carries the key
            raise Problem(
                401,
                "key-needed",
                "An API key is required",
                "the key is unknown" if given else "no key was sent",
                hint="send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return name or ""

    def _may_come_from(self, origin: bytes, headers: dict[bytes, bytes]) -> bool:
        text = origin.decode("latin-1")
        return self.allows(text) or text.partition("://")[2].encode("latin-1") == headers.get(b"host")

    def allows(self, origin: str | None) -> bool:
        """Whether pages of this origin were allowed by --allow-origin."""
        return origin is not None and (origin in self._origins or "*" in self._origins)

    def _timeout(self, asked: bytes | None) -> float:
        most = self._options.timeout_s
        if asked is None:
            return most
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise Problem(
                400,
                "bad-timeout",
                "X-Request-Timeout is invalid",
                "X-Request-Timeout must be a number of seconds above 0",
            )
        return min(seconds, most)

    def _too_large(self) -> Problem:
        most = self._options.max_body_nbytes
        return Problem(
            413, "body-too-large", "The body is too large", f"the limit is {most} bytes",
            hint="send less at a time, or start the service with a larger --max-body", headers={"Connection": "close"},
        )  # fmt: skip

    # --- bodies ------------------------------------------------------------------------------------------------------

    async def read(self, call: Call) -> bytes:
        """The whole body. Raises ClientGone, or a 413 Problem."""
        body = await self._received(call)
        refuse_crowds(body, self._most_nested)
        return body

    async def _received(self, call: Call) -> bytes:
        message = await call.receive()
        if message["type"] != "http.request":
            raise ClientGone
        body: bytes = message.get("body", b"")
        self._count(call, len(body))
        if not message.get("more_body", False):
            return body
        parts = [body]
        while message.get("more_body", False):
            message = await call.receive()
            if message["type"] != "http.request":
                raise ClientGone
            part = message.get("body", b"")
            self._count(call, len(part))
            parts.append(part)
        return b"".join(parts)

    def _count(self, call: Call, nbytes: int) -> None:
        call.body_nbytes += nbytes
        self._bodies_left -= nbytes
        if call.body_nbytes > self._options.max_body_nbytes:
            raise self._too_large()
        if self._bodies_left < 0:
            raise Problem(
                429,
                "bodies-full",
                "Too much data at once",
                "the bodies of all current requests together exceed the limit",
                headers={**retry_after(), "Connection": "close"},
            )

    async def _with_body(self, call: Call, scope: Scope, sending: Send) -> None:
        """Run an end point of `inner` with its body read, within its time limit, until the client disconnects."""
        body = await self.read(call)
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await asyncio.Future()  # for ever: a client that disconnects ends the end point

        limit = None if call.path in UNTIMED else call.timeout_s
        await within(self._inner(scope, receive, sending), call, limit, "answered")

    # --- answers -----------------------------------------------------------------------------------------------------

    def _sending(self, call: Call) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                headers = [*message.get("headers", ()), *self.extra_headers(call)]
                if not any(name == b"content-security-policy" for name, _ in headers):
                    headers.append(NOT_A_PAGE)
                message = {**message, "headers": headers}
            elif not message.get("more_body", False):
                call.ended = True
            await call.send(message)

        return sending

    def extra_headers(self, call: Call) -> list[tuple[bytes, bytes]]:
        origin = call.headers.get(b"origin") if self._origins else None
        if origin is None or not (origin.decode("latin-1") in self._origins or "*" in self._origins):
            return SECURITY
        return [
            *SECURITY[:-1],
            (b"cross-origin-resource-policy", b"cross-origin"),
            (b"access-control-allow-origin", origin),
            (b"vary", b"origin"),
        ]

    async def send_problem(self, call: Call, problem: Problem) -> None:
        call.status = problem.status
        if problem.refuses:
            self._metrics.rejected(problem.code)
        body = problem.body(call.path)
        headers = [*problem.raw_headers(len(body)), *self.extra_headers(call), NOT_A_PAGE]
        await call.send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await call.send({"type": "http.response.body", "body": b"" if call.method == "HEAD" else body})

    async def _fail(self, call: Call, exc: Exception) -> None:
        if call.ended:
            return  # FastAPI has answered with a problem, logged it, and raised it once more
        problem = problem_of(exc)
        if call.status:  # the answer has begun: all that is left is to end it
            log.warning("%s %s ended early: %s", call.method, call.path, exc)
            raise exc
        await self.send_problem(call, problem or unexpected(exc, f"{call.method} {call.path}"))


async def within(work: Awaitable[T], call: Call, limit_s: float | None, done_to_it: str) -> T:
    """Await work; cancel it when the time is up (TimeoutError) or the client has gone (ClientGone)."""

    async def watch() -> None:
        while (await call.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        done, _ = await asyncio.wait({task, watcher}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        late, gone = task not in done, watcher in done
        del done
        if late:
            task.cancel()
            await asyncio.wait({task})
            raise ClientGone if gone else TimeoutError(f"not {done_to_it} within {call.timeout_s:g} s")
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        del (
            task,
            work,
        )  # an error's traceback has this frame, and the task has the error: a cycle keeps a request's data


def stopped() -> Problem:
    return Problem(
        503, "stopping", "The service is stopping", "it stopped before the answer was ready",
        hint="retry: another worker or the restarted service will answer", headers=retry_after(),
    )  # fmt: skip


HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/@\[\]\\?#,]+))(?::[0-9]{0,5})?")
PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-timeout"),
    (b"access-control-max-age", b"600"),
]


def is_open(path: str) -> bool:
    """Paths that need no key and have no rate limit: the page's files and the health checks."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def is_unrated(path: str) -> bool:
    """Paths exempt from rate limits."""
    return path == "/metrics" or is_open(path)


def allowed_hosts(options: ServeOptions) -> frozenset[str] | None:
    """The host names a request may use; None: any. On loopback this prevents DNS rebinding."""
    if not options.loopback and not options.allow_hosts:
        return None
    own = {"localhost", "127.0.0.1", "::1", options.host.strip("[]").lower()} if options.loopback else set()
    return frozenset(own | {name.lower() for name in options.allow_hosts})


def host_name(header: bytes) -> str:
    """The name in a Host header, without its port: "[::1]:80" is "::1"; "" for what is not a name and a port.

    >>> host_name(b"[::1]:80"), host_name(b"[::1]evil.com"), host_name(b"localhost:80@evil.com")
    ('::1', '', '')
    """
    found = HOST.fullmatch(header.strip(b" \t").decode("latin-1").lower())
    return "" if found is None else found[1] or found[2]


# --- how often: a token bucket per client; bounded: idle clients are dropped ------------------------------------------

MOST = 10_000  # clients remembered


class Rates:
    """`rate` requests a second for each client, with bursts of up to `burst`."""

    def __init__(self, rate: float, burst: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, rate if burst is None else burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was

    def wait_s(self, client: str) -> float:
        """0 if the client may send a request now (which is then counted), else the seconds until it may."""
        now = self._clock()
        left, since = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        while len(self._buckets) > MOST:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self._rate
