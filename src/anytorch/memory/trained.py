"""What an optimizer trains of a fitted model's streamed blocks, where each parameter is, and the memory a step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.shelf import memory_level
from anytorch.memory.sizes import words

if TYPE_CHECKING:
    from anytorch.memory.handle import Fitted

WORKING = "optimizer step"  # in the ledger
Groups = Sequence[Mapping[str, Any]]  # an optimizer's param_groups


@dataclass(frozen=True)
class Trained:
    blocks: Mapping[str, Sequence[tuple[str, torch.Tensor]]]  # the trained parameters of each block, by path
    places: Mapping[int, tuple[str, str]]  # a parameter's id → its block and path
    groups: Mapping[tuple[str, str], int]  # block and path → the parameter's group
    alone: Mapping[str, Sequence[str]]  # step → the blocks that no other step uses

    def is_resident(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and id(parameter) not in self.places

    def dtypes(self) -> set[torch.dtype]:
        return {parameter.dtype for found in self.blocks.values() for _, parameter in found}


def trained_of(fitted: Fitted, param_groups: Groups) -> Trained:
    """Raises UsageError where a trained weight rests in few bits."""
    wanted = {id(p) for group in param_groups for p in group["params"] if p.requires_grad}
    blocks = {
        name: found
        for name, group in fitted.found.groups.items()
        if fitted.plan.homes[name] != "device"
        and (found := [(path, p) for path, p in zip(group.paths, group.parameters, strict=True) if id(p) in wanted])
    }
    refuse_packed(fitted, blocks)
    places = {id(p): (name, path) for name, found in blocks.items() for path, p in found}
    groups = {
        places[id(p)]: index for index, group in enumerate(param_groups) for p in group["params"] if id(p) in places
    }
    uses = Counter(name for unit in fitted.found.units for name in unit.blocks)
    alone = {unit.name: [name for name in unit.blocks if uses[name] == 1] for unit in fitted.found.units}
    return Trained(blocks, places, groups, alone)


def refuse_packed(fitted: Fitted, blocks: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> None:
    """A file of codes is not written again, and a step's small changes would be lost in them."""
    for name, found in blocks.items():
        packing = fitted.packings.get(name)
        for path, _ in found:
            if packing and (path in packing.weights or fitted.plan.homes[name] == "disk"):
                raise UsageError(
                    f"{path} is in a block stored as {fitted.rest_format}, which cannot be trained",
                    hint="fit the model without rest_format, freeze it (requires_grad_(False)), or keep what is "
                    "trained on the device with resident=[…]",
                )


def reserve_working_memory(fitted: Fitted, trained: Trained, moments: int) -> None:
    """A step holds one block's weights, gradients and states at once, as far as they do not rest in memory."""
    largest = max((sum(p.nbytes for _, p in found) for found in trained.blocks.values()), default=0)
    ledger, level = fitted.ledger, memory_level(fitted)
    needed = (2 + moments) * largest
    try:
        ledger.reserve(level, WORKING, needed)
    except BudgetTooSmall as exc:
        keyword = "host_reserve" if level == "host" else "reserve"
        raise BudgetTooSmall(
            f"a step of the optimizer needs {words(needed)} at level {level} for its largest block, and "
            f"{words(ledger.free(level))} are free",
            hint=f"anytorch.memory.fit(model, …, {keyword}={needed}) keeps that much free",
        ) from exc


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
