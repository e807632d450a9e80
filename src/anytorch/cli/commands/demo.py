"""`anytorch demo`: the devices of this machine, a small real model trained on each usable one, then a search by meaning, a
forecast, a sentence and the persistent kernel."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from anytorch import __version__, limits
from anytorch.cli import demo_jobs
from anytorch.cli.describe import device_json, devices_shown, would_use
from anytorch.cli.output import TRYING, Output
from anytorch.cli.parser import number
from anytorch.cli.requests import check_cache, named_device
from anytorch.counts import counted
from anytorch.devices.choose import Survey, activate, as_usable, resolve, survey
from anytorch.devices.exercise import difference
from anytorch.devices.memory import synchronize
from anytorch.devices.tune import use_tuned
from anytorch.devices.types import Candidate, State
from anytorch.devices.wheels import advise
from anytorch.errors import AnytorchError, TorchMissing, WrongAnswer

if TYPE_CHECKING:
    import torch


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", default="all", metavar="DEVICE", help="one device, or all usable ones (the default)"
    )
    parser.add_argument(
        "--iterations", type=number(limits.ROUNDS), default=20, metavar="N", help="timed training steps (default: 20)"
    )
    parser.add_argument("--skip-jobs", action="store_true", help="leave out the search, the forecast and the sentence")
    parser.add_argument(
        "--skip-persistent",
        action="store_true",
        help="leave out the persistent decoding kernel, which is shown beside torch, token by token",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    check_cache()
    with output.fallbacks_told() as warnings:
        with output.waiting(TRYING):
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
    if not output.json:
        show(results, output, options.iterations)
    jobs = demo_jobs.show(output, jobs=not options.skip_jobs, decoding=not options.skip_persistent)
    if output.json:
        output.data(
            {
                "anytorch": __version__,
                "devices": [device_json(device) for device in found.devices],
                "iterations": options.iterations,
                "results": results,
                "jobs": jobs,
                "warnings": warnings,
            }
        )
    else:
        what_next(output)
    failed = any(result["error"] for result in results) or any(job["failed"] for job in jobs.values())
    return 1 if failed else 0


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
        want = reference()
        wait = partial(synchronize, device.id)
        document.update(asdict(train(device.torch_name, iterations, want, wait)))
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
    model = f"{LAYERS}-layer transformer, {BATCH} lists of {LENGTH} at a time"
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


def what_next(output: Output) -> None:
    output.heading("what next")
    output.pairs(
        [
            ("anytorch doctor", "why a device is missing, and the command that fixes it"),
            ("anytorch benchmark", "the measured speed of each device, against its limits"),
            ("anytorch optimize", "settings that are faster on this machine, by measurement"),
            ("anytorch.resolve()", "the same choice in your own code: anytorch.resolve('auto').device"),
        ]
    )


# --- the model and its task: a two-layer transformer encoder learns to sort short lists of digits ---------------------

DIGITS, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 10, 12, 32, 64, 4, 2
LEARNING_RATE = 3e-3
# The same room as the device test's: reduced-precision matmuls that a user may have switched on.
TOLERANCE = 5e-3
WARM_UP = 2


@dataclass(frozen=True)
class Trained:
    """One device's run. Times are per training step; `difference` is the largest relative one from the CPU in fp64."""

    difference: float
    first_loss: float
    last_loss: float
    accuracy: float  # share of digits put in the right place, on lists it has not seen
    median_ms: float
    best_ms: float
    iterations: int


def build() -> torch.nn.Module:
    """Always the same weights: made on the CPU from a seed of its own, which leaves the caller's generator alone."""
    import torch
    from torch import nn

    class Sorter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.digits = nn.Embedding(DIGITS, WIDTH)
            self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, DIGITS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(self.digits(x) + self.places))  # type: ignore[no-any-return]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sorter()


def lists(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of lists and the same lists sorted. Every step has its own, the same on every device."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randint(0, DIGITS, (BATCH, LENGTH), generator=generator)
    return x, x.sort(dim=1).values


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def reference() -> dict[str, torch.Tensor]:
    """The first step in fp64 on the CPU: its loss and the gradient of every weight."""
    return gradients(build().double(), "cpu")


def gradients(model: torch.nn.Module, device: str) -> dict[str, torch.Tensor]:
    model = model.to(device)
    x, y = (part.to(device) for part in lists(0))
    loss = loss_of(model, x, y)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {"loss": loss.detach().cpu(), **{name: grad.cpu() for name, grad in found.items() if grad is not None}}


def agreement(device: str, want: dict[str, torch.Tensor]) -> float:
    """The largest difference of the first step's loss and gradients, relative to the largest of each.

    Raises WrongAnswer where it is too large: a device that computes wrongly is not timed.
    """
    got = gradients(build(), device)
    worst = 0.0
    for name, exact in want.items():
        off = difference(got[name].double(), exact)
        if not off <= TOLERANCE:  # also catches NaN
            raise WrongAnswer(
                f"{device}: {name} of the first step is off by {off:.1e}; the CPU in fp64 is the reference",
                hint="do not trust this device; run `anytorch test` and `anytorch doctor`",
            )
        worst = max(worst, off)
    return worst


def train(device: str, iterations: int, want: dict[str, torch.Tensor], synchronize: Any) -> Trained:
    """Check the answer, then train for `iterations` timed steps."""
    import torch

    off = agreement(device, want)
    model = build().to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(WARM_UP + iterations):
        x, y = (part.to(device) for part in lists(step))
        synchronize()
        started = perf_counter()
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        synchronize()
        if step >= WARM_UP:
            seconds.append(perf_counter() - started)
        losses.append(float(loss.detach()))
    with torch.no_grad():
        x, y = lists(-1)
        accuracy = float((model(x.to(device)).argmax(-1).cpu() == y).float().mean())
    return Trained(off, losses[0], losses[-1], accuracy, median(seconds) * 1e3, min(seconds) * 1e3, iterations)
