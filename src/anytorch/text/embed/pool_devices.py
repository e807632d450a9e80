"""Turn `devices=` into workers: which devices, and on the CPU how many processes with which cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from anytorch import logs
from anytorch.devices.choose import survey
from anytorch.devices.types import State
from anytorch.errors import UsageError
from anytorch.probe import snapshot
from anytorch.text.embed.encoder_device import CPU, EncoderDevice, build_encoder, choose_device
from anytorch.text.embed.pool import Job, PoolEncoder
from anytorch.text.embed.pool_layout import best_processes
from anytorch.text.embed.protocol import Encoder
from anytorch.text.embed.recipe import Recipe

log = logs.logger(__name__)

ALL = "all"


def choose_devices(devices: Sequence[str] | str) -> list[EncoderDevice]:
    """The devices that `devices` names, in order. "all": every usable device of the best kind, or the CPU.

    A device that cannot be used is left out with a DeviceFallbackWarning (with strict settings it raises); "cpu" may be
    named several times, for as many processes. Raises UsageError for an empty list, and a device named twice.
    """
    if _means_all(devices):
        return _all_devices()
    if isinstance(devices, str):
        devices = [part.strip() for part in devices.split(",")]
    names = [str(name) for name in devices]
    if not names:
        raise UsageError("devices=[] names no device", hint='use "all", or a list such as ["cuda:0", "cuda:1"]')
    found: list[EncoderDevice] = []
    for name in names:
        device = choose_device(name)
        if device.fell_back:
            continue  # choose_device has warned, or raised
        if device.torch_name != CPU and any(device.id == other.id for other in found):
            raise UsageError(
                f"devices={names!r}: {device.id} is named twice",
                hint="only the CPU may be named twice, for more processes",
            )
        found.append(device)
    if not found:
        found = [EncoderDevice(CPU, CPU, f"none of {', '.join(names)} can be used", True)]
    return found


def _means_all(devices: Sequence[str] | str) -> bool:
    return isinstance(devices, str) and devices.strip().lower() == ALL


def _all_devices() -> list[EncoderDevice]:
    usable = [c for c in survey("needed").devices if c.state is State.USABLE and not c.software and c.backend != CPU]
    # The same card can be seen through two back ends: only the best one's devices are taken.
    best = [c for c in usable if c.backend == usable[0].backend]
    if not best:
        return [EncoderDevice(CPU, CPU, "no other device can be used here")]
    return [EncoderDevice(c.id, c.torch_name, "all devices of the best kind were requested") for c in best]


def build_encoders(
    asked: Sequence[str] | str,
    devices: Sequence[EncoderDevice],
    recipe: Recipe,
    pooling: tuple[str, ...],
    *,
    quantization: str | None,
    dtype: str,
    threads: int | None,
    normalize: bool = False,
) -> tuple[Encoder, str]:
    """One encoder for all of them, and why it is of its kind. A single device needs no other process."""
    options: dict[str, Any] = {"quantization": quantization, "dtype": dtype, "normalize": normalize}
    model: dict[str, Any] = {"model": str(recipe.folder), "pooling": list(pooling), **options}
    if len(devices) == 1 and devices[0].torch_name == CPU and _means_all(asked):
        count, why = best_processes(
            lambda count: cpu_jobs(count, model, threads),
            spec=repr((recipe.spec, pooling, quantization, dtype, threads)),
        )
        if count > 1:
            return PoolEncoder(cpu_jobs(count, model, threads)), why
        encoder, kind = build_encoder(devices[0], recipe, pooling, threads=threads, **options)
        return encoder, f"{kind}; {why}"
    if len(devices) == 1:
        return build_encoder(devices[0], recipe, pooling, threads=threads, **options)
    on_cpu = sum(1 for device in devices if device.torch_name == CPU)
    cpus = iter(cpu_jobs(on_cpu, model, threads) if on_cpu else [])
    jobs = [
        next(cpus) if device.torch_name == CPU else Job(device.id, {**model, "device": device.id, "threads": threads})
        for device in devices
    ]
    if on_cpu and on_cpu < len(devices):
        log.warning("devices names the CPU beside others: it takes cores that feeding them needs")
    return PoolEncoder(jobs), f"{len(jobs)} processes, one for each device named, with one queue"


def cpu_jobs(count: int, model: dict[str, Any], threads: int | None) -> list[Job]:
    """As many workers on the CPU, each with its own share of the cores. `threads` is what all of them have together."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    total = threads or snapshot().cpu.usable
    shares = [allowed[len(allowed) * i // count : len(allowed) * (i + 1) // count] for i in range(count)]
    return [
        Job(CPU, {**model, "device": CPU, "threads": max(1, total // count)}, tuple(share) if count > 1 else ())
        for share in shares
    ]
