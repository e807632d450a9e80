"""Measures the candidates of every setting on one device and makes a plan of what is faster there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from anytorch import __version__
from anytorch.devices.bench import timing, workloads
from anytorch.devices.bench.suite import Progress, caps_of, import_torch, silent, today
from anytorch.devices.bench.workloads import TOLERANCES
from anytorch.devices.choose import activate, resolve
from anytorch.devices.exercise import difference
from anytorch.devices.memory import cleanup
from anytorch.devices.oom import fit_batch
from anytorch.devices.registry import registry
from anytorch.devices.stopwatch import stopwatch_of
from anytorch.devices.tune.store import Item, TunePlan, decide, decide_batch
from anytorch.devices.types import Candidate as Device
from anytorch.devices.types import Caps
from anytorch.errors import OutOfMemory, UsageError
from anytorch.measured.answers import near
from anytorch.measured.engine import Candidate, measure
from anytorch.measured.machine import identity, key_of
from anytorch.measured.store import remember
from anytorch.measured.verdict import NO_MEMORY, Question, Trial
from anytorch.probe import snapshot
from anytorch.probe.facts import Cpu

if TYPE_CHECKING:
    import torch

# (batch, seq, hidden) of the block that is timed: the largest that the device does not find trivial.
SHAPES = ((8, 128, 256), (16, 256, 1024))
TRIVIAL_S = 1e-3
PRECISION_ERROR = 2e-3  # tf32 inside float32 products is off by about 5e-4 of the largest value, bf16 by 4e-3
AUTOCAST_ERROR = TOLERANCES["bfloat16"]
LARGEST_BATCH = 1024
FLAT = 2  # batches in a row that bring nothing: enough seen

MOST_ROUNDS = 200

Scope = Callable[[], AbstractContextManager[Any]]


def tune(
    device: str | torch.device | None = None, *, duration_s: float = 20.0, progress: Progress | None = None
) -> TunePlan:
    """Measure for about `duration_s` seconds what is faster on a device (None: the configured or best one).

    On the CPU: threads, the autocast dtype and the precision of float32 products; on an accelerator the latter two; on
    both the batch size from which throughput no longer grows. A change must gain more than the noise. Nothing is
    changed in this process nor stored: `apply(plan)` stores it, `use_tuned()` puts it in force.
    """
    if not 0 < duration_s < 86_400:
        raise UsageError(f"duration_s={duration_s!r} is invalid: use a number of seconds above 0 and below 86400")
    candidate = resolve(device).chosen
    import_torch()
    work = Work.on(candidate)
    on_host = candidate.torch_type == "cpu"
    steps: list[tuple[str, Callable[[float], Item | None]]] = [
        *([("threads", work.threads), ("cpu_dtype", work.autocast)] if on_host else []),
        ("matmul_precision", work.precision),
        *([] if on_host else [("autocast_dtype", work.autocast)]),
        ("batch_size", work.batch),
    ]
    progress = progress or silent
    items: list[Item] = []
    started = perf_counter()
    with work.settled():
        for position, (setting, step) in enumerate(steps):
            progress(position, len(steps), f"{candidate.id}: {setting}")
            left_s = duration_s - (perf_counter() - started)
            item = step(max(0.01, left_s / (len(steps) - position)))
            if item is not None:
                items.append(item)
    progress(len(steps), len(steps), "")
    for item in items:
        remember(item.verdict(candidate.uuid or candidate.id))
    facts = identity()
    return TunePlan(
        device=candidate.id,
        backend=candidate.backend,
        name=candidate.name,
        uuid=candidate.uuid,
        items=tuple(items),
        machine_key=key_of(facts),
        machine=facts,
        date=today(),
        anytorch=__version__,
        duration_s=duration_s,
        notes=(*work.notes, *busy_notes(items)),
    )


def busy_notes(items: Sequence[Item]) -> list[str]:
    """Which answers hold only for a machine as busy as it was while measuring. Pure."""
    busy = [item.setting for item in items if any(option.busy for option in item.options)]
    return (
        [f"the machine was busy with other work while measuring {', '.join(busy)}: repeat when it is idle"]
        if busy
        else []
    )


@dataclass
class Work:
    """The work that is timed on one device, under what has been chosen so far."""

    device: torch.device
    id: str
    caps: Caps
    synchronize: Callable[[], None]
    shape: tuple[int, int, int] = SHAPES[0]
    autocast_chosen: str = "float32"
    notes: list[str] = field(default_factory=list)

    @classmethod
    def on(cls, candidate: Device) -> Work:
        import torch

        activate(candidate)
        backend, index = registry().get(candidate.backend), candidate.index
        work = cls(
            torch.device(candidate.torch_name), candidate.id, caps_of(candidate), lambda: backend.synchronize(index)
        )
        for shape in SHAPES:
            with torch.inference_mode():
                work.shape = shape
                if timing.quickest(work.block(), work.synchronize) >= TRIVIAL_S:
                    break
        return work

    @property
    def words(self) -> str:
        batch, seq, hidden = self.shape
        return f"transformer block, batch {batch} × seq {seq} × hidden {hidden}"

    def block(self, batch: int | None = None) -> Callable[[], torch.Tensor]:
        """The forward pass of one float32 transformer block on the device."""
        size, seq, hidden = self.shape
        weights = {name: value.to(self.device) for name, value in workloads.block_weights(hidden).items()}
        if batch is None:
            x = workloads.block_input(size, seq, hidden).to(self.device)
        else:
            x = workloads.block_input(1, seq, hidden).to(self.device).repeat(batch, 1, 1)
        return partial(workloads.block, x, weights)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Whatever is tried in here, threads and precision are afterwards as they were."""
        import torch

        threads = with_torch("num_threads", torch.get_num_threads())
        precision = with_torch("float32_matmul_precision", torch.get_float32_matmul_precision())
        try:
            with threads, precision, torch.inference_mode():
                yield
        finally:
            cleanup(self.id)

    def trials(self, setting: str, scopes: Mapping[str, Scope], budget_s: float, most_error: float) -> Sequence[Trial]:
        """The block under each value of a setting, checked against float64 and timed in turns."""
        batch, seq, hidden = self.shape
        elements, run = workloads.checked_elements(batch), self.block()
        found = measure(
            Question("setting", setting, self.id),
            [Candidate.of(value, run, scope) for value, scope in scopes.items()],
            near(
                workloads.block_reference(batch, seq, hidden),
                part=lambda answer: answer[elements],
                distance=difference,
            ),
            most_error=most_error,
            error_unit="of the largest value",
            stopwatch=stopwatch_of(self.device),
            budget_s=budget_s,
            rounds=MOST_ROUNDS,
            quiet=True,
        )
        return found.trials

    # --- one method per setting -------------------------------------------------------------------------------------

    def threads(self, budget_s: float) -> Item | None:
        import torch

        default = torch.get_num_threads()
        values = thread_candidates(snapshot().cpu, default)
        if len(values) == 1:
            self.notes.append("threads: this process may use one CPU only")
            return None
        scopes = {str(value): partial(with_torch, "num_threads", value) for value in values}
        item = decide("threads", self.words, default, self.trials("threads", scopes, budget_s, TOLERANCES["float32"]))
        torch.set_num_threads(int(item.chosen))
        return item

    def precision(self, budget_s: float) -> Item | None:
        import torch

        default = torch.get_float32_matmul_precision()
        run = self.block()
        answers = {}
        for value in ("highest", "high", "medium"):
            with with_torch("float32_matmul_precision", value):
                answers[value] = run().cpu()
        different = [v for v in answers if v != default and not torch.equal(answers[v], answers[default])]
        if not different:
            self.notes.append("matmul_precision: every setting gives identical results here")
            return None
        values = [v for v in answers if v == default or v in different]
        scopes = {value: partial(with_torch, "float32_matmul_precision", value) for value in values}
        options = self.trials("matmul_precision", scopes, budget_s, PRECISION_ERROR)
        item = decide("matmul_precision", self.words + ", float32", default, options, most_error=PRECISION_ERROR)
        torch.set_float32_matmul_precision(str(item.chosen))
        return item

    def autocast(self, budget_s: float) -> Item:
        """The dtype of `anytorch.autocast`; "float32" means that autocast stays off."""
        default = self.caps.autocast_dtype or "float32"
        values = [d for d in ("float32", "bfloat16", "float16") if d in self.caps.dtypes]
        setting = "cpu_dtype" if self.device.type == "cpu" else "autocast_dtype"
        options = self.trials(setting, {value: self.casting(value) for value in values}, budget_s, AUTOCAST_ERROR)
        item = decide(setting, self.words + ", under autocast", default, options, most_error=AUTOCAST_ERROR)
        self.autocast_chosen = str(item.chosen)
        return item

    def casting(self, dtype: str) -> Scope:
        import torch

        if dtype == "float32":
            return nullcontext
        return partial(torch.autocast, self.device.type, dtype=getattr(torch, dtype))

    def batch(self, budget_s: float) -> Item:
        """Doubles the batch until throughput stops growing, the time is up or the memory is full."""
        started = perf_counter()
        options: list[Trial] = []
        size, flat, best = 1, 0, float("inf")
        while size <= LARGEST_BATCH and flat < FLAT:
            left_s = budget_s - (perf_counter() - started)
            if len(options) > 1 and left_s < 0:
                break
            try:
                fit = fit_batch(partial(self.time_batch, budget_s=max(0.005, left_s / 6)), size)
            except OutOfMemory as exc:
                options.append(Trial(str(size), refused=f"{NO_MEMORY}: {exc.message[:160]}"))
                break
            if fit.batch < size:
                options.append(Trial(str(size), refused=NO_MEMORY))
                break
            options.append(fit.result)
            seconds = fit.result.seconds or 0.0
            flat = flat + 1 if seconds > best * 0.98 else 0
            best = min(best, seconds)
            size *= 2
        dtype = "" if self.autocast_chosen == "float32" else f", autocast to {self.autocast_chosen}"
        return decide_batch(self.words.replace(f"batch {self.shape[0]} × ", "") + dtype, 1, options)

    def time_batch(self, size: int, *, budget_s: float) -> Trial:
        run = self.block(size)

        def cast() -> None:
            with self.casting(self.autocast_chosen)():
                run()

        found = timing.measure(cast, self.synchronize, budget_s=budget_s)
        median_s, spread_s = found.median_s / size, found.spread_s / size
        return Trial(str(size), median_s, spread_s, found.repeats, disturbed=found.disturbed)


def thread_candidates(cpu: Cpu, current: int) -> list[int]:
    """1, the sane number, one per core, all that may run at once, and torch's own choice. Pure."""
    wanted = {1, cpu.good_threads, cpu.physical or 1, cpu.usable, current}
    return sorted(n for n in wanted if n <= max(cpu.logical, current))


@contextmanager
def with_torch(setting: str, value: Any) -> Iterator[None]:
    """`torch.set_<setting>(value)` for a block."""
    import torch

    before = getattr(torch, f"get_{setting}")()
    getattr(torch, f"set_{setting}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_{setting}")(before)
