"""Blocks, budgets and speeds in, the fastest plan out. Pure: nothing is measured, moved or opened here.

Every pass uses the blocks in the same, known order. Then Belady's rule (drop what is needed last) comes down to a *fixed*
resident set: whatever was just used is needed last, so a streamed block is dropped at once and a resident one never. LRU
would drop exactly what comes next, and hit nothing as soon as the model is larger than the memory.

What remains to choose is how many bytes are resident and how many are the ring that the others pass through. A larger ring
smooths uneven blocks, a larger resident part streams less; the planner simulates every sensible split and takes the fastest.
Resident blocks are spread evenly over the pass, so that the links can work while resident blocks compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.sizes import round_up, words
from anytorch.memory.types import Budgets, Event, Home, Limit, Prediction, Speeds, Step, TierPlan, WeightBlock

MIB = 2**20
STAGING_NBYTES = 128 * MIB  # eight reads of 16 MiB in flight: enough for the fastest disks, little beside any model
LEAST_STAGING_NBYTES = 2 * MIB
DEEPEST = 4  # steps held at once in the ring; beyond that more residents always win


class DiskTooSmall(BudgetTooSmall):
    """It is the disk that has not enough room. Nothing is opened here: whether it could be written is for others to ask."""


def make_plan(
    blocks: Sequence[WeightBlock],
    steps: Sequence[Step],
    budgets: Budgets,
    speeds: Speeds | None = None,
    *,
    on_disk: bool = False,
    home: Mapping[str, Home] | None = None,
    training: bool = False,
) -> TierPlan:
    """The fastest plan within the budgets. `on_disk`: the blocks lie in a checkpoint already, so a disk home costs nothing.

    `home` fixes the home of some blocks. `training`: the first blocks stay on the device rather than some all along the
    pass: backward ends with them and forward begins with them, so no update on the host has to be waited for.

    Raises BudgetTooSmall, with the smallest budget that works, when there is none.
    """
    draft = TierPlan({b.name: b for b in blocks}, tuple(steps), budgets, speeds or Speeds(), dict(home or {}), 0, 0)
    check(draft)
    least = least_device_nbytes(draft.blocks, steps)
    if budgets.device < least:
        worst = max(steps, key=lambda step: sum(draft.blocks[name].resting for name in step.blocks))
        raise BudgetTooSmall(
            f"a device budget of {words(budgets.device)} cannot hold {worst.name!r}, which needs {words(least)} at once",
            hint=f"the smallest device budget that works is {least} bytes ({words(least)})",
        )
    if all(place == "device" for place in draft.homes.values()) and draft.total_nbytes <= budgets.device:
        return predicted(replace(draft, homes=dict.fromkeys(draft.blocks, "device")))
    plans: list[TierPlan] = []
    failure: BudgetTooSmall | None = None
    for ring in ring_sizes(draft):
        try:
            plan = with_ring(draft, ring, on_disk, training)
        except BudgetTooSmall as exc:
            failure = failure or exc
        else:
            plans += [plan] if plan is not None else []
    if not plans:
        raise failure or BudgetTooSmall(
            f"no split of a device budget of {words(budgets.device)} works",
            hint=f"a device budget of {draft.total_nbytes} bytes holds everything",
        )
    return min(plans, key=cost_of)


def check(draft: TierPlan) -> None:
    if not draft.steps:
        raise UsageError("a plan needs at least one step")
    for step in draft.steps:
        for name in step.blocks:
            if name not in draft.blocks:
                raise UsageError(f"step {step.name!r} uses the block {name!r}, which is not among the blocks")
    unused = draft.blocks.keys() - {name for step in draft.steps for name in step.blocks}
    if unused:
        raise UsageError(f"no step uses {', '.join(sorted(unused)[:5])}")


def least_device_nbytes(blocks: Mapping[str, WeightBlock], steps: Sequence[Step]) -> int:
    """What must be on the device at once, whatever the plan: the largest step."""
    return max(sum(blocks[name].resting for name in step.blocks) for step in steps)


def ring_sizes(draft: TierPlan) -> list[int]:
    """Every ring worth trying: the largest sum of 1, 2, … consecutive steps, with the biggest blocks in it or resident."""
    blocks, device = draft.blocks, draft.budgets.device
    sizes: set[int] = set()
    tops = sorted({block.resting for block in blocks.values()}, reverse=True)
    for top in tops[:4]:
        needs = [sum(blocks[n].resting for n in step.blocks if blocks[n].resting <= top) for step in draft.steps]
        for depth in range(1, min(DEEPEST, len(needs)) + 1):
            around = needs + needs[: depth - 1]
            window = max(sum(around[at : at + depth]) for at in range(len(needs)))
            if 0 < window <= device:
                sizes.add(window)
    sizes.add(min(device, sum(block.resting for block in blocks.values())))
    return sorted(sizes)


def with_ring(draft: TierPlan, ring: int, on_disk: bool, training: bool) -> TierPlan | None:
    """The plan for one size of ring, or None if a step cannot pass through it. `draft` has the homes that are fixed."""
    blocks, steps = draft.blocks, draft.steps
    order = list(dict.fromkeys(name for step in steps for name in step.blocks))
    homes: dict[str, Home] = dict(draft.homes)
    room = draft.budgets.device - ring - draft.nbytes_at("device")
    for name in order:  # what is larger than the ring has to be resident
        if name not in homes and blocks[name].resting > ring:
            homes[name] = "device"
            room -= blocks[name].nbytes
    if room < 0:
        return None
    uses = {name: sum(step.blocks.count(name) for step in steps) for name in blocks}
    for count in sorted(set(uses.values()), reverse=True):  # what is used twice per pass saves twice
        group = [name for name in order if name not in homes and uses[name] == count]
        choose = first if training else spread
        for name in choose(group, {n: blocks[n].nbytes for n in group}, room):
            homes[name] = "device"
            room -= blocks[name].nbytes
    streamed = [name for name in order if homes.get(name) != "device"]
    if any(sum(blocks[n].resting for n in step.blocks if n in set(streamed)) > ring for step in steps):
        return None
    staging = settle(draft, streamed, homes, on_disk)
    largest = min(ring, sum(blocks[name].resting for name in streamed))
    return predicted(replace(draft, homes=homes, ring_nbytes=largest, staging_nbytes=staging))


def settle(draft: TierPlan, streamed: Sequence[str], homes: dict[str, Home], on_disk: bool) -> int:
    """Give every streamed block its home below the device; returns the staging bytes. Raises BudgetTooSmall."""
    blocks, budgets = draft.blocks, draft.budgets
    loose = [name for name in streamed if name not in homes]
    resting = sum(blocks[name].resting for name in loose)
    fixed_host = sum(blocks[n].resting for n in streamed if homes.get(n) == "host")
    fixed_disk = any(homes.get(n) == "disk" for n in streamed)
    staging = 0
    if budgets.host is not None and fixed_host + resting <= budgets.host and not fixed_disk:
        homes.update(dict.fromkeys(loose, "host"))
        return 0
    if budgets.host is not None:
        staging = max(LEAST_STAGING_NBYTES, min(STAGING_NBYTES, round_up(budgets.host // 4, MIB)))
        room = budgets.host - staging - fixed_host
        if budgets.disk is None:
            missing = fixed_host + resting
            raise BudgetTooSmall(
                f"a host budget of {words(budgets.host)} cannot hold the {words(missing)} that do not fit on the device",
                hint=f"the smallest host budget that works is {missing} bytes ({words(missing)}), or name a disk folder",
            )
        if room < 0:
            missing = fixed_host + LEAST_STAGING_NBYTES
            raise BudgetTooSmall(
                f"a host budget of {words(budgets.host)} has no room for the buffers that disk reads pass through",
                hint=f"the smallest host budget that works is {missing} bytes ({words(missing)})",
            )
        for name in spread(loose, {n: blocks[n].resting for n in loose}, room):
            homes[name] = "host"
    on_disk_names = [name for name in loose if name not in homes]
    needed = sum(blocks[name].resting for name in on_disk_names)
    if budgets.disk is None and needed:
        raise BudgetTooSmall(
            f"{words(needed)} exceed the memory budgets, and the disk may not be used",
            hint=f"name a folder with disk=…, or raise the device budget to {draft.total_nbytes} bytes",
        )
    if not on_disk and budgets.disk is not None and needed > budgets.disk:
        raise DiskTooSmall(
            f"{words(needed)} must be stored on disk, but the disk budget is {words(budgets.disk)}",
            hint=f"the smallest disk budget that works is {needed} bytes ({words(needed)})",
        )
    homes.update(dict.fromkeys(on_disk_names, "disk"))
    return staging


def spread(names: Sequence[str], nbytes: Mapping[str, int], room: int) -> list[str]:
    """As many of `names` as fit into `room`, evenly spaced over their order rather than the first ones."""
    total = sum(nbytes[name] for name in names)
    if total <= room:
        return list(names)
    chosen: list[str] = []
    taken = seen = 0
    for name in names:
        seen += nbytes[name]
        if taken + nbytes[name] <= min(room, room * seen / total + nbytes[name] / 2):
            chosen.append(name)
            taken += nbytes[name]
    return chosen + first([name for name in names if name not in chosen], nbytes, room - taken)


def first(names: Sequence[str], nbytes: Mapping[str, int], room: int) -> list[str]:
    """As many of the first of `names` as fit into `room`, and what fits of the others."""
    chosen, taken = [], 0
    for name in names:
        if taken + nbytes[name] <= room:
            chosen.append(name)
            taken += nbytes[name]
    return chosen


def cost_of(plan: TierPlan) -> tuple[float, int, int]:
    """What the planner minimises: the time of a pass, then bytes streamed, then device memory.

    If it is unknown how long the steps compute, two guesses are added up: a tenth of the time their blocks travel (then
    what streams decides, and residents win) and all of it (then overlapping gains most). So a plan gives up neither
    residents nor double buffering because a figure is missing.
    """
    pass_s = plan.prediction.pass_s
    if not any(step.compute_s for step in plan.steps):
        pass_s = sum(rehearse(plan, share) for share in (0.1, 1.0))
    streamed = plan.prediction.from_host_nbytes + plan.prediction.from_disk_nbytes
    return float(f"{pass_s:.4g}"), streamed, plan.device_nbytes


def rehearse(plan: TierPlan, share: float) -> float:
    """The time of a pass whose steps compute for `share` of the time that their blocks travel."""
    slowest = (plan.speeds.disk_gb_per_s if plan.prediction.from_disk_nbytes else plan.speeds.host_gb_per_s) or 1.0
    steps = [
        replace(step, compute_s=share * seconds(sum(plan.blocks[n].resting for n in step.blocks), slowest))
        for step in plan.steps
    ]
    speeds = Speeds(plan.speeds.host_gb_per_s or 1.0, plan.speeds.disk_gb_per_s or 1.0)
    return predict(replace(plan, steps=tuple(steps), speeds=speeds)).pass_s


def predicted(plan: TierPlan) -> TierPlan:
    return replace(plan, prediction=predict(plan))


LIMITS: dict[str, Limit] = {"disk": "disk", "link": "host link", "compute": "computing"}  # by the kind of event
PASSES = 3  # the first fills the ring, the last is the steady state


def predict(plan: TierPlan) -> Prediction:
    """Simulate passes of a plan. Where speeds are unknown a link takes no time, and the prediction says what it knows.

    Where there is no host level the device reads host memory itself: a disk read lands in the ring, and there is no link to
    cross.
    """
    blocks, steps, homes, ring = plan.blocks, plan.steps, plan.homes, plan.ring_nbytes
    link = None if plan.budgets.host is None else plan.speeds.host_gb_per_s
    disk_s = {name: seconds(block.resting, plan.speeds.disk_gb_per_s) for name, block in blocks.items()}
    link_s = {name: seconds(block.resting, link) for name, block in blocks.items()}
    disk_free = link_free = compute_free = 0.0
    # In the ring, oldest first: (block, when its space can be reused). Its bytes count from the fetch to that moment.
    inside: deque[tuple[str, float]] = deque()
    used = 0
    events: list[Event] = []
    pass_start = 0.0
    for _ in range(PASSES):
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
                arrived = max(arrived, end)
                inside.append((name, end))
                used += blocks[name].resting
            begin = max(compute_free, arrived)
            compute_free = begin + step.compute_s
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
        for kind in LIMITS
    }
    longest = max(busy, key=lambda kind: busy[kind])
    limit = LIMITS[longest] if busy[longest] > 0 else "nothing"
    return Prediction(pass_s, limit, streamed_per_pass(plan, "host"), streamed_per_pass(plan, "disk"), timeline)


def seconds(nbytes: int, gb_per_s: float | None) -> float:
    return nbytes / (gb_per_s * 1e9) if gb_per_s else 0.0


def streamed_per_pass(plan: TierPlan, home: Home) -> int:
    """Bytes that leave a home per pass; a block that the ring still holds from the step before is not fetched again."""
    total = 0
    for position, step in enumerate(plan.steps):
        before = plan.steps[position - 1].blocks if len(plan.steps) > 1 else ()
        total += sum(plan.blocks[n].resting for n in step.blocks if plan.homes[n] == home and n not in before)
    return total
