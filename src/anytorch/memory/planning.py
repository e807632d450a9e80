"""From a model and its levels to units, blocks and a plan; what has to stay on the device is counted first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.formats import packing_of, resting_nbytes
from anytorch.memory.images import Image, packed
from anytorch.memory.levels import speeds_of
from anytorch.memory.plan import DiskTooSmall, least_device_nbytes, make_plan
from anytorch.memory.sizes import words
from anytorch.memory.spill import Spill
from anytorch.memory.types import Block, Budgets, Plan, Step, Tiers
from anytorch.memory.units import Found, find_units

LEAVES = "leaves"


def plan_for(
    model: nn.Module,
    tiers: Tiers,
    *,
    blocks: Sequence[str] | str | None = None,
    resident: Sequence[str] = (),
    reserve: int = 0,
    host_reserve: int = 0,
    compute_s: float = 0.0,
    on_disk: bool = False,
    sizes: Callable[[Found], dict[str, Block]] | None = None,
    rest_format: str | None = None,
    training: bool = False,
    codes: bool = True,
) -> tuple[Found, Plan]:
    """Units and plan of a model. If a layer as a whole does not fit, every leaf module becomes a unit of its own.

    Raises BudgetTooSmall; UsageError where the disk has no room because its folder cannot be written at all.
    """
    if isinstance(blocks, str) and blocks != LEAVES:
        blocks = (blocks,)
    for finest in (True,) if blocks == LEAVES else (False, True):
        blocks = None if isinstance(blocks, str) else blocks
        found = find_units(model, blocks=blocks, resident=resident, finest=finest, codes=codes)
        try:
            chosen, kept = (sizes or packed_sizes)(found), reserve
            if rest_format is not None:
                whole = sum(block.nbytes for block in chosen.values()) + extras_nbytes(model, found) + reserve
                if whole > tiers.device.capacity:
                    chosen, kept = resting_sizes(found, rest_format), reserve + live_nbytes(found, rest_format)
            return found, _plan(model, found, tiers, (kept, host_reserve), compute_s, on_disk, chosen, training)
        except BudgetTooSmall as exc:
            if finest or blocks is not None:
                disk = tiers.find("disk")
                if isinstance(exc, DiskTooSmall) and disk is not None:
                    # A read-only file system says that nothing is free, which no budget mends: its own reason comes first.
                    Spill(disk.place).close()
                raise
    raise AssertionError("unreachable")


def packed_sizes(found: Found) -> dict[str, Block]:
    return {name: Block(name, packed_image(found, name).nbytes) for name in found.groups}


def resting_sizes(found: Found, rest_format: str) -> dict[str, Block]:
    sizes = {}
    for name, block in packed_sizes(found).items():
        packing = packing_of(found, name, rest_format)
        sizes[name] = Block(name, block.nbytes, resting_nbytes(packing)) if packing else block
    return sizes


def live_nbytes(found: Found, rest_format: str) -> int:
    """Device memory that the packed blocks of one unit are unpacked to: the largest unit's."""
    packings = {name: packing_of(found, name, rest_format) for name in found.groups}
    return max(sum(p.live.nbytes for name in unit.blocks if (p := packings[name])) for unit in found.units)


def packed_image(found: Found, name: str) -> Image:
    group = found.groups[name]
    return packed(name, dict(zip(group.paths, group.parameters, strict=True)))


def extras_nbytes(model: nn.Module, found: Found) -> int:
    """What stays on the device whatever the plan: buffers, and parameters that nothing moves."""
    moving = found.moving
    tensors = {id(t): t for t in (*found.rest, *model.buffers()) if id(t) not in moving}
    return sum(tensor.nbytes for tensor in tensors.values())


def _plan(
    model: nn.Module,
    found: Found,
    tiers: Tiers,
    reserved: tuple[int, int],  # on the device, in host memory
    compute_s: float,
    on_disk: bool,
    blocks: Mapping[str, Block],
    training: bool,
) -> Plan:
    extras = extras_nbytes(model, found)
    kept = extras + reserved[0]
    if not found.units:
        raise UsageError("this model has no parameters that could be moved", hint="use model.to(device)")
    host, disk = tiers.find("host"), tiers.find("disk")
    budgets = Budgets(
        max(0, tiers.device.capacity - kept),
        max(0, host.capacity - reserved[1]) if host else None,
        disk.capacity if disk else None,
    )
    total = sum(block.nbytes for block in blocks.values())
    steps = [
        Step(unit.name, unit.blocks, compute_s * sum(blocks[b].nbytes for b in unit.blocks) / max(1, total))
        for unit in found.units
    ]
    try:
        return make_plan(list(blocks.values()), steps, budgets, speeds_of(tiers), on_disk=on_disk, training=training)
    except BudgetTooSmall as exc:
        least = least_device_nbytes(blocks, steps)
        if not kept or budgets.device >= least:
            raise
        message = f"{exc.message} (besides {words(kept)} kept for buffers and activations)"
        hint = f"the smallest device budget that works is {least + kept} bytes ({words(least + kept)})"
        raise BudgetTooSmall(message, hint=hint) from exc
