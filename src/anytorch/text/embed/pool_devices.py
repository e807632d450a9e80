"""Turn `devices=` into workers: which devices, and on the CPU how many processes with which cores, as measured there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from anytorch import limits, logs, settings
from anytorch.devices.choose import survey
from anytorch.devices.types import State
from anytorch.errors import UsageError, WrongAnswer
from anytorch.measured.engine import Candidate, Ready, measure
from anytorch.measured.stopwatch import Stopwatch
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question, Verdict, fastest
from anytorch.probe import snapshot
from anytorch.text.checkpoints.checkpoint import Floats, Ints
from anytorch.text.embed.encoder_device import CPU, EncoderDevice, build_encoder, choose_device
from anytorch.text.embed.pool import PoolEncoder, PoolJob
from anytorch.text.embed.protocol import Encoder
from anytorch.text.embed.recipe import Recipe
from anytorch.text.embed.tokens import starts_of

log = logs.logger(__name__)

ALL = "all"
LENGTHS = (16, 24, 32, 64, 128, 250)  # tokens of the texts that are timed: short ones mostly, as they come
ROUNDS = 3
BATCH_S = 0.15  # how long one process should take for one batch: with it, measuring takes seconds for any model
GAIN = 0.05  # several processes hold the weights several times: they must be faster by more than this share
STARTING = 10  # times the setting `measure_s`: starting processes takes longer than measuring them
MOST_ERROR = 1e-3  # of the vectors' size


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
    limits.PROCESSES.check("number of devices", len(names))
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
    threads: int | None,
    **options: Any,
) -> tuple[Encoder, str]:
    """One encoder for all of them, and why it is of its kind. A single device needs no other process.

    `options`: quantization, dtype and normalize, as `build_encoder` takes them.
    """
    model: dict[str, Any] = {"model": str(recipe.folder), "pooling": list(pooling), **options}
    if len(devices) == 1:
        why = ""
        if devices[0].torch_name == CPU and _means_all(asked):
            spec = repr((recipe.spec, pooling, options["quantization"], options["dtype"], threads))
            count, why = best_processes(lambda count: cpu_jobs(count, model, threads), spec=spec)
            if count > 1:
                return PoolEncoder(cpu_jobs(count, model, threads)), why
        encoder, kind = build_encoder(devices[0], recipe, pooling, threads=threads, **options)
        return encoder, f"{kind}; {why}" if why else kind
    on_cpu = sum(1 for device in devices if device.torch_name == CPU)
    cpus = iter(cpu_jobs(on_cpu, model, threads) if on_cpu else [])
    jobs = [
        next(cpus)
        if device.torch_name == CPU
        else PoolJob(device.id, {**model, "device": device.id, "threads": threads})
        for device in devices
    ]
    if on_cpu and on_cpu < len(devices):
        log.warning("devices names the CPU beside others: it takes cores that feeding them needs")
    return PoolEncoder(jobs), f"{len(jobs)} processes, one for each device named, with one queue"


def cpu_jobs(count: int, model: dict[str, Any], threads: int | None) -> list[PoolJob]:
    """As many workers on the CPU, each with its own share of the cores. `threads` is what all of them have together."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    total = threads or snapshot().cpu.usable
    shares = [allowed[len(allowed) * i // count : len(allowed) * (i + 1) // count] for i in range(count)]
    return [
        PoolJob(CPU, {**model, "device": CPU, "threads": max(1, total // count)}, tuple(share) if count > 1 else ())
        for share in shares
    ]


# --- how many processes: one with all cores or several with a share each, measured once and stored ---------------------


def candidates(cores: int) -> list[int]:
    """Numbers of processes worth trying on so many cores. Pure.

    >>> candidates(2), candidates(16), candidates(96)
    ([1, 2], [1, 2, 4], [1, 2, 4, 8, 16])
    """
    return [1] + [count for count in (2, 4, 8, 16) if count * 4 <= cores or (count == 2 and cores >= 2)]


def best_processes(jobs: Callable[[int], Sequence[PoolJob]], *, spec: str) -> tuple[int, str]:
    """How many worker processes are fastest here, and why. `spec` is what the answer depends on beside the machine."""
    cpu = snapshot().cpu
    if cpu.usable < 2:
        return 1, "one core: one process"
    counts = candidates(cpu.usable)
    asked = Question.of("processes", f"one encoder on {cpu.usable} cores", "cpu", spec=spec, cpu=repr(cpu))
    budget_s = STARTING * float(settings.get("measure_s"))
    verdict = recall(asked, budget_s=budget_s, names=list(map(str, counts)))
    if verdict is None:
        verdict = remember(compared(jobs, counts, asked, budget_s))
    return int(verdict.chosen or 1), told(verdict)


def told(verdict: Verdict) -> str:
    one = verdict.seconds("1")
    speeds = [f"{trial.name}: {one / trial.seconds:.2f}" for trial in verdict.trials if one and trial.seconds]
    return f"measured on this CPU, processes and their speed: {', '.join(speeds) or 'one could be used'}"


def compared(
    jobs: Callable[[int], Sequence[PoolJob]], counts: Sequence[int], asked: Question, budget_s: float
) -> Verdict:
    """The same batches through pools of each number of processes, whose vectors must be those of one process."""
    alone: list[Floats] = []
    repeats: list[int] = []
    work = 2 * max(counts)

    def candidate(count: int) -> Candidate:
        def prepare() -> Ready:
            pool = PoolEncoder(jobs(count))
            return Ready(partial(_encode, pool, 2 * count, 1), partial(sized, pool), close=pool.close)

        def sized(pool: PoolEncoder) -> Callable[[], object]:
            if not repeats:
                once = Stopwatch().seconds(partial(_encode, pool, 1, 1), 1)
                repeats.append(max(1, min(8, round(BATCH_S / once))))
            return partial(_encode, pool, work, repeats[0])

        return Candidate(str(count), prepare)

    def check(vectors: Floats) -> float:
        if not alone:
            alone.append(vectors)
        if vectors.shape != alone[0].shape or vectors.dtype != alone[0].dtype:
            raise WrongAnswer(f"vectors of {vectors.dtype}{list(vectors.shape)}")
        size = math.sqrt((alone[0].astype(float) ** 2).sum())
        return math.sqrt(((vectors.astype(float) - alone[0]) ** 2).sum()) / (size or 1.0)

    return measure(
        asked,
        [candidate(count) for count in counts],
        check,
        most_error=MOST_ERROR,
        budget_s=budget_s,
        rounds=ROUNDS,
        decide=partial(fastest, noise=GAIN),
    )


def _encode(pool: PoolEncoder, batches: int, repeats: int) -> Floats:
    """As many batches through a pool, all at once; the vectors of the last."""
    ids, starts = _batch(repeats)
    for pending in [pool.submit(ids, starts) for _ in range(batches)]:
        vectors = pending.result()
    return vectors


def _batch(repeats: int) -> tuple[Ints, Ints]:
    starts = starts_of(LENGTHS * repeats)
    return (np.arange(int(starts[-1])) % 900 + 100).astype(np.int32), starts
