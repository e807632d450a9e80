"""Out of memory becomes a plan: try again with a smaller batch, then with weights that stream, and say what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torch import nn

from anytorch import limits, logs
from anytorch.devices.memory import cleanup, memory
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import OutOfMemory
from anytorch.memory.fitted_model import HANDLE
from anytorch.memory.fitting import fit, fitted, unfit
from anytorch.memory.levels import Size
from anytorch.memory.sizes import words

T = TypeVar("T")
log = logs.logger(__name__)
SHARES = (0.6, 0.35, 0.2)  # of the device's memory for weights, tried in turn: the rest is for activations


@dataclass(frozen=True)
class Rescue(Generic[T]):
    """The result of a rescue. `steps` says in words what was changed; empty if the first try worked."""

    result: T
    batch: int
    steps: tuple[str, ...] = ()


def with_rescue(
    run: Callable[[int], T],
    model: nn.Module,
    *,
    batch: int,
    device: str | None = "auto",
    minimum: int = 1,
    stream: bool = True,
    host_budget: Size | None = None,
    disk: str | Path | bool | None = None,
) -> Rescue[T]:
    """Call `run(batch)`; on a real out-of-memory error halve the batch down to `minimum`, then let the weights stream.

    The model is changed in place (`fitted`) only if smaller batches did not help and `stream` allows it; it stays so, since
    the next call would fail as well. Any other exception passes through. Raises OutOfMemory, with all that was tried.

    For an engine: `with_rescue(lambda n: encode(texts[:n]), model, batch=256).steps` is what to tell the user.
    """
    steps: list[str] = []
    size, minimum = limits.COUNT.check("batch", batch), limits.COUNT.check("minimum", minimum)

    def attempt() -> Rescue[T] | Exception:
        """What `run` returned, or its out-of-memory error without the frames that hold the failed attempt's tensors."""
        try:
            return Rescue(run(size), size, tuple(steps))
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            exc.__traceback__ = exc.__context__ = None
            failure = exc
        cleanup()
        return failure

    def note(text: str) -> None:
        steps.append(text)
        log.warning("%s", text)

    found = attempt()
    while isinstance(found, Exception) and size > minimum:
        size = max(minimum, size // 2)
        note(f"the batch was halved to {size}: {_first_line(found)}")
        found = attempt()
    for share in SHARES if stream else ():
        if isinstance(found, Rescue):
            break
        if HANDLE in model.__dict__:
            unfit(model, "cpu")
        else:
            model.to("cpu")
        cleanup()
        total = memory(device).total
        budget = int(total * share) if total else None
        fit(model, device, device_budget=budget, host_budget=host_budget, disk=disk)
        plan = fitted(model).plan
        streamed = words(plan.prediction.from_host_nbytes + plan.prediction.from_disk_nbytes)
        note(f"weights were limited to {words(plan.budgets.device)} of device memory; {streamed} stream per pass")
        found = attempt()
    if isinstance(found, Rescue):
        return found
    tried = "; ".join(steps) or "nothing else"
    raise OutOfMemory(
        f"out of memory, even with a batch of {size}: {_first_line(found)}; tried: {tried}",
        hint="shorten the input, or quantize the model" if stream else "allow streaming with stream=True",
    ) from found


def _first_line(failure: Exception) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0][:160]
