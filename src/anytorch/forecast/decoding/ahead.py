"""Random numbers made while the device is busy: a thread draws the next steps' in the published order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from anytorch.forecast.decoding.sampling import Draws, exponential

WAITING = 3  # blocks that are made ahead


class Ahead:
    """Blocks of draws, `counts` steps each: `take()` → two tensors [steps, rows, ids] on the device.

    One thread makes them, one after the other, so that the order of the draws is that of the iterator.
    """

    def __init__(self, draws: Draws, counts: Sequence[int], device: torch.device, pinned: bool) -> None:
        self.draws, self.device, self.pinned = draws, device, pinned
        self.counts = deque(counts)
        self.pool = ThreadPoolExecutor(1, "anytorch-draws")
        self.waiting: deque[Future[Tensor]] = deque()
        for _ in range(WAITING):
            self._order()

    def _order(self) -> None:
        if self.counts:
            # From pinned memory the copy does not wait for what the device is doing.
            self.waiting.append(self.pool.submit(self.draws.block, self.counts.popleft(), self.pinned))

    def take(self) -> tuple[Tensor, Tensor]:
        block = self.waiting.popleft().result()
        self._order()
        first, second = self.draws.parts(block.to(self.device, non_blocking=True))
        return exponential(first), exponential(second)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
