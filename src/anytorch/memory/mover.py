"""Brings blocks to the device before they are needed, through a ring that is allocated once.

While a step computes, the blocks of the next steps are on their way (`transfers`). What comes next is what came next the
last time, so the mover follows the program rather than a fixed trace.

The lock guards the books alone (what is in the ring, who uses it, what comes next). No thread holds it while bytes move: one
that needs a block counts as its user, releases the lock and then waits for the reads, so a slow disk stops only threads
that need what it reads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from anytorch import logs
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.homes import FittedState, device_buffer
from anytorch.memory.reader import finish
from anytorch.memory.ring import FORWARD, Region, RingSpace, UseOrder
from anytorch.memory.sizes import words
from anytorch.memory.transfers import Transfers, UnderWay, do

log = logs.logger(__name__)


@dataclass(eq=False)
class RingBlock:
    """A block in the ring."""

    name: str
    region: Region
    buffer: torch.Tensor
    under_way: UnderWay
    done: Any = None  # event on the computing stream, after the last use
    users: int = 0
    fresh: bool = True  # fetched and not used yet
    stale: bool = False  # what rests at home has changed since
    asked: bool = False  # fetched for somebody who waits for it, not ahead

    @property
    def failed(self) -> bool:
        return any(f.done() and not f.cancelled() and f.exception() for f in self.under_way.futures)


@dataclass
class MoverStats:
    fetched: int = 0  # blocks brought up
    fetched_ahead: int = 0  # of those, before they were asked for
    from_host_nbytes: int = 0
    from_disk_nbytes: int = 0
    dropped_unused: int = 0  # fetched for nothing


class Mover:
    """`acquire` and `release` are called around every step; they may be nested and come from several threads.

    The plan's ring of device memory is reserved in the ledger and allocated here. `images` is the state's: a block that is
    written anew gets a new one there, between `begin_change` and `end_change`.
    """

    def __init__(self, state: FittedState, host: Mapping[str, list[torch.Tensor]]) -> None:
        """`host`: where the blocks that live in host memory lie there, in pieces."""
        self.images = state.images
        self.ledger = state.ledger
        self.stats = MoverStats()
        self._transfers = Transfers(state, host)
        self.copies = self._transfers.copies
        self._homes = homes = state.plan.homes
        # Blocks that live on the device need no moving, and steps that use only those are none of ours.
        moving = [
            replace(step, blocks=tuple(name for name in step.blocks if homes[name] != "device"))
            for step in state.plan.steps
        ]
        self._steps = {step.name: step for step in moving if step.blocks}
        self._order = UseOrder(list(self._steps))
        self._held: dict[str, RingBlock] = {}
        self._leaving: set[RingBlock] = set()  # given up, while a thread still writes into them
        self._space = RingSpace(state.plan.ring_nbytes)
        self._changed = threading.Condition(threading.RLock())
        self._changing: set[str] = set()  # blocks whose image at home is being written: not to be fetched
        self._no_ring = torch.empty(0, dtype=torch.uint8)  # made now: `close` must not need memory
        self.ring = device_buffer(state.ledger, "ring", state.plan.ring_nbytes, state.device)
        self._closed = False

    # --- use -------------------------------------------------------------------------------------------------------

    def acquire(self, step: str, use: str = FORWARD) -> dict[str, torch.Tensor]:
        """The images of a step's blocks on the device, valid until `release`. Fetches what is missing, then looks ahead.

        `use` tells a step's uses apart (forward, backward, …): what comes next is remembered for each.
        """
        names = self._steps[step].blocks
        with self._changed:
            if self._closed:
                raise UsageError(
                    f"{step!r} needs weights of a fitted model that is closed", hint="close it after backward"
                )
            self._order.follow(step, use)
            taken: list[RingBlock] = []
            try:
                for name in names:
                    taken.append(self._take(name))
                self._look_ahead()
            except BaseException:
                self._drop_users(taken)
                raise
        try:
            return {held.name: self._arrived_or_again(taken, place) for place, held in enumerate(taken)}
        except BaseException:
            with self._changed:
                self._drop_users(taken)
            raise

    def release(self, step: str) -> None:
        """The step has been queued (or done, on the CPU): its blocks may be overwritten after it."""
        with self._changed:
            self._drop_users(self._held[name] for name in self._steps[step].blocks if name in self._held)
            self._changed.notify_all()
            ahead = self._order.at(step)
            if ahead:
                self._try_ahead()  # there is room again, and a pause between passes is time, too
        if ahead:
            self._work_ahead()

    def _try_ahead(self) -> None:
        if self._closed:
            return
        try:
            self._look_ahead()
        except Exception as exc:  # noqa: BLE001  (whoever needs the block is told; what was done has ended well)
            log.info("fetching ahead failed, which will be tried again: %s", exc)

    def _take(self, name: str) -> RingBlock:
        held = self._held.get(name)
        if held is not None and held.failed:
            self._forget(name)  # fetched ahead: the reason may be gone by now
            held = None
        if held is None:
            held = self._fetch_now(name)
        elif held.fresh:
            self.stats.fetched_ahead += 1
        held.users += 1
        held.fresh = False
        return held

    def _drop_users(self, blocks: Iterable[RingBlock]) -> None:
        for held in list(blocks):
            if not held.users:
                continue
            held.users -= 1
            if not held.users:
                held.done = self.copies.computed()
                if held.stale and self._held.get(held.name) is held:
                    self._forget(held.name)

    def _arrived_or_again(self, taken: list[RingBlock], place: int) -> torch.Tensor:
        """`_arrived`; a block that was fetched ahead, and failed only after it was taken, is fetched once more."""
        held = taken[place]
        try:
            return self._arrived(held)
        except Exception as exc:
            if held.asked or not held.failed:
                raise
            log.info("what was fetched ahead failed and is fetched again: %s", exc)
        with self._changed:
            taken[place] = held = self._take(held.name)
            held.asked = True
        return self._arrived(held)

    def _arrived(self, held: RingBlock) -> torch.Tensor:
        """The buffer of a block that the caller uses, when all of it is there. Without the lock: this may take long."""
        self._work(held)
        coming = held.under_way
        if coming.futures:
            try:
                finish(coming.futures)
            except BaseException:
                with self._changed:
                    if held.failed and self._held.get(held.name) is held:
                        held.users = 0
                        self._forget(held.name)  # what arrived of it is not to be trusted
                raise
            with self._changed:
                if held.under_way is coming:  # the first of those who waited
                    arrived = self.copies.copied() if coming.arrived is None else coming.arrived
                    held.under_way = UnderWay(arrived=arrived)
        self.copies.compute_after(held.under_way.arrived)
        return held.buffer

    def _work(self, held: RingBlock) -> None:
        """Bring a block up in this thread, if that is how its device is reached and nobody else has begun it."""
        with self._changed:
            coming = held.under_way
            work, coming.work = coming.work, None
        if work is not None:
            do(work, coming.futures[0])

    def _work_ahead(self) -> None:
        """The same for all blocks that were looked for ahead."""
        while True:
            with self._changed:
                held = next((held for held in self._held.values() if held.under_way.work is not None), None)
            if held is None:
                return
            self._work(held)

    def _fetch_now(self, name: str) -> RingBlock:
        """Fetch a block that somebody waits for: whatever is in the way and not in use has to go."""
        while True:
            if name in self._changing:
                self._changed.wait()
                continue
            held = self._held.get(name)
            if held is None and (held := self._fetch(name)) is not None:
                held.asked = True
            if held is not None:
                return held
            if self._leaving:
                self._changed.wait()  # for the room they leave
                continue
            idle = [other.name for other in self._held.values() if other.users == 0]
            if idle:
                distances = self._distances(idle)
                self._forget(max(idle, key=distances.__getitem__))
            elif not self._changed.wait(timeout=60.0) and all(held.users for held in self._held.values()):
                raise BudgetTooSmall(
                    f"the ring of {words(self._space.nbytes)} is full of blocks in use, {name!r} needs "
                    f"{words(self.images[name].nbytes)} more",
                    hint="raise the device budget, or run fewer passes at the same time",
                )

    def _look_ahead(self) -> None:
        """Begin to fetch what comes next, as far as the ring has room that nothing sooner needs.

        Room is made by giving up used blocks whose next use is later than the new one's (Belady). Nothing fresh is given up.
        """
        distances: dict[str, float] | None = None
        for distance, step in self._order.ahead():
            for name in self._steps[step].blocks:
                if name in self._held:
                    continue
                if name in self._changing:
                    return  # it will be looked for again when it is whole
                if distances is None:
                    distances = self._distances([held.name for held in self._held.values()])
                if not self._make_room(name, distance, distances) or self._fetch(name) is None:
                    return

    def _make_room(self, name: str, distance: int, distances: Mapping[str, float]) -> bool:
        while self._space.find(self.images[name].nbytes) is None:
            idle = [held.name for held in self._held.values() if not held.users and not held.fresh]
            farthest = max(idle, key=distances.__getitem__, default=None)
            if self._leaving or farthest is None or distances[farthest] <= distance:
                return False
            self._forget(farthest)
        return True

    def _distances(self, names: Sequence[str]) -> dict[str, float]:
        """Uses until each block is needed again, counted along what came next the last time."""
        left = set(names)
        found: dict[str, float] = {}
        for distance, step in self._order.ahead():
            for name in left.intersection(self._steps[step].blocks):
                found[name] = distance
                left.discard(name)
            if not left:
                break
        return found | dict.fromkeys(left, math.inf)

    # --- fetching --------------------------------------------------------------------------------------------------

    def _fetch(self, name: str) -> RingBlock | None:
        """Begin to bring a block up; None when the ring has no room for it."""
        image = self.images[name]
        region = self._space.take(image.nbytes)
        if region is None:
            return None
        held = RingBlock(name, region, self.ring[region.start : region.end], UnderWay())
        self._space.wait_for(region, self.copies.copy_after)
        self._held[name] = held
        try:
            held.under_way = self._transfers.begin(image, held.buffer)
        except BaseException:
            self._forget(name)
            raise
        self.stats.fetched += 1
        if self._homes[name] == "host":
            self.stats.from_host_nbytes += image.nbytes
        else:
            self.stats.from_disk_nbytes += sum(piece.nbytes for piece in image.pieces)
        return held

    def _forget(self, name: str) -> None:
        """Take a block out of the ring. Its place is free when no thread writes into it any more, which nobody waits for."""
        held = self._held.pop(name)
        if held.fresh:
            self.stats.dropped_unused += 1
        for future in held.under_way.futures:
            future.cancel()
        writing = _unfinished([held])
        if not writing:
            # The copies of what nobody used may still be in the queue.
            self._space.give_back(held.region, self.copies.copied() if held.fresh else held.done)
            return
        self._leaving.add(held)
        for future in writing:
            future.add_done_callback(partial(self._leave, held))

    def _leave(self, held: RingBlock, _: Future[None]) -> None:
        with self._changed:
            if held in self._leaving and all(future.done() for future in held.under_way.futures):
                self._leaving.remove(held)
                held.under_way = UnderWay()  # its futures' callbacks lead back to it: a circle that keeps the ring
                self._space.give_back(held.region, self.copies.copied())
                self._changed.notify_all()

    # --- what the ring has ----------------------------------------------------------------------------------------

    def held(self, name: str) -> torch.Tensor:
        """The image of a block that is in use."""
        return self._held[name].buffer

    def forget_all(self) -> None:
        """Empty the ring: what rests at home has changed."""
        with self._changed:
            for name in list(self._held):
                self._give_up(name)

    def fetch_ahead(self) -> None:
        """Look for what comes next: a change at home is over."""
        with self._changed:
            self._try_ahead()
        self._work_ahead()

    def _give_up(self, name: str) -> None:
        """What the ring has of a block is old: it goes now, or when its user is done with it."""
        held = self._held.get(name)
        if held is not None and held.users:
            held.stale = True
        elif held is not None:
            self._forget(name)

    # --- changing what rests ---------------------------------------------------------------------------------------

    def begin_change(self, name: str) -> None:
        """Announce a write to a block's image at home: it leaves the ring and is not fetched before `end_change`.

        One writer at a time: a second one waits until the first is done with the block.
        """
        with self._changed:
            self.wait_unchanged(name)
            self._changing.add(name)
            blocks = [held for held in (*self._held.values(), *self._leaving) if held.name == name]
            self._give_up(name)
        try:
            wait(_unfinished(blocks))  # of the image as it was: nobody gets half of it
        except BaseException:
            self.end_change(name)
            raise

    def end_change(self, name: str) -> None:
        """End the write: waiting threads continue, and the block may be fetched again."""
        with self._changed:
            self._changing.discard(name)
            self._changed.notify_all()
            self._try_ahead()
        self._work_ahead()

    def wait_unchanged(self, name: str) -> None:
        """Wait until no write to the block's image at home is running."""
        with self._changed:
            while name in self._changing:
                self._changed.wait()

    def ring_offset(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """The block a tensor lies in and its byte offset there, if its memory is the ring's."""
        if not self._space.nbytes or tensor.untyped_storage().data_ptr() != self.ring.untyped_storage().data_ptr():
            return None
        address = tensor.data_ptr() - self.ring.data_ptr()
        with self._changed:
            for name, held in self._held.items():
                if held.users and held.region.start <= address < held.region.end:
                    return name, address - held.region.start
        return None

    def close(self) -> None:
        """Free all memory. No step may be in use."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for name in list(self._held):
                self._forget(name)
            leaving = list(self._leaving)
        wait(_unfinished(leaving))
        self._transfers.close()
        self.ledger.release("device", "ring")
        self.ring = self._no_ring


def _unfinished(blocks: Iterable[RingBlock]) -> list[Future[None]]:
    return [future for held in blocks for future in held.under_way.futures if not future.done()]
