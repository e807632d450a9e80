"""One pass through a plan, by simulation: three serial resources (disk, link, computing) and a ring of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

from anytorch.memory.types import Block, Event, Home, Prediction, Speeds, Step

PASSES = 3  # the first fills the ring, the last is the steady state


def predict(
    blocks: Mapping[str, Block],
    steps: Sequence[Step],
    homes: Mapping[str, Home],
    ring: int,
    speeds: Speeds,
    *,
    shared: bool,
) -> Prediction:
    """Where `speeds` are unknown a link takes no time, and the prediction says only what it knows.

    `shared`: the device reads host memory itself, so a disk read lands in the ring and there is no link to cross.
    """
    disk_s = {name: seconds(block.resting, speeds.disk_gb_per_s) for name, block in blocks.items()}
    link_s = {name: 0.0 if shared else seconds(block.resting, speeds.host_gb_per_s) for name, block in blocks.items()}
    disk_free = link_free = compute_free = 0.0
    # In the ring, oldest first: (block, when its space can be reused). Its bytes count from the fetch to that moment.
    inside: deque[tuple[str, float]] = deque()
    used = 0
    events: list[Event] = []
    begun: list[tuple[str, float]] = []
    starts: list[float] = []
    pass_start = 0.0
    for number in range(PASSES):
        pass_start = compute_free
        for step in steps:
            arrived = 0.0
            needed = [name for name in step.blocks if homes[name] != "device"]
            for name in needed:
                if any(held == name for held, _ in inside):
                    continue  # used by the step before and not overwritten yet
                free_at = 0.0
                while used + blocks[name].resting > ring and inside:
                    gone, when = inside.popleft()
                    used -= blocks[gone].resting
                    free_at = max(free_at, when)
                if homes[name] == "disk":
                    begin = max(disk_free, free_at)
                    disk_free = begin + disk_s[name]
                    link_begin = max(link_free, begin)
                    link_free = max(link_begin + link_s[name], disk_free)
                    end = link_free
                    events.append(Event("disk", name, begin, disk_free, blocks[name].resting))
                    if link_s[name]:
                        events.append(Event("link", name, link_begin, link_begin + link_s[name], blocks[name].resting))
                else:
                    begin = max(link_free, free_at)
                    end = link_free = begin + link_s[name]
                    events.append(Event("link", name, begin, end, blocks[name].resting))
                if number == PASSES - 1:
                    begun.append((name, begin))
                arrived = max(arrived, end)
                inside.append((name, end))
                used += blocks[name].resting
            begin = max(compute_free, arrived)
            compute_free = begin + step.compute_s
            if number == PASSES - 1:
                starts.append(begin)
            events.append(Event("compute", step.name, begin, compute_free))
            inside = deque((name, compute_free if name in needed else when) for name, when in inside)
    # The last pass alone, with time counted from its beginning.
    timeline = tuple(
        Event(event.kind, event.name, event.start_s - pass_start, event.end_s - pass_start, event.nbytes)
        for event in events
        if event.end_s > pass_start or (event.start_s >= pass_start and event.kind == "compute")
    )
    pass_s = compute_free - pass_start
    busy = {
        kind: sum(
            min(event.end_s, compute_free) - max(event.start_s, pass_start)
            for event in events
            if event.kind == kind and event.end_s > pass_start
        )
        for kind in ("disk", "link", "compute")
    }
    moved = {home: streamed_per_pass(blocks, steps, homes, home, ring) for home in ("host", "disk")}
    return Prediction(
        pass_s=pass_s,
        limit=limit_of(busy),
        from_host_nbytes=moved["host"],
        from_disk_nbytes=moved["disk"],
        busy_s=busy,
        timeline=timeline,
        schedule=schedule_of(begun, starts),
    )


def seconds(nbytes: int, gb_per_s: float | None) -> float:
    return nbytes / (gb_per_s * 1e9) if gb_per_s else 0.0


def limit_of(busy: Mapping[str, float]) -> Literal["computing", "host link", "disk", "nothing"]:
    longest = max(busy, key=lambda kind: busy[kind])
    if busy[longest] <= 0:
        return "nothing"
    names: dict[str, Literal["computing", "host link", "disk"]] = {
        "disk": "disk",
        "link": "host link",
        "compute": "computing",
    }
    return names[longest]


def streamed_per_pass(
    blocks: Mapping[str, Block], steps: Sequence[Step], homes: Mapping[str, Home], home: str, ring: int
) -> int:
    """Bytes that leave a home per pass; a block that the ring still holds from the step before is not fetched again."""
    total = 0
    for position, step in enumerate(steps):
        before = steps[position - 1].blocks if len(steps) > 1 else ()
        total += sum(blocks[n].resting for n in step.blocks if homes[n] == home and n not in before)
    return total


def schedule_of(begun: Sequence[tuple[str, float]], starts: Sequence[float]) -> tuple[tuple[str, ...], ...]:
    """For every step, the blocks whose fetch begins no later than it does and later than the step before."""
    out: list[list[str]] = [[] for _ in starts]
    for name, begin in begun:
        at = next((index for index, start in enumerate(starts) if begin <= start), len(starts) - 1)
        out[at].append(name)
    return tuple(tuple(names) for names in out)
