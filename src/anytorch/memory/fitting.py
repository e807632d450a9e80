"""Making a model run within memory budgets, and undoing it: `fit`, `fitted`, `unfit`.

`fit` reads from top to bottom: the levels of this machine (`create_tiers`), units and plan of the model (`plan_for`), and
`Fitted.place`, which brings every block to its home. `load` (`loading`) goes the same way from a checkpoint's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from anytorch import limits
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.fitted_model import HANDLE, Fitted
from anytorch.memory.formats import packing_of, resting_nbytes, unpacked_nbytes
from anytorch.memory.levels import Size, create_tiers, speeds_of
from anytorch.memory.plan import DiskTooSmall, least_device_nbytes, make_plan
from anytorch.memory.sizes import parse_nbytes, words
from anytorch.memory.spill import Spill
from anytorch.memory.spread import spread
from anytorch.memory.types import Budgets, Speeds, Step, TierPlan, Tiers, WeightBlock
from anytorch.memory.units import Found, find_units

LEAVES = "leaves"
Model = TypeVar("Model", bound=nn.Module)


def fit(
    model: Model,
    device: str | torch.device | None = "auto",
    *,
    device_budget: Size | Sequence[Size] | None = None,
    host_budget: Size | None = None,
    disk: str | Path | bool | None = None,
    disk_budget: Size | None = None,
    blocks: Sequence[str] | str | None = None,
    resident: Sequence[str] = (),
    reserve: Size = 0,
    host_reserve: Size = 0,
    speeds: Speeds | None = None,
    compute_s: float = 0.0,
    verify: bool = True,
    rest_format: str | None = None,
    training: bool = False,
    devices: Sequence[str | torch.device] | None = None,
) -> Model:
    """Make a model run on a device within memory budgets; returns the same object.

    What does not fit on the device rests in host memory, then on disk, and is brought up block by block while the device
    computes. Budgets that are not given come from what is free. `reserve` is kept free of the device budget for
    activations, `host_reserve` of the host's (an optimizer works there); `compute_s` is how long one pass computes, for a
    better plan. `blocks` and `resident` name modules (patterns allowed) that move as one and that stay on the device;
    blocks="leaves" moves every leaf module by itself: that takes less memory for weights in transit, so that more of them
    stay, but layers may only call their children. `training` plans for forward and backward.
    `rest_format` ("int8", "int4", "fp4", …: the names of `anytorch.quant`) lets the linear layers of blocks that are not
    resident rest in fewer bits, which is lossy. The model is left as it was if anything fails.

    `devices` names several cards instead: the blocks are spread over them in the order of a pass, each card's within its
    own `device_budget` (one for all, or a list), `reserve` kept free on each. Nothing streams then.

    Raises BudgetTooSmall, which names the smallest budget that works.

    >>> import torch, anytorch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> model = anytorch.memory.fit(model, "cpu", device_budget="20KiB")
    >>> model(torch.ones(1, 64)).shape
    torch.Size([1, 64])
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"fit needs a torch.nn.Module, not a {type(model).__name__}",
            hint="a folder with a checkpoint: anytorch.memory.load" if isinstance(model, (str, Path)) else "",
        )
    if HANDLE in model.__dict__:
        raise UsageError("this model is already fitted", hint="anytorch.memory.unfit(model) first")
    if devices is not None:
        _spread(model, devices, device_budget, blocks, reserve)
        return model
    if isinstance(device_budget, Sequence) and not isinstance(device_budget, str):
        raise UsageError("device_budget is a list, but only one card is used", hint="name the cards with devices=[…]")
    tiers = create_tiers(
        device,
        device_budget=device_budget,
        host_budget=host_budget,
        disk=disk,
        disk_budget=disk_budget,
        speeds=speeds,
    )
    kept = parse_nbytes(reserve, "reserve"), parse_nbytes(host_reserve, "host_reserve")
    found, plan = plan_for(model, tiers, Wishes(blocks, resident, *kept, compute_s, rest_format, training))
    handle = Fitted(model, tiers, found, plan, verify=verify, rest_format=rest_format)
    handle.place({name: group.image() for name, group in found.groups.items()})
    return model


def _spread(
    model: nn.Module,
    devices: Sequence[str | torch.device],
    budgets: Size | Sequence[Size] | None,
    blocks: Sequence[str] | str | None,
    reserve: Size,
) -> None:
    if blocks == LEAVES:
        raise UsageError('blocks="leaves" works with one device only; name modules, or leave it out')
    names = (blocks,) if isinstance(blocks, str) else blocks
    spread(model, devices, budgets, blocks=names, reserve=parse_nbytes(reserve, "reserve"), handle=HANDLE)


def fitted(model: nn.Module) -> Fitted:
    """The handle of a fitted model: its plan, ledger, statistics, `save`, `unfit`. Raises UsageError if it is not fitted.

    For a model over several cards it is a `memory.spread.Spread`, which has only `plan`, `explain` and `unfit`.
    """
    handle: Fitted | None = model.__dict__.get(HANDLE)
    if handle is None:
        raise UsageError("this model is not fitted", hint="anytorch.memory.fit(model, …) first")
    return handle


def unfit(model: Model, device: str | torch.device | None = None) -> Model:
    """Bring every weight back: to the device it was on before, or to `device`. Needs the memory for all of them."""
    fitted(model).unfit(device)
    return model


# --- units and plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wishes:
    """What a plan is asked for besides the budgets, in the words of `fit`."""

    blocks: Sequence[str] | str | None = None
    resident: Sequence[str] = ()
    reserve: int = 0
    host_reserve: int = 0
    compute_s: float = 0.0
    rest_format: str | None = None
    training: bool = False

    def __post_init__(self) -> None:
        limits.SECONDS_OR_NONE.check("compute_s", self.compute_s)


def plan_for(
    model: nn.Module,
    tiers: Tiers,
    wishes: Wishes,
    *,
    on_disk: bool = False,
    sizes: Callable[[Found], dict[str, WeightBlock]] | None = None,
    codes: bool = True,
) -> tuple[Found, TierPlan]:
    """Units and plan of a model. If a layer as a whole does not fit, every leaf module becomes a unit of its own.

    Raises BudgetTooSmall; UsageError where the disk has no room because its folder cannot be written at all.
    """
    leaves, packed = wishes.blocks == LEAVES, wishes.rest_format
    names = None if leaves else (wishes.blocks,) if isinstance(wishes.blocks, str) else wishes.blocks
    for finest in (True,) if leaves else (False, True):
        found = find_units(model, blocks=names, resident=wishes.resident, finest=finest, codes=codes)
        extras = found.extras_nbytes(model) + wishes.reserve
        try:
            chosen = (sizes or block_sizes)(found)
            if packed is not None and sum(b.nbytes for b in chosen.values()) + extras > tiers.device.capacity:
                chosen, extras = block_sizes(found, packed), extras + unpacked_nbytes(found, packed)
            return found, _plan(found, tiers, wishes, extras, on_disk, chosen)
        except BudgetTooSmall as exc:
            if finest or names is not None:
                disk = tiers.find("disk")
                if isinstance(exc, DiskTooSmall) and disk is not None:
                    # A read-only file system says that nothing is free, which no budget mends: its own reason comes first.
                    Spill(disk.place).close()
                raise
    raise AssertionError("unreachable")


def block_sizes(found: Found, rest_format: str | None = None) -> dict[str, WeightBlock]:
    """Every block with its bytes on the device, and with those it rests in if they are fewer."""
    sizes = {}
    for name, group in found.groups.items():
        packing = None if rest_format is None else packing_of(found, name, rest_format)
        sizes[name] = WeightBlock(name, group.image().nbytes, resting_nbytes(packing) if packing else -1)
    return sizes


def _plan(
    found: Found, tiers: Tiers, wishes: Wishes, kept: int, on_disk: bool, blocks: Mapping[str, WeightBlock]
) -> TierPlan:
    """The plan for these blocks with `kept` bytes of the device budget kept free."""
    if not found.units:
        raise UsageError("this model has no parameters that could be moved", hint="use model.to(device)")
    host, disk = tiers.find("host"), tiers.find("disk")
    budgets = Budgets(
        max(0, tiers.device.capacity - kept),
        max(0, host.capacity - wishes.host_reserve) if host else None,
        disk.capacity if disk else None,
    )
    total = sum(block.nbytes for block in blocks.values())
    steps = [
        Step(unit.name, unit.blocks, wishes.compute_s * sum(blocks[b].nbytes for b in unit.blocks) / max(1, total))
        for unit in found.units
    ]
    try:
        speeds = speeds_of(tiers)
        return make_plan(list(blocks.values()), steps, budgets, speeds, on_disk=on_disk, training=wishes.training)
    except BudgetTooSmall as exc:
        least = least_device_nbytes(blocks, steps)
        if not kept or budgets.device >= least:
            raise
        message = f"{exc.message} (besides {words(kept)} kept for buffers and activations)"
        hint = f"the smallest device budget that works is {least + kept} bytes ({words(least + kept)})"
        raise BudgetTooSmall(message, hint=hint) from exc
