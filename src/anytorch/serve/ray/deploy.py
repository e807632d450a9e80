"""`anytorch serve --ray`: the same app on Ray Serve, with replicas that come and go with the load, one per device.

Each replica builds the app of `create_app` itself: nothing but the options travels. Ray's proxy listens on the port and
spreads the requests; keys, limits and problems are the app's own, as everywhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from anytorch import limits, logs
from anytorch.errors import ModelError, UsageError
from anytorch.serve.app import create_app
from anytorch.serve.keys import read_keys
from anytorch.serve.options import ServeOptions, from_json, to_json
from anytorch.serve.ray.cluster import Share, cluster, share_of
from anytorch.serve.routes.health import status_of
from anytorch.serve.running import Told, first_answer, signals_to
from anytorch.serve.server import bind

log = logs.logger(__name__)

NAME = "anytorch"
ONGOING = 32  # requests under way in a replica that call for another one: a batch needs company to be worth it
MOST_ONGOING = 1024  # of one replica; its own queue refuses with 429 long before
LOOK_S = 0.2
START_S = 600.0  # a large model on a slow disk; then something else is wrong


@dataclass(frozen=True)
class Scale:
    """How many replicas. `most` None: one per device of the cluster."""

    least: int = 1
    most: int | None = None
    ongoing: int = ONGOING


def parse_scale(text: str | None) -> Scale:
    """ "2", "1:8" or "0:" (as many as there are devices) as a Scale.

    >>> parse_scale("1:8")
    Scale(least=1, most=8, ongoing=32)
    """
    if text is None:
        return Scale()
    first, colon, last = text.partition(":")
    try:
        least = int(first or 1)
        most = (int(last) if last else None) if colon else least
    except ValueError:
        least, most = -1, None
    highest = int(limits.PROCESSES.most)
    if not 0 <= least <= highest or (most is not None and not max(1, least) <= most <= highest):
        raise UsageError(
            f"--replicas {text}: use a number up to {highest}, or a range such as 1:8",
            hint="1: means as many as there are devices",
        )
    return Scale(least, most)


def serve_on_ray(options: ServeOptions, told: Told, *, address: str | None = None, scale: Scale | None = None) -> int:
    """Deploy the app, wait for a signal, then take it down; return the exit status."""
    options.require_safe()
    keys = None if options.api_key_file is None else read_keys(options.api_key_file)
    options = replace(options, port=options.port or free_port(options.host), workers=1)
    stopped = threading.Event()
    with cluster(address) as ray, signals_to(lambda number, frame: stopped.set()):
        share = share_of(ray, options.device, whole_nodes=True)
        with deployed(options, share, scale or Scale()):
            started = first_answer(options, key=keys.one if keys else None, stopped=stopped.is_set, limit_s=START_S)
            if isinstance(started, ModelError):
                if stopped.is_set():
                    return 0
                raise ModelError(f"the service did not start on Ray: {started.message}", hint=started.hint)
            told(replace(started, workers=replicas_running()))
            while not stopped.wait(LOOK_S):
                pass
    return 0


@contextmanager
def deployed(options: ServeOptions, share: Share, scale: Scale) -> Iterator[None]:
    """The app on the cluster's Ray Serve, for as long as the block lasts."""
    from ray import serve
    from ray.exceptions import RayActorError

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if share.threads is not None and options.threads is None:
        options = replace(options, threads=share.threads)
    start_serve(serve.start, options, RayActorError)
    require_own_port(options)
    most = max(scale.most or share.count, scale.least, 1)
    made: Any = serve.deployment(
        serve.ingress(app_builder(to_json(options)))(Replica),
        name=NAME,
        max_ongoing_requests=MOST_ONGOING,
        ray_actor_options=dict(share.options),
        graceful_shutdown_timeout_s=options.drain_s,
        health_check_period_s=5,
        autoscaling_config={
            "min_replicas": scale.least,
            "initial_replicas": max(1, scale.least),
            "max_replicas": most,
            "target_ongoing_requests": scale.ongoing,
            "upscale_delay_s": 3,
            "downscale_delay_s": 60,
        },
    )
    try:
        serve.run(made.bind(), name=NAME, route_prefix="/", blocking=False)
        yield
    finally:
        serve.delete(NAME)  # drains; Ray Serve itself stays for others, or ends with a cluster of our own


def start_serve(start: Callable[..., object], options: ServeOptions, died: type[Exception] = TimeoutError) -> None:
    """Start Ray Serve by its own `start`, or find the one that runs. `died` is raised where a proxy was ended.

    Ray gives its HTTP proxy one minute, and ends it to begin anew when its first sign takes more than five seconds. On a
    slow or busy machine it comes up all the same: the second call finds what the first one began, and whoever needs an
    answer waits for the service itself.
    """
    http = {"host": options.host, "port": options.port}
    try:
        start(http_options=http)
    except (TimeoutError, died) as exc:
        log.warning("Ray Serve is slow to start (%s); going on with what it began", exc)
        start(http_options=http)


def require_own_port(options: ServeOptions) -> None:
    """Raise UsageError where the cluster's Ray Serve listens elsewhere than we were told to.

    Ray keeps the options of the first `serve.start` and ignores ours. The app would be reachable where the cluster's proxy
    is, perhaps by other machines, although `require_safe` has looked at another address.
    """
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    http = client.http_config
    if (http.host, http.port) != (options.host, options.port):
        closed = options.api_key_file is not None or replace(options, host=http.host).loopback
        key = "" if closed else " --api-key-file keys.txt"
        raise UsageError(
            f"Ray Serve listens on {http.host}:{http.port} already, and not on {options.host}:{options.port}",
            hint=f"use --host {http.host} --port {http.port}{key}, or stop it with `serve shutdown`",
        )


class Replica:
    """What Ray asks a replica beside its requests."""

    app: Any  # set by Ray's ingress: the app that the builder made

    async def check_health(self) -> None:
        """Ray starts another replica in place of one that raises. Asked for the first time, it loads what may wait."""
        service = self.app.state.service
        status, detail = status_of(service)
        if status == "failed":
            raise RuntimeError(detail or "an engine stopped answering")
        if status == "ready":
            service.load_rest()


def app_builder(options: str) -> Callable[[], Any]:
    """A function that makes the app, called in the replica's process."""

    def build() -> Any:
        return create_app(from_json(options))

    return build


def replicas_running() -> int:
    from ray import serve

    state: Any = serve.status().applications[NAME].deployments[NAME]
    return int(state.replica_states.get("RUNNING", 0))


def free_port(host: str) -> int:
    """Ray's proxy wants a number: one that is free now."""
    with bind(ServeOptions(host, 0)) as listening:
        return int(listening.getsockname()[1])
