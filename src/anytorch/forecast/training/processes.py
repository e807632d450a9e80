"""One process, or several that torchrun started: who this one is, its device, and sums over all of them."""

from __future__ import annotations

import atexit
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anytorch import logs
from anytorch.devices.choose import resolve
from anytorch.errors import DeviceError, DeviceUnavailable, UsageError

log = logs.logger(__name__)
PATIENCE = timedelta(minutes=30)  # for the slowest of the others


class World:
    """The processes of one training run. `size` is 1 without torchrun, and then nothing here communicates."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.size = size

    @property
    def first(self) -> bool:
        """True in the process that writes files and prints."""
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The average of a tensor over all processes, without a gradient."""
        return self.total(value).div_(self.size) if self.size > 1 else value.detach().clone()

    def total(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def synchronised(self, module: nn.Module) -> nn.Module:
        """The module whose calls average gradients over all processes in `backward`.

        It must be called, not its `.module`: calling that trains every process alone, which nobody notices.
        """
        if self.size == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        on_device = [self.device.index] if self.device.index is not None else None
        # Our buffers are constants: none need travel. torch 2.13 has renamed the option.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        constant: dict[str, Any] = {option: False}
        return DistributedDataParallel(module, device_ids=on_device, **constant)


@contextmanager
def world(device: str | torch.device | None = "auto") -> Iterator[World]:
    """Join the other processes of `torchrun`, if there are any, on the device of this one."""
    size = number("WORLD_SIZE", 1)
    if size == 1:
        yield World(device if isinstance(device, torch.device) else resolve(device).device)
        return
    rank, local = number("RANK", 0), number("LOCAL_RANK", 0)
    chosen = own_device(device, local)
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(chosen)
        log.info("process %d of %d on %s, talking through %s", rank, size, chosen, backend)
        options: dict[str, Any] = {} if chosen.type == "cpu" else {"device_id": chosen}
        dist.init_process_group(backend, timeout=PATIENCE, **options)
        # Once per process, until its end: a second group would find the first one's addresses in torchrun's store
        # (torch numbers both alike) and wait for them for ever.
        atexit.register(_leave)
    yield World(chosen, rank, size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def own_device(device: str | torch.device | None, local: int) -> torch.device:
    """The device of the process with this number on its machine: one card each; the CPU is shared."""
    if isinstance(device, torch.device):
        return device
    found = resolve(device)
    if found.device.type == "cpu":
        return found.device
    if device is not None and ":" in device:
        raise UsageError(
            f"device {device!r} names one card, and torchrun has started several processes",
            hint=f"write {device.partition(':')[0]!r}: each process takes the card of its own number",
        )
    try:
        card = resolve(f"{found.chosen.backend}:{local}", strict=True).device
    except (DeviceError, UsageError) as exc:
        raise DeviceUnavailable(
            f"process {local} of this machine has no card of its own: {exc}",
            hint="start torchrun with --nproc_per_node = the number of cards",
        ) from exc
    torch.accelerator.set_device_index(local)  # what the collective library uses where nothing is said
    return card


def number(variable: str, default: int) -> int:
    """What torchrun tells its processes; not a setting of ours."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isdigit():
        raise UsageError(f"environment variable {variable}={text!r} is not a number", hint="start it with torchrun")
    return int(text)
