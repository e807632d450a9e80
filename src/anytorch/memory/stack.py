"""Tensors by name over levels of memory: `register` stores, `access` brings up, `prefetch` does so ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anytorch import settings
from anytorch.devices.choose import resolve
from anytorch.errors import UsageError
from anytorch.memory.levels import create_tiers
from anytorch.memory.store import StoreLevel, TensorStore

if TYPE_CHECKING:
    from typing_extensions import Self

MIB = 2**20
DISK_NAMES = ("ssd", "disk", "nvme", "hdd")


@dataclass(frozen=True)
class StackLevel:
    """One level of a stack as it was asked for. `device` is a torch device, "ssd", or a folder."""

    capacity_mb: float
    device: str
    speed_gbps: float

    @property
    def place(self) -> StoreLevel:
        capacity = int(self.capacity_mb * MIB)
        if self.device.lower() in DISK_NAMES:
            return StoreLevel(capacity, None, settings.cache_folder() / "tiers")
        if "/" in self.device or "\\" in self.device:
            return StoreLevel(capacity, None, Path(self.device))
        return StoreLevel(capacity, resolve(self.device).device)


class TensorStack:
    """Tensors over a device, host memory and a disk, each level within its capacity.

    `config` is `{"levels": [{"capacity_mb": …, "device": …, "speed_gbps": …}, …]}`, fastest first; without it, the levels of
    the best device here with what is free. A tensor you got from `access` and keep is yours: the stack may have moved its
    own copy on since; `hold(key)` keeps it in place.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        given = (config or {}).get("levels") or default_levels()
        self.wanted = [_checked(level, number) for number, level in enumerate(given)]
        self._store = TensorStore([level.place for level in self.wanted])
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

    def close(self) -> None:
        """Give memory, threads and files back."""
        if self._ahead is not None:
            self._ahead.shutdown(wait=True, cancel_futures=True)
            self._ahead = None
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_levels() -> list[dict[str, Any]]:
    """The levels of the best device here, from what is free, with measured speeds."""
    tiers = create_tiers(resolve(None).device)
    return [
        {
            "capacity_mb": level.capacity / MIB,
            "device": level.place,
            "speed_gbps": level.read_gb_per_s or 0.0,
        }
        for level in tiers.levels
    ]


def _checked(level: Mapping[str, Any], number: int) -> StackLevel:
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
        raise UsageError(f"level {number} has an invalid capacity of {capacity} MiB; use 0 or more")
    return StackLevel(capacity, device, speed)
