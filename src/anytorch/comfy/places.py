"""Where a node computes: on a torch device, or in NumPy through `anytorch.lite`, behind the same few calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from anytorch import lite, logs
from anytorch.comfy.comfyui import Progress, make_room, work_device
from anytorch.comfy.values import DeviceChoice, resting
from anytorch.devices.choose import fallbacks_to, resolve
from anytorch.devices.memory import cleanup
from anytorch.devices.oom import fit_batch, is_out_of_memory
from anytorch.devices.registry import BUILT_IN
from anytorch.errors import DeviceIndexError, OutOfMemory

log = logs.logger(__name__)

NUMPY = "numpy"
# Always the same list, whatever this machine has: a shared workflow that names another device falls back, and says so.
REQUESTS = ["auto", *BUILT_IN, NUMPY]
AT_ONCE_NBYTES = 256 * 2**20  # of a batch of pictures, so that the bar moves and memory stays small

F = TypeVar("F", bound=Callable[..., Any])


class TorchPlace:
    """A torch device. `functional` has conv2d, linear, relu, … ; `put` and `take` move numbers in and out."""

    functional: Any = torch.nn.functional

    def __init__(self, device: torch.device, note: str = "") -> None:
        self.device, self.note = device, note

    @property
    def name(self) -> str:
        return str(self.device)

    def put(self, tensor: Tensor) -> Any:
        return tensor.to(self.device)

    def take(self, result: Any) -> Tensor:
        return resting(result)

    def make_room(self, nbytes: int) -> None:
        make_room(nbytes, self.device)


class NumpyPlace:
    """The host's memory and NumPy: no driver, no vendor's library, no torch kernel."""

    functional: Any = lite.functional
    name, note = NUMPY, ""

    def put(self, tensor: Tensor) -> Any:
        return lite.from_numpy(tensor.detach().cpu().contiguous().numpy())

    def take(self, result: Any) -> Tensor:
        return resting(torch.from_numpy(result.detach().numpy()))

    def make_room(self, nbytes: int) -> None:
        """The operating system does that."""


Place = TorchPlace | NumpyPlace


def place_for(choice: DeviceChoice | None) -> Place:
    """The place a node was asked to compute at. With nothing connected: ComfyUI's own device, or the best one there is.

    A device that cannot be used falls back to the CPU; `note` says why, and so does the log.
    """
    if choice is not None and choice.request == NUMPY:
        return NumpyPlace()
    own = work_device() if choice is None else None
    if own is not None:
        return TorchPlace(own)
    with fallbacks_to(lambda message: None):  # told below, and on the device node
        try:
            found = resolve(None if choice is None else choice.request)
        except DeviceIndexError as exc:  # a workflow of a machine with more cards
            note = f"{exc.message}; computing on the CPU instead"
            log.warning("%s", note)
            return TorchPlace(torch.device("cpu"), note)
    if found.warning:
        log.warning("%s", found.warning)
    return TorchPlace(found.device, found.warning)


def computed(place: Place, work: Callable[..., Any], *values: Tensor) -> Tensor:
    """`work(*values)` at `place`, brought back."""
    place.make_room(4 * sum(value.numel() for value in values))
    return place.take(work(*(place.put(value) for value in values)))


def computed_in_parts(place: Place, work: Callable[[Any], Any], batch: Tensor, nbytes_each: int) -> Tensor:
    """`work` on a few items of the batch at a time, with the node's progress bar; fewer of them where memory is short."""
    total = len(batch)
    bar = Progress(total)

    def run(count: int) -> list[Tensor]:
        place.make_room(count * nbytes_each)
        done: list[Tensor] = []
        for first in range(0, total, count):
            done.append(place.take(work(place.put(batch[first : first + count]))))
            bar.at(min(first + count, total))
        return done

    start = max(1, min(total, AT_ONCE_NBYTES // max(1, nbytes_each)))
    parts = fit_batch(run, start).result
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def said_plainly(function: F) -> F:
    """Wrap a node's function: running out of memory frees it and raises a plain message.

    Everything else that a user can cause is checked by the node itself; a stack trace therefore means a fault of ours.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except OutOfMemory:
            raise
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            cause = exc
        cause.__traceback__ = None  # its frames hold the tensors that were too many
        cleanup()
        raise OutOfMemory(
            f"too little memory for this node: {str(cause).splitlines()[0]}",
            hint="use a smaller image or fewer channels, put Memory Clean-up before it, or choose another device",
        ) from cause

    return run  # type: ignore[return-value]


def without_inference_mode(function: F) -> F:
    """For nodes that keep a model: ComfyUI runs every node in torch.inference_mode, and parameters made in it stay so."""

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return function(*arguments, **named)

    return run  # type: ignore[return-value]
