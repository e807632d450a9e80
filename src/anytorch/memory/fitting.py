"""Making a model run within memory budgets, and undoing it: `fit`, `fitted`, `unfit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from anytorch.errors import UsageError
from anytorch.memory.handle import HANDLE, Fitted
from anytorch.memory.levels import Size, create_tiers
from anytorch.memory.placement import place
from anytorch.memory.planning import plan_for
from anytorch.memory.sizes import parse_nbytes
from anytorch.memory.types import Speeds

Model = TypeVar("Model", bound=nn.Module)


def fit(
    model: Model,
    device: str | torch.device | None = "auto",
    *,
    device_budget: Size | None = None,
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
) -> Model:
    """Make a model run on a device within memory budgets; returns the same object.

    What does not fit on the device rests in host memory, then on disk, and is brought up block by block while the device
    computes. Budgets that are not given come from what is free. `reserve` is kept free of the device budget for
    activations, `host_reserve` of the host's (an optimizer works there); `compute_s` is how long one pass computes, for a
    better plan. `blocks` and `resident` name modules (patterns allowed) that move as one and that stay on the device;
    blocks="leaves" moves every leaf module by itself: less memory passes weights on, and more of them stay, in a model
    whose layers only call their children. `training` plans for forward and backward.
    `rest_format` ("int8", "int4", "fp4", …: the names of `anytorch.quant`) lets the linear layers of blocks that are not
    resident rest in fewer bits, which is lossy. The model is left as it was if anything fails.

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
    tiers = create_tiers(
        device,
        device_budget=device_budget,
        host_budget=host_budget,
        disk=disk,
        disk_budget=disk_budget,
        speeds=speeds,
    )
    found, plan = plan_for(
        model,
        tiers,
        blocks=blocks,
        resident=resident,
        reserve=parse_nbytes(reserve, "reserve"),
        host_reserve=parse_nbytes(host_reserve, "host_reserve"),
        compute_s=compute_s,
        rest_format=rest_format,
        training=training,
    )
    handle = Fitted(model, tiers, found, plan, verify=verify, rest_format=rest_format)
    place(handle)
    return model


def fitted(model: nn.Module) -> Fitted:
    """The handle of a fitted model: its plan, ledger, statistics, `save`, `unfit`. Raises UsageError if it is not fitted."""
    handle: Fitted | None = model.__dict__.get(HANDLE)
    if handle is None:
        raise UsageError("this model is not fitted", hint="anytorch.memory.fit(model, …) first")
    return handle


def unfit(model: Model, device: str | torch.device | None = None) -> Model:
    """Bring every weight back: to the device it was on before, or to `device`. Needs the memory for all of them."""
    fitted(model).unfit(device)
    return model
