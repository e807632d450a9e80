"""`anytorch demo`: the devices of this machine, then a small real model trained on each usable one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from anytorch import __version__
from anytorch.cli import demo_model
from anytorch.cli.child import check_cache
from anytorch.cli.describe import device_json, devices_shown, would_use
from anytorch.cli.output import Output
from anytorch.cli.requests import named_device
from anytorch.counts import counted
from anytorch.devices.choose import Survey, activate, as_usable, resolve, survey
from anytorch.devices.memory import synchronize
from anytorch.devices.tune import use_tuned
from anytorch.devices.types import Candidate, State
from anytorch.devices.wheels import advise
from anytorch.errors import AnytorchError, TorchMissing, UsageError

PERSISTENT = (
    "not shown: the persistent decoding kernel, which this version does not have (without this: --skip-persistent)"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", default="all", metavar="DEVICE", help="one device, or all usable ones (the default)"
    )
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="timed training steps (default: 20)")
    parser.add_argument(
        "--skip-persistent",
        action="store_true",
        help="do not mention the persistent decoding kernel, which this version does not have",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    if options.iterations < 1:
        raise UsageError(f"--iterations {options.iterations}: use a whole number above 0")
    check_cache()
    with output.fallbacks_told() as warnings:
        found = survey("needed")
        if found.facts.hardware.torch is None:
            python = found.facts.hardware.machine.executable
            raise TorchMissing(
                f"the demo needs torch, which is not installed in {python}", hint=advise(found.facts.hardware).command
            )
        chosen = to_run(named_device(options.backend, "--backend"), found)
    output.text(f"anytorch {__version__}: write PyTorch once, run it on whatever hardware is there")
    output.heading("devices")
    devices_shown(output, [device_json(device) for device in found.devices])
    usable = [as_usable(device) if device.backend == "cpu" else device for device in found.devices]
    expected, why = would_use(usable, found.reasons)
    output.text(f"  would use: {expected or 'nothing'}" + (f"; {why}" if why else ""))
    results = [trained(device, options.iterations, output) for device in chosen]
    if output.json:
        output.data(
            {
                "anytorch": __version__,
                "devices": [device_json(device) for device in found.devices],
                "iterations": options.iterations,
                "results": results,
                "warnings": warnings,
            }
        )
    else:
        show(results, output, options.iterations)
    if not options.skip_persistent:
        output.note(PERSISTENT)
    return 1 if any(result["error"] for result in results) else 0


def to_run(request: str, found: Survey) -> list[Candidate]:
    """The devices to train on: every usable one, the CPU last, or the requested one (with a warning if it falls back)."""
    if request.strip().lower() != "all":
        return [resolve(request).chosen]
    usable = [d for d in found.devices if d.state is State.USABLE and not d.software and d.backend != "cpu"]
    return [*usable, *(as_usable(d) for d in found.devices if d.backend == "cpu")]


def trained(device: Candidate, iterations: int, output: Output) -> dict[str, Any]:
    """One device's result as a document; what the device raises becomes its `error`, so that the others still run."""
    document: dict[str, Any] = {"device": device.id, "name": device.name, "error": ""}
    try:
        activate(device)
        if tuned := use_tuned(device.id).values:  # what `anytorch optimize --apply` stored, or was set by hand
            output.note(f"{device.id}: {', '.join(f'{name} = {value}' for name, value in tuned.items())}")
        want = demo_model.reference()
        wait = partial(synchronize, device.id)
        document.update(asdict(demo_model.train(device.torch_name, iterations, want, wait)))
    except AnytorchError as exc:
        document["error"] = exc.message
    except (RuntimeError, NotImplementedError, AssertionError) as exc:  # what torch and drivers raise
        document["error"] = f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"
    if document["error"]:
        output.warn(f"{device.id}: {document['error']}")
    return document


def show(results: Sequence[dict[str, Any]], output: Output, iterations: int) -> None:
    cpu_ms = next((r["median_ms"] for r in results if r["device"] == "cpu" and not r["error"]), None)
    rows = [
        (
            r["device"],
            f"{r['first_loss']:.3f} → {r['last_loss']:.3f}",
            f"{r['accuracy']:.0%}",
            f"{r['median_ms']:.2f}",
            f"{r['best_ms']:.2f}",
            "" if cpu_ms is None else f"{cpu_ms / r['median_ms']:.2f}",
            f"{r['difference']:.0e}",
        )
        for r in results
        if not r["error"]
    ]
    model = f"{demo_model.LAYERS}-layer transformer, {demo_model.BATCH} lists of {demo_model.LENGTH} at a time"
    columns = (
        "device",
        "loss",
        "sorted right (%)",
        "median (ms)",
        "best (ms)",
        "speed (CPU = 1)",
        "off the CPU (relative)",
    )
    output.heading(f"learning to sort digits ({model}; {counted(iterations, 'step')})")
    output.table(columns, rows)
    output.text("  checked first: loss and gradients of the first step agree with fp64 on the CPU")
    output.heading("what next")
    output.pairs(
        [
            ("anytorch doctor", "why a device is missing, and the command that fixes it"),
            ("anytorch benchmark", "the measured speed of each device, against its limits"),
            ("anytorch optimize", "settings that are faster on this machine, by measurement"),
            ("anytorch.resolve()", "the same choice in your own code: anytorch.resolve('auto').device"),
        ]
    )
