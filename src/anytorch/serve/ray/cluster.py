"""A Ray cluster to work on: a running one, or a temporary one on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anytorch import logs
from anytorch.errors import UsageError
from anytorch.values import dataclass

log = logs.logger(__name__)

LOCAL = "local"
# What Ray calls the accelerators it counts and hands out; "GPU" is what it calls those of every vendor it knows.
ACCELERATORS = ("GPU", "NPU", "TPU", "HPU")
# A proxy that is slow to start is ended after five seconds otherwise, and begun anew.
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class Share:
    """What one replica or worker takes of the cluster, and how many such shares there are: one per device."""

    options: Mapping[str, Any]  # Ray's own names: {"num_cpus": 1, "num_gpus": 1}
    count: int
    threads: int | None  # of the CPU, for one; None where an accelerator computes


def import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"--ray needs Ray, which is not installed ({exc.name})", hint="pip install 'anytorch[ray]'"
        ) from exc
    return ray


@contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected. `address`: of a running cluster ("auto": the one of this machine, "ray://host:10001"); None or
    "local": $RAY_ADDRESS if it is set, else a cluster of this machine's cores that ends with the block."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    where = None if address in (None, "", LOCAL) else address
    before = {name: os.environ.get(name) for name in (*QUIET, *PATIENT)}
    os.environ.update(QUIET)  # Ray's processes inherit them: no statistics are sent to anybody
    os.environ.update({name: value for name, value in PATIENT.items() if before[name] is None})
    try:
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": True}
        if where is None and not os.environ.get("RAY_ADDRESS"):
            options |= {"num_cpus": cores(), "include_dashboard": False}
        try:
            ray.init(address=where, **options)
        except (ConnectionError, ValueError, RuntimeError) as exc:
            raise UsageError(
                f"no Ray cluster at {where or os.environ.get('RAY_ADDRESS') or 'this machine'}: {exc}",
                hint="start one with `ray start --head`, or leave the address out",
            ) from exc
        try:
            yield ray
        finally:
            ray.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cores() -> int:
    """Those this process may use: a container's, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shares(resources: Mapping[str, float], device: str, *, nodes: int, whole_nodes: bool) -> Share:
    """How a cluster is shared out: a share per accelerator; without any (or for the CPU) per node or per core. Pure.

    `whole_nodes`: one share computes with all cores of its node (a service: its batches use them all). Else each takes
    one core (a job: many files at once).

    >>> shares({"CPU": 16.0, "GPU": 4.0}, "auto", nodes=1, whole_nodes=True)
    Share(options={'num_cpus': 1, 'num_gpus': 1}, count=4, threads=None)
    """
    for name in ACCELERATORS:
        count = int(resources.get(name, 0))
        if count and device != "cpu":
            wanted = {"num_cpus": 1, "num_gpus": 1} if name == "GPU" else {"num_cpus": 1, "resources": {name: 1}}
            return Share(wanted, count, None)
    each = max(1, int(resources.get("CPU", 1)) // max(1, nodes))
    if whole_nodes:
        return Share({"num_cpus": max(1, each // 2)}, max(1, nodes), each)
    return Share({"num_cpus": 1}, max(1, int(resources.get("CPU", 1))), 1)


def share_of(ray: Any, device: str, *, whole_nodes: bool) -> Share:
    nodes = sum(1 for node in ray.nodes() if node.get("Alive"))
    return shares(ray.cluster_resources(), device, nodes=nodes, whole_nodes=whole_nodes)
