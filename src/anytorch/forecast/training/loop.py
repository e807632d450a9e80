"""The training loop: the same for the tokenizer and the model, for one process and for many.

Everything a step depends on is a pure function of the seed and the step's number: which windows it sees, in which order,
its learning rate, and its random numbers (the generator is seeded anew for every step and process). A run that is killed
and resumed therefore ends with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anytorch import logs
from anytorch.devices.memory import synchronize
from anytorch.devices.precision import autocast, autocast_dtype
from anytorch.devices.seeds import own_random_numbers, prepare_to_repeat, repeatable
from anytorch.errors import AnytorchError, InputError
from anytorch.forecast.predictor import capable
from anytorch.forecast.training.plan import TrainingPlan
from anytorch.forecast.training.recorded import RecordedStep
from anytorch.forecast.training.store import RunFolder, draw_curve, plain, writing
from anytorch.forecast.training.windows import Windows
from anytorch.interrupts import Interrupt
from anytorch.recorded.staging import can_stage
from anytorch.train import World

log = logs.logger(__name__)
# An evaluation that lasts longer than this says how far it is, once per this time: `progress` hears nothing of shorter ones.
TOLD_EVERY_S = 1.0
Progress = Callable[[int, int, str], None]


class Objective(nn.Module):
    """What is trained, and what for. Its call, which averages gradients, gives a batch's loss and the parts of that."""

    def validate(self, values: Tensor, stamps: Tensor) -> Tensor:
        """The mean loss of a batch, by which the best weights are chosen: deterministic and without dropout."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write the published layout, and beside it what `describe` says."""
        raise NotImplementedError

    def describe(self, folder: Path) -> None:
        """Say in the folder what its weights go with, unless this run has said it already."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `folder` is the best model in the published layout."""

    folder: Path
    best_loss: float
    best_step: int
    first_loss: float | None  # validation before the first step
    steps: int
    stopped_early: bool
    resumed_from: int  # 0: from the start
    seconds: float
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)


def learning_rate(step: int, total: int, peak: float, warm_up: float) -> float:
    """A cosine up from a tenth of the peak, and a cosine down to next to nothing, as published (OneCycleLR)."""
    low, last = peak / 10, peak / 1e5
    rising = max(1.0, warm_up * total)
    if step < rising:
        return low + (peak - low) * (1 - math.cos(math.pi * step / rising)) / 2
    share = (step - rising) / max(1.0, total - rising)
    return last + (peak - last) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


@lru_cache(maxsize=2)
def order_of(epoch: int, windows: int, seed: int) -> Any:
    """The order in which an epoch visits the windows."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(windows)


def fingerprint(plan: TrainingPlan, world: World, train: Windows, what: dict[str, Any]) -> str:
    """A fingerprint of plan, data and model; runs with equal ones can resume each other's state."""
    plan_now = {**asdict(plan), "batch_size": plan.batch_size * world.size}
    data = hashlib.sha256(np.ascontiguousarray(train.values).tobytes() + train.starts.tobytes()).hexdigest()
    body = json.dumps([plan_now, data, what], sort_keys=True, default=plain)
    return hashlib.sha256(body.encode()).hexdigest()


class Run:
    """One training run in one process. `train` does it all."""

    def __init__(
        self,
        objective: Objective,
        splits: dict[str, Windows],
        plan: TrainingPlan,
        world: World,
        folder: RunFolder,
        what: dict[str, Any],
    ) -> None:
        self.objective, self.plan, self.world, self.folder, self.what = objective, plan, world, folder, what
        self.train_windows = splits["train"]
        self.check_windows = splits["validation"].thinned(plan.validation_windows)
        self.global_batch = plan.batch_size * plan.accumulate * world.size
        available = len(self.train_windows) // self.global_batch
        if not available:
            raise InputError(
                f"{len(self.train_windows)} training windows are fewer than one step of {self.global_batch} "
                f"({plan.batch_size} × {plan.accumulate} accumulated × {world.size} processes)",
                hint="lower --batch-size, or give more data",
            )
        self.per_epoch = min(plan.steps_per_epoch or available, available)
        self.total = self.per_epoch * plan.epochs
        self.every = plan.evaluate_every or self.per_epoch
        self.wrapped = world.synchronised(objective, constant_buffers=True)
        self.trained = [value for value in objective.parameters() if value.requires_grad]
        dtype = autocast_dtype(world.device) if plan.mixed_precision else None
        # float16 alone needs its gradients scaled; bfloat16 has float32's range.
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == "float16")
        alone = world.size == 1 and plan.accumulate == 1 and not self.scaler.is_enabled()
        records = alone and capable(world.device).graphs
        # A recording reads the rate where it lies: on the device.
        self.rate = torch.tensor(plan.learning_rate, device=world.device) if records else None
        self.optimiser = torch.optim.AdamW(
            self.trained,
            lr=plan.learning_rate if self.rate is None else self.rate,
            betas=plan.betas,
            eps=plan.epsilon,
            weight_decay=plan.weight_decay,
            capturable=records,
        )
        self.recorded = (
            RecordedStep(self._alone, world.device, self._forget_gradients, self._seed, self.trained, self._remembered)
            if records
            else None
        )
        self.repeatable = True
        prepare_to_repeat(world.device)
        self.staged = can_stage(world.device)
        self.fingerprint = fingerprint(plan, world, self.train_windows, what)
        self.step = 0
        self.best_loss, self.best_step, self.bad = math.inf, 0, 0
        self.first_loss: float | None = None
        self.stopped = False
        self.interrupt = Interrupt(first=world.first)
        self.saved = 0  # the step that the files are of …
        self.checked = -1  # … and the one that was evaluated last
        self.progress: Progress | None = None

    # --- one step --------------------------------------------------------------------------------------------------

    def pieces(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of a step. The step's windows do not depend on how many processes share them."""
        epoch, place = divmod(step, self.per_epoch)
        order = order_of(epoch, len(self.train_windows), self.plan.seed)
        whole = order[place * self.global_batch : (place + 1) * self.global_batch]
        for piece in np.split(whole, self.plan.accumulate):
            yield self.on_device(self.train_windows, np.split(piece, self.world.size)[self.world.rank])

    def on_device(self, windows: Windows, chosen: Any) -> tuple[Tensor, Tensor]:
        values, stamps = (torch.from_numpy(part) for part in windows.batch(chosen))
        if self.staged:  # from pinned memory the copy does not wait for what the device is doing
            values, stamps = values.pin_memory(), stamps.pin_memory()
        return tuple(part.to(self.world.device, non_blocking=self.staged) for part in (values, stamps))  # type: ignore[return-value]

    def take_step(self) -> tuple[Tensor, dict[str, Tensor]]:
        """→ loss and its parts. Deterministic where possible, so that a resumed run ends like an uninterrupted one."""
        if self.repeatable:
            try:
                with repeatable(self.world.device):
                    return self._take_step()
            except RuntimeError as exc:
                if "deterministic" not in str(exc):
                    raise
                self.repeatable = False
                self._forget_gradients()
                log.warning(
                    "%s: a resumed run may end with slightly different weights: %s",
                    self.world.device,
                    str(exc).splitlines()[0],
                )
        return self._take_step()

    def _take_step(self) -> tuple[Tensor, dict[str, Tensor]]:
        self._seed()
        rate = learning_rate(self.step, self.total, self.plan.learning_rate, self.plan.warm_up)
        if self.rate is not None:
            self.rate.fill_(rate)
        else:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
        self.objective.train()
        if self.recorded is not None:
            loss, parts = self.recorded(*next(self.pieces(self.step)))
            self.step += 1
            return loss, parts
        mean_loss = torch.zeros((), device=self.world.device)
        mean_parts: dict[str, Tensor] = {}
        for number, (values, stamps) in enumerate(self.pieces(self.step), 1):
            # Gradients travel once per step, with its last piece.
            alone = self.world.size > 1 and number < self.plan.accumulate
            with self.wrapped.no_sync() if alone else nullcontext():  # type: ignore[operator]
                with autocast(self.world.device, enabled=self.plan.mixed_precision):
                    loss, parts = self.wrapped(values, stamps)
                self.scaler.scale(loss / self.plan.accumulate).backward()
            mean_loss += loss.detach() / self.plan.accumulate
            for name, value in parts.items():
                mean_parts[name] = (
                    mean_parts.get(name, torch.zeros_like(mean_loss)) + value.detach() / self.plan.accumulate
                )
        self.scaler.unscale_(self.optimiser)
        nn.utils.clip_grad_norm_(self.trained, self.plan.clip_norm)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return mean_loss, mean_parts

    def _alone(self, values: Tensor, stamps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A step of one process in one piece, without a look at the host: it may be recorded."""
        with autocast(self.world.device, enabled=self.plan.mixed_precision):
            loss, parts = self.wrapped(values, stamps)
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, self.plan.clip_norm)
        self.optimiser.step()
        return loss.detach(), {name: part.detach() for name, part in parts.items()}

    def _forget_gradients(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)

    def _seed(self) -> None:
        text = f"{self.plan.seed}/{self.step}/{self.world.rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1)

    def _remembered(self) -> list[Tensor]:
        """What the optimiser keeps from step to step."""
        kept = [self.optimiser.state[value] for value in self.trained]
        return [part for one in kept for part in one.values() if isinstance(part, Tensor)]

    def note(self, loss: Tensor, parts: dict[str, Tensor]) -> float:
        value = self.finite(float(self.world.mean(loss)), "loss")
        told = {name: round(float(self.world.mean(part)), 6) for name, part in parts.items()}
        if self.world.first:
            rate = learning_rate(self.step - 1, self.total, self.plan.learning_rate, self.plan.warm_up)
            self.folder.note(step=self.step, loss=round(value, 6), **told, learning_rate=float(f"{rate:.6g}"))
        return value

    def finite(self, value: float, what: str) -> float:
        if not math.isfinite(value):
            raise AnytorchError(
                f"the {what} is {value} at step {self.step}: training has diverged",
                hint="lower the learning rate, or train without mixed precision",
            )
        return value

    # --- validation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation windows; every process does its share."""
        self.objective.eval()
        own = np.arange(self.world.rank, len(self.check_windows), self.world.size)
        sums = torch.zeros(2, dtype=torch.float64)
        told = time.monotonic()
        for start in range(0, len(own), self.plan.batch_size):
            chosen = own[start : start + self.plan.batch_size]
            # In full precision: what is compared here decides which weights are kept.
            loss = self.objective.validate(*self.on_device(self.check_windows, chosen))
            sums += torch.tensor([float(loss) * len(chosen), len(chosen)], dtype=torch.float64)
            # The one before the first step lasts for minutes with a large model on a CPU.
            if self.progress is not None and time.monotonic() - told >= TOLD_EVERY_S:
                told = time.monotonic()
                self.tell(f"validation: {start + len(chosen):,} of {len(own):,} windows")
        # In float32 on the device: not every device has float64, nor every collective library the CPU.
        total = self.world.total(sums.to(self.world.device, torch.float32))
        return float(total[0] / total[1])

    def tell(self, words: str) -> None:
        if self.progress is not None and self.world.first:
            self.progress(self.step, self.total, words)

    def check(self) -> None:
        """Evaluate, keep the best weights, and say whether it is time to stop."""
        value = self.finite(self.evaluate(), "validation loss") if len(self.check_windows) else None
        with self.interrupt.held():  # evaluating can be stopped; what follows from it is done whole
            self._keep(value)
            self.checked = self.step

    def _keep(self, value: float | None) -> None:
        if value is None:
            self.best_loss, self.best_step = math.nan, self.step
            self.save_best()
            return
        if self.step == 0:
            self.first_loss = value
        if value < self.best_loss:
            self.best_loss, self.best_step, self.bad = value, self.step, 0
            self.save_best()
        else:
            self.bad += 1
            self.stopped = bool(self.plan.patience) and self.bad >= self.plan.patience
        if self.world.first:
            self.folder.note(step=self.step, validation=round(value, 6), best=self.best_step == self.step)

    def save_best(self) -> None:
        if self.world.first:
            with writing(self.folder.best):
                self.objective.save(self.folder.best)
        self.world.wait()

    # --- the state -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the state, from which a killed run resumes."""
        self._write()
        self.world.wait()

    def _write(self) -> None:
        if self.world.first:
            self.folder.save(
                {
                    "fingerprint": self.fingerprint,
                    "step": self.step,
                    "weights": {k: v.detach() for k, v in self.objective.named_parameters() if v.requires_grad},
                    "optimiser": self.optimiser.state_dict(),
                    "scaler": self.scaler.state_dict(),
                    "best": [self.best_loss, self.best_step, self.bad],
                    "first_loss": self.first_loss,
                    "stopped": self.stopped,
                    "checked": self.checked == self.step or not self.is_due(self.every),
                }
            )
        self.saved = self.step

    def is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total

    def load(self) -> bool:
        state = self.folder.load(self.fingerprint, self.world.device)
        if state is None:
            return False
        with torch.no_grad():
            for name, value in self.objective.named_parameters():
                if value.requires_grad:
                    value.copy_(state["weights"][name])
        self._load_optimiser(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.best_loss, self.best_step, self.bad = state["best"]
        self.first_loss, self.stopped = state["first_loss"], state["stopped"]
        self.saved = self.step
        self.checked = self.step if state.get("checked", True) else -1
        if self.world.first:
            self.folder.keep_log_until(self.step)
            if self.folder.best.is_dir():  # a run that an older version began, and whose weights may get no better
                self.objective.describe(self.folder.best)
        self.world.wait()
        return True

    def _load_optimiser(self, state: dict[str, Any]) -> None:
        """A state from any device: how the optimiser runs, and where it counts its steps, is this device's business."""
        ways = [
            {name: group[name] for name in ("lr", "capturable", "foreach", "fused")}
            for group in self.optimiser.param_groups
        ]
        self.optimiser.load_state_dict(state)
        for group, way in zip(self.optimiser.param_groups, ways, strict=True):
            group.update(way)
        for parameter, kept in self.optimiser.state.items():
            where = parameter.device if self.rate is not None else torch.device("cpu")
            kept["step"] = torch.as_tensor(kept["step"], dtype=torch.float32).to(where)

    # --- the whole -------------------------------------------------------------------------------------------------

    def train(self, *, resume: bool, progress: Progress | None) -> Outcome:
        began = time.monotonic()
        self.progress = progress
        if not resume and self.world.first:
            self.folder.forget()
        self.world.wait()
        with own_random_numbers():
            loaded = self.load()
            if not loaded and self.world.first:
                self.folder.forget()  # the log of a run that was killed before its first save
            resumed_from = self.step if loaded else 0
            with self.interrupt:
                try:
                    self._take_steps()
                except KeyboardInterrupt:
                    # The last whole step is saved. No other process is waited for: it may have been stopped elsewhere.
                    if not self.interrupt.broken and self.step != self.saved:
                        with self.interrupt.ignored():
                            self._write()
                    raise
                except RuntimeError as exc:
                    if self.world.first or self.interrupt.asked_at is None:
                        raise
                    raise KeyboardInterrupt from exc  # the first process has saved, and left this one alone
        synchronize(self.world.device)
        outcome = Outcome(
            folder=self.folder.best,
            best_loss=self.best_loss,
            best_step=self.best_step,
            first_loss=self.first_loss,
            steps=self.step,
            stopped_early=self.stopped,
            resumed_from=resumed_from,
            seconds=time.monotonic() - began,
            history=self.folder.entries() if self.world.first else [],
        )
        if self.world.first:
            self.finish(outcome)
        self.world.wait()
        return outcome

    def _take_steps(self) -> None:
        latest = math.nan
        unchecked = self.checked != self.step  # the start; or a run that was stopped while it evaluated this step
        while unchecked or (self.step < self.total and not self.stopped):
            if not unchecked:
                with self.interrupt.held():
                    loss, parts = self.take_step()
                    if self.is_due(self.plan.log_every):
                        latest = self.note(loss, parts)
            if unchecked or self.is_due(self.every):
                self.check()
            if self.step and (self.is_due(self.plan.save_every) or self.stopped):
                self.save()
            if self.step:
                self.tell(f"loss {latest:.4f}, validation {self.best_loss:.4f}")
            unchecked = False

    def finish(self, outcome: Outcome) -> None:
        told = {key: value for key, value in asdict(outcome).items() if key != "history"}
        data = {
            "windows": {"train": len(self.train_windows), "validation": len(self.check_windows)},
            "periods": {"train": self.train_windows.period, "validation": self.check_windows.period},
        }
        summary = {**told, "folder": str(outcome.folder), "plan": asdict(self.plan), "data": data, **self.what}
        self.folder.write_summary({**summary, "processes": self.world.size, "device": str(self.world.device)})
        try:
            draw_curve(outcome.history, self.folder.folder / "loss.png", str(self.what.get("kind", "")))
        except AnytorchError as exc:  # a run is not lost for want of matplotlib
            log.warning("no picture of the loss: %s", exc)
