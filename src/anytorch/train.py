"""Training a model of your own on one process, or on several that torchrun started: its number, its device, and sums.

    from anytorch import train

    with train.world() as world:                          # python script.py, or torchrun --nproc_per_node=2 script.py
        model = world.synchronised(Model().to(world.device))
        for batch in world.loader(dataset, batch_size=32):
            ...                                           # the usual loop: backward averages over the processes

Each process takes the card of its number. Where there are fewer cards than processes they share them, and talk through gloo:
NCCL refuses two processes on one card. A device without collectives of its own gets gloo's, by way of the host.
"""

from __future__ import annotations

import atexit
import inspect
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anytorch import limits, logs
from anytorch.devices.choose import resolve
from anytorch.errors import DeviceError, DeviceUnavailable, UsageError

log = logs.logger(__name__)
PATIENCE = timedelta(minutes=30)  # for the slowest of the others
GLOO = "gloo"


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
        """The average of a tensor over all processes, without a gradient. Of whole numbers it is a float32."""
        return self.total(value) / self.size

    def total(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes, without a gradient."""
        value = value.detach().clone()
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            dist.barrier()

    def synchronised(self, module: nn.Module, *, constant_buffers: bool = False, **options: Any) -> nn.Module:
        """The module whose calls average gradients over all processes in `backward`.

        It must be called, not its `.module`: calling that trains every process alone, without any error.
        `constant_buffers`: none of its buffers change, so none need travel. `options` are DistributedDataParallel's.
        """
        if self.size == 1:
            return module
        from torch.nn.parallel import DistributedDataParallel

        if constant_buffers:  # torch 2.13 has renamed the option
            known = inspect.signature(DistributedDataParallel.__init__).parameters
            options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
        on_device = [self.device.index] if self.device.index is not None else None
        return DistributedDataParallel(module, device_ids=on_device, **options)

    def loader(self, dataset: Any, batch_size: int, *, shuffle: bool = True, seed: int = 0, **options: Any) -> Any:
        """A DataLoader over this process's part of a dataset. `batch_size` is that of all processes together.

        Call `.sampler.set_epoch(n)` before each epoch, where there is one, for another order in each.
        """
        from torch.utils.data import DataLoader
        from torch.utils.data.distributed import DistributedSampler

        limits.COUNT.check("batch_size", batch_size), limits.SEED.check("seed", seed)
        if batch_size % self.size:
            raise UsageError(
                f"batch_size={batch_size} cannot be shared by {self.size} processes",
                hint=f"use a multiple of {self.size}",
            )
        if self.size == 1:
            order = torch.Generator().manual_seed(seed)
            return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, generator=order, **options)
        sampler: Any = DistributedSampler(dataset, self.size, self.rank, shuffle=shuffle, seed=seed)
        return DataLoader(dataset, batch_size=batch_size // self.size, sampler=sampler, **options)


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
        vendors = dist.Backend.default_device_backend_map.get(chosen.type)  # before ours may take its place
        backend = collectives_for(chosen, number("LOCAL_WORLD_SIZE", 1))
        log.info("process %d of %d on %s, talking through %s", rank, size, chosen, backend)
        own = chosen.type != "cpu" and backend == vendors
        options: dict[str, Any] = {"device_id": chosen} if own else {}
        dist.init_process_group(backend, timeout=PATIENCE, **options)
        # Once per process, until its end: a second group would find the first one's addresses in torchrun's store
        # (torch numbers both alike) and wait for them for ever.
        atexit.register(_leave)
    yield World(chosen, rank, size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        _let_gloo_rest()


def _let_gloo_rest(patience: float = 5.0) -> None:
    """Return when gloo's threads sleep: one that holds a tensor when Python ends aborts the process (StagedGroup.shutdown).

    torch does not end the threads of a group that a DistributedDataParallel has used, and has no way to wait for them.
    """
    until, rested = time.monotonic() + patience, 0
    while rested < 2 and time.monotonic() < until:  # twice: the first may be a wait for the lock that sleeping gives up
        rested = rested + 1 if all(state == "S" for state in _gloo_states()) else 0
        time.sleep(0.001)


def _gloo_states() -> Iterator[str]:
    for stat in Path("/proc/self/task").glob("*/stat"):  # on Linux; none elsewhere
        with suppress(OSError):  # that one has ended
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop":
                yield rest.split()[0]


def collectives_for(device: torch.device, here: int) -> str:
    """The process group's back end: the device's own, gloo where `here` processes share cards, or gloo through the host."""
    if device.type == "cpu":
        return GLOO
    own = dist.Backend.default_device_backend_map.get(device.type)
    if own is not None and here <= torch.accelerator.device_count():
        return own
    if device.type in dist.Backend.backend_capability.get(GLOO, ()):  # whose tensors it sends itself
        log.warning("%d processes share %d cards: they talk through gloo", here, torch.accelerator.device_count())
        return GLOO
    from anytorch.devices import staged_group

    staged_group.offer(device.type)
    return staged_group.NAME


def own_device(device: str | torch.device | None, local: int) -> torch.device:
    """The device of the process with this number on its machine: one card each, or shared in turn; the CPU is shared."""
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
    index = local % max(1, torch.accelerator.device_count())
    try:
        card = resolve(f"{found.chosen.backend}:{index}", strict=True).device
    except (DeviceError, UsageError) as exc:
        raise DeviceUnavailable(
            f"process {local} of this machine has no card: {exc}",
            hint="start torchrun with --nproc_per_node = the number of cards",
        ) from exc
    torch.accelerator.set_device_index(index)  # what the collective library uses where nothing is said
    return card


def number(variable: str, default: int) -> int:
    """What torchrun tells its processes; not a setting of ours."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isdigit():
        raise UsageError(f"environment variable {variable}={text!r} is not a number", hint="start it with torchrun")
    return int(text)
