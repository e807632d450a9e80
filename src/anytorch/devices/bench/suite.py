"""Runs every case on every device within the time given, and survives what goes wrong in one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from anytorch import __version__, logs
from anytorch.devices.bench.others import OtherWork
from anytorch.devices.bench.results import BenchmarkReport, DeviceResult, Row, Timing, disturbed_share, with_limits
from anytorch.devices.bench.timing import measure
from anytorch.devices.bench.workloads import (
    Bench,
    Case,
    Prepared,
    Skip,
    check,
    dtype_names,
    list_cases,
    sizes,
    workload_names,
)
from anytorch.devices.choose import activate, resolve, survey
from anytorch.devices.memory import cleanup
from anytorch.devices.oom import is_out_of_memory
from anytorch.devices.registry import registry
from anytorch.devices.types import Candidate, Caps, State
from anytorch.errors import TorchMissing, UsageError, WrongAnswer
from anytorch.measured.machine import drivers
from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware

if TYPE_CHECKING:
    import torch

log = logs.logger(__name__)
HURRIED_S = 2.0  # with less than this per device, set-ups are made smaller
GRACE_S = 1.0  # set-up is not free: how far beyond three times its duration a device may go before cases are skipped


class Progress(Protocol):
    def __call__(self, done: int, total: int, what: str) -> object:
        """`done` of `total` cases are over and `what` comes next ("" at the end)."""


def silent(done: int, total: int, what: str) -> None:
    return None


def benchmark(
    devices: Sequence[str | torch.device] | str | None = None,
    *,
    duration_s: float = 10.0,
    workloads: Sequence[str] | None = None,
    batch_sizes: Sequence[int] = (1, 8),
    seq_lengths: Sequence[int] = (128,),
    hidden_sizes: Sequence[int] = (256, 768),
    dtypes: Sequence[str] | str | None = None,
    iterations: int | None = None,
    progress: Progress | None = None,
    found: Callable[[Candidate, Row], object] | None = None,
) -> BenchmarkReport:
    """Measure devices (all usable ones, or those named) for about `duration_s` seconds each.

    Every answer is compared with fp64 on the CPU before the clock starts: a wrong one is reported and not timed.
    `iterations` fixes the number of timed runs of each case instead of the time. `found` gets each row as soon as it is
    there, with its limit as far as that is known then. Ctrl-C ends the measuring early: the
    report then holds what there was and is marked `partial`.

    >>> from anytorch.devices.bench import benchmark
    >>> benchmark("cpu", duration_s=0.2, workloads=["launch"]).devices[0].id
    'cpu'
    """
    if not 0 < duration_s < 86_400:
        raise UsageError(f"duration_s={duration_s!r} is invalid: use a number of seconds above 0 and below 86400")
    if iterations is not None:
        sizes("iterations", [iterations])
    wanted: dict[str, Any] = {
        "workloads": workload_names(workloads),
        "dtypes": dtype_names(dtypes),
        "batch_sizes": sizes("batch sizes", batch_sizes),
        "seq_lengths": sizes("sequence lengths", seq_lengths),
        "hidden_sizes": sizes("hidden sizes", hidden_sizes),
    }
    progress = progress or silent
    chosen = usable_devices(devices)
    version = import_torch()
    plan = [(device, caps, list_cases(caps, **wanted)) for device in chosen for caps in [caps_of(device)]]
    total = sum(len(cases) for _, _, cases in plan)
    results: list[DeviceResult] = []
    partial = False
    done = 0
    for device, caps, cases in plan:
        run = DeviceRun(device, caps, duration_s, iterations)
        try:
            run.warm_up()
            for position, case in enumerate(cases):
                progress(done + position, total, f"{device.id}: {case.workload}, {case.case}")
                run.add(case, left=len(cases) - position)
                if found is not None:
                    found(device, with_limits(run.rows, caps)[-1])
        except KeyboardInterrupt:
            partial = True
        results.append(run.result())
        done += len(cases)
        if partial:
            break
    if not partial:
        progress(total, total, "")
    hardware = snapshot()
    return BenchmarkReport(
        devices=tuple(results),
        machine=machine_facts(hardware),
        torch=version,
        driver=drivers(hardware),
        date=today(),
        anytorch=__version__,
        commit=commit(),
        duration_s=duration_s,
        partial=partial,
    )


def import_torch() -> str:
    try:
        import torch
    except ImportError as exc:
        raise TorchMissing(f"measuring needs torch: {exc}", hint="`anytorch doctor` prints the right command") from exc
    return str(torch.__version__)


def usable_devices(named: Sequence[str | torch.device] | str | None) -> list[Candidate]:
    """The devices to measure: those named (falling back, with a warning, as everywhere), or every usable real one."""
    if named is None or named == "all":
        found = [c for c in survey("needed").devices if c.state is State.USABLE and not c.software]
        return found or [resolve("cpu").chosen]
    listed = [named] if isinstance(named, str) or not isinstance(named, Sequence) else named
    if not listed:
        raise UsageError("no device was named", hint="leave `devices` out to measure every usable one")
    chosen = [resolve(name).chosen for name in listed]
    return list({candidate.id: candidate for candidate in chosen}.values())


def caps_of(device: Candidate) -> Caps:
    if device.caps is not None:
        return device.caps
    activate(device)
    return registry().get(device.backend).caps(device.index)


@dataclass
class DeviceRun:
    """The measuring of one device: its clock, and the rows so far."""

    device: Candidate
    caps: Caps
    duration_s: float
    iterations: int | None = None
    started: float = field(default_factory=perf_counter)
    rows: list[Row] = field(default_factory=list)
    s_per_flop: dict[str, float] = field(default_factory=dict)  # by dtype, of the last case: cases grow, so the nearest
    _bench: Bench | None = None
    _others: OtherWork = field(default_factory=OtherWork)

    def warm_up(self) -> None:
        """Wake the driver and its libraries, which takes seconds on some, before the device's time starts to count."""
        import torch

        try:
            x = torch.ones(16, 16, device=self.bench().device)
            (x @ x).cpu()
        except Exception as exc:  # noqa: BLE001  (every row below will carry the device's own words)
            log.warning("%s could not be warmed up: %s", self.device.id, exc)
        self.started = perf_counter()
        self._others.begin()

    def bench(self) -> Bench:
        if self._bench is None:
            import torch

            activate(self.device)
            backend, index = registry().get(self.device.backend), self.device.index
            self._bench = Bench(
                torch.device(self.device.torch_name),
                self.caps,
                synchronize=lambda: backend.synchronize(index),
                free=backend.memory(index).free,
                cache_nbytes=cache_nbytes(self.device, self.caps),
                hurried=self.duration_s < HURRIED_S,
            )
        return self._bench

    def add(self, case: Case, *, left: int) -> None:
        """Run one case, with `left` still to come (this one included), and keep its row whatever becomes of it."""
        row = Row(case.workload, case.case, case.dtype, "skipped", parameters=case.parameters, unit=case.unit)
        reason = case.skip or self.too_long(case)
        self.rows.append(replace(row, reason=reason) if reason else self.attempt(case, row, left))

    def too_long(self, case: Case) -> str:
        # A number of runs is done whatever it takes, and so is the first and smallest case of each workload: what a
        # hurried or busy machine leaves out must not be a whole kind of number.
        if self.iterations is not None or not any(row.workload == case.workload for row in self.rows):
            return ""
        remaining = 3 * self.duration_s + GRACE_S - (perf_counter() - self.started)
        # The answer, the warm-up and one timed run are the least a case takes.
        needed = 3 * (case.flop or 0.0) * self.s_per_flop.get(case.dtype, 0.0)
        if remaining > needed:
            return ""
        wish = f": it needs about {needed:.1f} s more" if needed > 1 else ""
        return f"no time left within {self.duration_s:g} s{wish}"

    def attempt(self, case: Case, row: Row, left: int) -> Row:
        import torch

        try:
            with torch.inference_mode():
                prepared = case.prepare(self.bench())
                row = replace(row, case=prepared.case, parameters={**case.parameters, **prepared.parameters})
                error, tolerance = check(prepared, case.dtype)
                row = replace(row, error=error, tolerance=tolerance)
                budget_s = max(0.005, (self.duration_s - (perf_counter() - self.started)) / left)
                timing = measure(prepared.run, self.bench().synchronize, budget_s=budget_s, iterations=self.iterations)
        except Skip as exc:
            return replace(row, reason=str(exc))
        except WrongAnswer as exc:
            return replace(row, status="wrong", reason=exc.message)
        except Exception as exc:  # noqa: BLE001  (devices raise anything; the words are kept in the row)
            status = "out-of-memory" if is_out_of_memory(exc) else "failed"
            reason = f"{type(exc).__name__}: {str(exc).strip()[:400]}"
            # The traceback's frames hold the tensors of this case: let them go before the next one.
            exc.__traceback__ = None
            return replace(row, status=status, reason=reason + self.clean())
        if prepared.flop:
            self.s_per_flop[case.dtype] = timing.best_s / prepared.flop
        return replace(row, status="ok", timing=timing, rate=rate(timing, prepared, case.unit))

    def clean(self) -> str:
        """Give memory back; a device that is lost cannot, and says so once more."""
        try:
            cleanup(self.device.id)
        except RuntimeError as exc:
            return f"; giving memory back failed too: {str(exc).strip()[:160]}"
        return ""

    def result(self) -> DeviceResult:
        import torch

        return DeviceResult(
            id=self.device.id,
            backend=self.device.backend,
            torch_name=self.device.torch_name,
            name=self.device.name,
            uuid=self.device.uuid,
            rows=with_limits(self.rows, self.caps),
            seconds=perf_counter() - self.started,
            facts={
                "threads": torch.get_num_threads(),
                "matmul_precision": torch.get_float32_matmul_precision(),
                "total_nbytes": self.device.total,
                "unified_memory": self.caps.unified_memory,
                "software": self.device.software,
                "disturbed": disturbed_share(self.rows),
                "other_cores": self._others.cores(),
            },
        )


def rate(timing: Timing, prepared: Prepared, unit: str) -> float:
    if unit == "µs":
        return timing.median_s * 1e6
    amount = prepared.flop / 1e12 if unit == "TFLOP/s" else prepared.nbytes / 1e9
    return amount / timing.median_s


def cache_nbytes(device: Candidate, caps: Caps) -> int | None:
    """The last-level cache: a device's own statement, or, where the host's memory is used, the host's."""
    stated = device.facts.get("L2_cache_size")
    if stated:
        return int(stated)
    if not caps.unified_memory or "SC_LEVEL3_CACHE_SIZE" not in getattr(os, "sysconf_names", {}):
        return None
    try:
        return max(0, os.sysconf("SC_LEVEL3_CACHE_SIZE")) or None
    except (OSError, ValueError):
        return None


# --- where a number comes from: machine, torch, driver, date, version and commit --------------------------------------

# What kernels choose their code by: a number means little without them.
FEATURES = {
    *("sse4_2", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_int8", "amx_bf16", "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2"),
}


def machine_facts(hardware: Hardware) -> dict[str, Any]:
    cpu = hardware.cpu
    return {
        "system": f"{hardware.machine.system} {hardware.machine.release}",
        "arch": hardware.machine.arch,
        "python": hardware.machine.python,
        "container": hardware.machine.container,
        "cpu": cpu.model,
        "features": sorted(cpu.features & FEATURES),
        "cores": {"logical": cpu.logical, "physical": cpu.physical, "usable": cpu.usable},
        "memory_nbytes": hardware.memory.usable_total,
        "gpus": [{"name": gpu.name, "uuid": gpu.uuid, "total_nbytes": gpu.total} for gpu in hardware.gpus],
    }


def today() -> str:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def commit() -> str | None:
    """The commit of the source tree this package runs from ("…-dirty" with changes), None when installed or no git.

    ANYTORCH_COMMIT names it where a copy of the tree has no .git, or an old one: whoever sent the copy sets it.
    """
    import os
    import subprocess

    if named := os.environ.get("ANYTORCH_COMMIT"):
        return named
    tree = Path(__file__).resolve().parents[4]
    if not (tree / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # look, never write the index
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
