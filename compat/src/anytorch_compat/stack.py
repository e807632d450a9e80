"""VGPULevel, VGPUStack, VGPUStackLinear and create_vgpu_stack, on the stack that `anytorch.memory` moves tensors with.

Unlike the code these names come from, tensors really move, "ssd" is a disk, eviction demotes instead of dropping, and a
linear layer whose weight is in the stack trains.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytorch.counts import counted
from anytorch.errors import BudgetTooSmall
from anytorch.memory.parked import park, wake
from anytorch.memory.stack import MIB, StackLevel, TensorStack, TensorStore

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
        self._store = (
            TensorStore([StackLevel(capacity_mb, device, transfer_speed_gbps).place]) if store is None else store
        )
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
            "used_mb": use.used / MIB,
            "peak_mb": use.peak / MIB,
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


class VGPUStack(TensorStack):
    """`anytorch.memory.TensorStack` with the documented levels and figures."""

    @property
    def levels(self) -> list[VGPULevel]:
        return [
            VGPULevel(number, level.capacity_mb, level.device, level.speed_gbps, store=self)
            for number, level in enumerate(self.wanted)
        ]

    def get_stats(self) -> dict[str, Any]:
        stats = self.stats
        return {
            "levels": [level.get_stats() for level in self.levels],
            "total_requests": stats.requests,
            "l0_hit_rate": stats.hits[0] / stats.requests if stats.requests else 0.0,
            "promotions": stats.promotions,
            "demotions": stats.demotions,
            "total_tensors": len(self),
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
        """Write `summary()` to standard output."""
        sys.stdout.write(self.summary() + "\n")


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
