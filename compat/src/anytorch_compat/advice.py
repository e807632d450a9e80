"""A sane configuration from facts alone: no measurement, no torch import, well under a second."""

from __future__ import annotations

from typing import Any

from anytorch import __version__
from anytorch.devices.bench.suite import caps_of, today
from anytorch.devices.choose import Resolution, resolve
from anytorch.devices.tune.store import Tuned, trusted_setting, tuned_for
from anytorch.devices.types import Candidate, Caps
from anytorch.measured.machine import identity, key_of
from anytorch.probe import snapshot
from anytorch.probe.facts import Cpu

FORMAT = 1
# What one sample of a BERT-base-sized encoder keeps alive in a forward pass: 12 layers × 128 tokens × 768 wide × about
# 34 bytes (the usual estimate of activations per token and width in 16 bits), doubled for the work space.
SAMPLE_NBYTES = 2 * 12 * 128 * 768 * 34
LARGEST_BATCH = 256


def auto_configure_backend() -> dict[str, Any]:
    """The configuration that fits the configured (or best) device of this machine.

    Answers from facts, and from earlier measurements where `anytorch optimize --apply` has stored some for this device;
    `source` says which. Nothing is changed: the values are advice.

    >>> import yirage
    >>> yirage.auto_configure_backend()["threads"] >= 1
    True
    """
    return configuration(None)


def configuration(request: str | None) -> dict[str, Any]:
    """The same for a device by name. An unusable one falls back with a DeviceFallbackWarning; the answer says so."""
    resolution = resolve(request)
    facts = identity()
    chosen = resolution.chosen
    return {
        "format": FORMAT,
        **describe(resolution),
        **advice(chosen, caps_of(chosen), snapshot().cpu, tuned_for(chosen.id)),
        "machine": facts,
        "machine_key": key_of(facts),
        "anytorch": __version__,
        "date": today(),
    }


def describe(resolution: Resolution) -> dict[str, Any]:
    chosen = resolution.chosen
    return {
        "requested": resolution.requested,
        "backend": chosen.backend,
        "device": chosen.torch_name,
        "device_name": chosen.name,
        "uuid": chosen.uuid,
        "fell_back": resolution.fell_back,
        "warning": resolution.warning,
    }


def advice(chosen: Candidate, caps: Caps, cpu: Cpu, tuned: Tuned | None) -> dict[str, Any]:
    """Threads, dtypes, precision, batch and memory for a device."""
    on_host = chosen.torch_type == "cpu"
    cast = caps.autocast_dtype
    threads, precision = trusted_setting("threads").value, trusted_setting("matmul_precision").value
    if on_host and (set_dtype := trusted_setting("cpu_dtype").value) is not None:
        cast = None if set_dtype == "float32" else set_dtype
    elif tuned is not None and tuned.autocast_dtype is not None:
        cast = None if tuned.autocast_dtype == "float32" else tuned.autocast_dtype
    batch = tuned.batch_size if tuned is not None and tuned.batch_size else batch_hint(chosen.free, on_host, cpu)
    return {
        "threads": threads or cpu.good_threads,
        "dtype": cast or "float32",
        "autocast_dtype": cast,
        "matmul_precision": precision or ("high" if "tf32" in caps.peak_tflops else "highest"),
        "batch_size": batch,
        "quantizations": list(caps.quantizations),
        "memory": {"total": chosen.total, "free": chosen.free},
        "source": f"measured {tuned.date}" if tuned is not None else "facts",
    }


def batch_hint(free: int | None, on_host: bool, cpu: Cpu) -> int:
    """A power of two whose samples take a quarter of the free memory at most. Pure.

    A CPU is busy with a few samples per core, more only make each answer later.
    """
    fits = (free or 0) // 4 // SAMPLE_NBYTES
    most = min(LARGEST_BATCH, 4 * cpu.good_threads) if on_host else LARGEST_BATCH
    batch = 1
    while batch * 2 <= min(fits, most):
        batch *= 2
    return batch
