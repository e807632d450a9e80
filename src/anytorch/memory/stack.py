"""The documented names: VGPULevel, VGPUStack, VGPUStackLinear, create_vgpu_stack. They stand on the real store.

Unlike the code these names come from, tensors really move, "ssd" is a disk, eviction demotes instead of dropping, and a
linear layer whose weight is in the stack trains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytorch import settings
from anytorch.counts import counted
from anytorch.devices.choose import resolve
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.levels import create_tiers
from anytorch.memory.parked import park, wake
from anytorch.memory.store import Place, TensorStore

MB = 2**20
DISK_NAMES = ("ssd", "disk", "nvme", "hdd")
_layer_numbers = itertools.count()


class VGPULevel:
    """One level of a stack, or a store of one level when made by hand. `device` is a torch device, "ssd", or a folder."""

    def __init__(
        self,
        level: int,
        capacity_mb: float,
        device: str,
        transfer_speed_gbps: float,
        *,
        store: TensorStore | None = None,
    ) -> None:
        self.level = level
        self.capacity_mb = capacity_mb
        self.device = device
        self.transfer_speed_gbps = transfer_speed_gbps
        self._own = store is None
        self._store = store or TensorStore([place_of(device, capacity_mb)])
        self._index = 0 if store is None else level
        self._misses = 0

    def put(self, key: str, tensor: torch.Tensor, priority: int = 5) -> bool:
        """Store a tensor at this level. False, with nothing changed, when it has no room and none below can take others."""
        try:
            self._store.put(key, tensor, priority, level=self._index)
        except BudgetTooSmall:
            return False
        return True

    def get(self, key: str) -> torch.Tensor | None:
        if self._store.level_of(key) != self._index:
            self._misses += 1
            return None
        return self._store.get(key)

    def remove(self, key: str) -> torch.Tensor | None:
        return self._store.remove(key) if self._store.level_of(key) == self._index else None

    def get_stats(self) -> dict[str, Any]:
        use = self._store.ledger.use(str(self._index))
        hits, requests = self._store.stats.hits[self._index], self._store.stats.requests
        misses = self._misses if self._own else requests - hits
        return {
            "level": self.level,
            "device": self.device,
            "capacity_mb": self.capacity_mb,
            "used_mb": use.used / MB,
            "peak_mb": use.peak / MB,
            "usage": use.used / use.capacity if use.capacity else 0.0,
            "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
            "hits": hits,
            "misses": misses,
            "evictions": self._store.stats.evictions[self._index],
            "cached_tensors": self._store.count(self._index),
            "transfer_speed_gbps": self.transfer_speed_gbps,
        }

    def close(self) -> None:
        if self._own:
            self._store.close()


class VGPUStack:
    """Tensors over a device, host memory and a disk. `register` stores, `access` brings up, `prefetch` does so ahead.

    `config` is `{"levels": [{"capacity_mb": …, "device": …, "speed_gbps": …}, …]}`, fastest first. A tensor you got from
    `access` and keep is yours: the stack may have moved its own copy on since; `hold(key)` keeps it in place.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        levels = (config or {}).get("levels") or default_levels()
        checked = [_checked(level, number) for number, level in enumerate(levels)]
        self._store = TensorStore([place_of(device, capacity) for capacity, device, _ in checked])
        self.levels = [
            VGPULevel(number, capacity, device, speed, store=self._store)
            for number, (capacity, device, speed) in enumerate(checked)
        ]
        self._ahead: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def register(self, key: str, tensor: torch.Tensor, priority: int = 5) -> None:
        """Store a tensor under a key, replacing an older one. Raises BudgetTooSmall when the whole stack is too full."""
        self._store.put(key, tensor, priority)

    def access(self, key: str) -> torch.Tensor | None:
        """The tensor, brought to level 0 if it can be; None if it was never registered."""
        return self._store.get(key)

    def prefetch(self, keys: Sequence[str]) -> None:
        """Begin to bring tensors to level 0 in the background. What level 0 has no room for stays where it is."""
        if self._ahead is None:
            self._ahead = ThreadPoolExecutor(1, thread_name_prefix="anytorch-prefetch")
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._ahead.submit(self._store.promote, list(keys)))

    def wait(self) -> None:
        """Until every prefetch has ended; raises what one of them raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def hold(self, key: str) -> Any:
        """`with stack.hold(key) as tensor:` keeps it in place inside the block."""
        return self._store.hold(key)

    def remove(self, key: str) -> torch.Tensor | None:
        return self._store.remove(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._store.level_of(key) is not None

    def __len__(self) -> int:
        return len(self._store.keys())

    def level_of(self, key: str) -> int | None:
        return self._store.level_of(key)

    def get_stats(self) -> dict[str, Any]:
        stats = self._store.stats
        return {
            "levels": [level.get_stats() for level in self.levels],
            "total_requests": stats.requests,
            "l0_hit_rate": stats.hits[0] / stats.requests if stats.requests else 0.0,
            "promotions": stats.promotions,
            "demotions": stats.demotions,
            "total_tensors": len(self._store.keys()),
        }

    def summary(self) -> str:
        stats = self.get_stats()
        lines = [
            f"{counted(stats['total_tensors'], 'tensor')}, {counted(stats['total_requests'], 'request')}, "
            f"{stats['l0_hit_rate']:.1%} found at level 0, {counted(stats['promotions'], 'promotion')}, "
            f"{counted(stats['demotions'], 'demotion')}"
        ]
        lines += [
            f"level {level['level']} ({level['device']}): {level['used_mb']:.1f} of {level['capacity_mb']:.1f} MiB, "
            f"{counted(level['cached_tensors'], 'tensor')}, {level['evictions']} evicted"
            for level in stats["levels"]
        ]
        return "\n".join(lines)

    def print_stats(self) -> None:
        """The documented name: writes `summary()` to standard output."""
        import sys

        sys.stdout.write(self.summary() + "\n")

    def close(self) -> None:
        """Give memory, threads and files back."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
            self._ahead = None
        self._store.close()

    def __enter__(self) -> VGPUStack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VGPUStackLinear(nn.Module):
    """A linear layer whose weight rests in a stack and is at level 0 while the layer runs.

    With gradients enabled the weight stays in place after forward, for backward and the optimizer; `offload()` (or the next
    forward without gradients) lets the stack move it again, with what the optimizer made of it.
    """

    def __init__(self, in_features: int, out_features: int, vgpu_stack: VGPUStack, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.vgpu_stack = vgpu_stack
        self.key = f"linear {next(_layer_numbers)}"
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bound = 1 / math.sqrt(in_features)
        self.bias = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound)) if bias else None
        self._hold: Any = None
        vgpu_stack.register(self.key, self.weight.detach())
        park(self.weight, self.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._hold is None:
            self._hold = self.vgpu_stack.hold(self.key)
            wake(self.weight, self._hold.__enter__())
        try:
            weight = self.weight if self.weight.device == x.device else self.weight.to(x.device)
            return functional.linear(x, weight, self.bias)
        finally:
            if not (torch.is_grad_enabled() and self.weight.requires_grad):
                self.offload()

    def offload(self) -> None:
        """Let the stack move the weight again."""
        if self._hold is not None:
            hold, self._hold = self._hold, None
            park(self.weight, self.weight.device)
            hold.__exit__(None, None, None)


def create_vgpu_stack(config: Mapping[str, Any] | None = None) -> VGPUStack:
    """A stack for this machine: free device memory, the host's limit, and the disk's free space and measured speed.

    Every number can be given with `config`, as for VGPUStack.
    """
    return VGPUStack(config)


def default_levels() -> list[dict[str, Any]]:
    """The levels of the best device here, from what is free, with measured speeds."""
    tiers = create_tiers(resolve(None).device)
    return [
        {
            "capacity_mb": level.capacity / MB,
            "device": level.place,
            "speed_gbps": level.read_gb_per_s or 0.0,
        }
        for level in tiers.levels
    ]


def place_of(device: str, capacity_mb: float) -> Place:
    capacity = int(capacity_mb * MB)
    if device.lower() in DISK_NAMES:
        return Place(capacity, None, settings.cache_folder() / "tiers")
    if "/" in device or "\\" in device:
        return Place(capacity, None, Path(device))
    return Place(capacity, resolve(device).device)


def _checked(level: Mapping[str, Any], number: int) -> tuple[float, str, float]:
    try:
        capacity = float(level["capacity_mb"])
        device = str(level["device"])
        speed = float(level.get("speed_gbps", level.get("transfer_speed_gbps", 0.0)))
    except (KeyError, TypeError, ValueError) as exc:
        raise UsageError(
            f"level {number} is invalid: {exc}",
            hint='write {"capacity_mb": 2000, "device": "cpu", "speed_gbps": 50}',
        ) from exc
    if not capacity >= 0:
        raise UsageError(f"level {number} has an invalid capacity of {capacity} MiB; use a number above 0")
    return capacity, device, speed
