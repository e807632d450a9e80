"""The measured start: from the beginning of the process to the first request that was answered over the port."""

from __future__ import annotations

import http.client
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from anytorch.errors import ModelError
from anytorch.serve.options import ServeOptions

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

    `worth_asking`: who runs in the same process sees when there is something to hear; the metrics count every question.
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
