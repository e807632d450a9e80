"""A model over several cards: its blocks in the order of a pass, each card's within its budget.

The parts of a pass follow each other from card to card (a pipeline of one batch): what a block is given moves to its card,
and the model's answer comes back to where its input was. Weights rest on their cards and nothing streams: what all cards
together cannot hold streams to one of them with `fit(model, device)`. Blocks that share a weight are on one card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anytorch.counts import counted
from anytorch.devices.choose import resolve
from anytorch.devices.memory import memory
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.levels import DEVICE_SHARE, Size
from anytorch.memory.sizes import parse_nbytes, words
from anytorch.memory.units import Found, find_units

Undo = Callable[[], None]


@dataclass(frozen=True)
class Card:
    """One card, with the bytes it may hold."""

    device: torch.device
    budget: int


@dataclass(frozen=True)
class SpreadPlan:
    """Which card every block is on. Plain data; `explain` says it in words."""

    cards: tuple[Card, ...]
    blocks: Mapping[str, int]  # block → its card's number
    nbytes: tuple[int, ...]  # per card

    def explain(self) -> str:
        lines = [
            f"{counted(len(self.blocks), 'block')} over {counted(len(self.cards), 'card')}, in the order of a pass"
        ]
        for number, card in enumerate(self.cards):
            count = sum(place == number for place in self.blocks.values())
            lines.append(
                f"{str(card.device) + ':':10}{counted(count, 'block')}, {words(self.nbytes[number])} of {words(card.budget)}"
            )
        return "\n".join(lines)


def plan_spread(
    units: Sequence[tuple[str, tuple[str, ...]]], nbytes: Mapping[str, int], cards: Sequence[Card], kept: int = 0
) -> SpreadPlan:
    """Consecutive units to each card, in proportion to the budgets; `kept` bytes of the first card are taken already.

    A unit goes where a block of it is already. Raises BudgetTooSmall with what is missing.
    """
    total, room = sum(nbytes.values()), sum(card.budget for card in cards) - kept
    if total > room:
        raise BudgetTooSmall(
            f"{words(total)} do not fit on {counted(len(cards), 'card')} with {words(max(0, room))} together",
            hint=f"name more cards, raise the budgets by {total - room} bytes, or stream to one card: fit(model, device)",
        )
    share = total / max(1, room)  # every card is filled to the same part of its budget, if blocks were grains
    limits = [kept * (number == 0) + share * (card.budget - kept * (number == 0)) for number, card in enumerate(cards)]
    places: dict[str, int] = {}
    used = [kept, *(0 for _ in cards[1:])]
    now = 0
    for name, blocks in units:
        new = [block for block in blocks if block not in places]
        need = sum(nbytes[block] for block in new)
        known = next((places[block] for block in blocks if block in places), None)
        if known is None:
            while now < len(cards) - 1 and used[now] + need / 2 > limits[now]:
                now += 1
            while now < len(cards) - 1 and used[now] + need > cards[now].budget:
                now += 1
        at = now if known is None else known
        if used[at] + need > cards[at].budget:
            # Blocks are no grains: what the later cards cannot hold goes back to an earlier one that can.
            at = next((n for n, card in enumerate(cards) if used[n] + need <= card.budget), -1)
            if at < 0 or known is not None:
                raise BudgetTooSmall(
                    f"{name!r} needs {words(need)}, and no card has that much left of its budget",
                    hint="raise the budgets, or name smaller blocks",
                )
        places.update(dict.fromkeys(new, at))
        used[at] += need
    return SpreadPlan(tuple(cards), places, tuple(used))


def cards_of(devices: Sequence[str | torch.device], budgets: Sequence[Size] | Size | None) -> list[Card]:
    """The cards by their names, with the budgets that were given, or with most of what is free on each."""
    chosen = [one if isinstance(one, torch.device) else resolve(one, strict=True).device for one in devices]
    if not chosen:
        raise UsageError("devices=[] names no card")
    if len({str(one) for one in chosen}) < len(chosen):
        raise UsageError(f"a card is named twice: {', '.join(map(str, chosen))}")
    if budgets is None:
        given: list[Size | None] = [None] * len(chosen)
    elif isinstance(budgets, (int, float, str)):
        given = [budgets] * len(chosen)
    else:
        given = list(budgets)
    if len(given) != len(chosen):
        raise UsageError(f"{len(given)} budgets for {len(chosen)} cards", hint="give one for all of them, or one each")
    cards = []
    for device, budget in zip(chosen, given, strict=True):
        free = memory(device).free if budget is None else None
        if budget is None and free is None:
            raise UsageError(f"the free memory of {device} is unknown", hint='give it: device_budget="8GB"')
        cards.append(
            Card(device, int((free or 0) * DEVICE_SHARE) if budget is None else parse_nbytes(budget, "device_budget"))
        )
    return cards


class Spread:
    """A model over several cards; `unfit` brings it back. Like `Fitted`, it lives in the model."""

    def __init__(self, model: nn.Module, found: Found, plan: SpreadPlan, handle: str) -> None:
        self.plan = plan
        self._handle = handle
        self._model = model  # in the model's own __dict__: a circle that the garbage collector knows
        self._undo: list[Undo] = []
        self._origins: list[tuple[torch.Tensor, torch.device]] = []
        cards = [card.device for card in plan.cards]
        of_unit = {unit.name: cards[plan.blocks[unit.blocks[0]]] for unit in found.units}
        try:
            self._place(model, found, cards, of_unit)
            for unit in found.units:
                self._put(unit.module, "forward", _on_card(unit.module.forward, of_unit[unit.name]))
            self._put(model, "forward", _back_home(model.forward, cards[0]))
            self._put(model, "_apply", _refuse_moving(cards))
        except BaseException:
            self._put_back(None)
            raise
        model.__dict__[handle] = self

    def _place(
        self, model: nn.Module, found: Found, cards: Sequence[torch.device], of_unit: Mapping[str, torch.device]
    ) -> None:
        for name, group in found.groups.items():
            for parameter in group.parameters:
                self._move(parameter, cards[self.plan.blocks[name]])
        for parameter in found.staying:
            self._move(parameter, cards[0])
        inside = {id(part): of_unit[unit.name] for unit in found.units for part in unit.module.modules()}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in found.moving:
                    self._buffer(module, name, buffer, inside.get(id(module), cards[0]))

    def _move(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._origins.append((tensor, tensor.device))
        bring(tensor, device)

    def _buffer(self, module: nn.Module, name: str, buffer: torch.Tensor, device: torch.device) -> None:
        home = buffer.device
        module._buffers[name] = buffer.to(device)

        def undo() -> None:
            now = module._buffers.get(name)
            module._buffers[name] = now.to(home) if now is not None else None

        self._undo.append(undo)

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        had, before = name in module.__dict__, module.__dict__.get(name)
        module.__dict__[name] = value

        def undo() -> None:
            if had:
                module.__dict__[name] = before
            else:
                module.__dict__.pop(name, None)

        self._undo.append(undo)

    def explain(self) -> str:
        return self.plan.explain()

    def unfit(self, device: str | torch.device | None = None) -> None:
        """Bring every weight back to the device it was on, or to `device`. The model then is an ordinary one."""
        self._put_back(torch.device(device) if device is not None else None)

    def _put_back(self, device: torch.device | None) -> None:
        while self._undo:
            self._undo.pop()()
        for tensor, home in self._origins:
            bring(tensor, device or home)
        self._origins.clear()
        self._model.__dict__.pop(self._handle, None)
        if device is not None:
            self._model.to(device)


def bring(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a parameter, which stays the same object. Devices of another kind of memory take a swap, as `Module.to` does."""
    if tensor.device == device:
        return
    new = tensor.data.to(device)
    if torch._has_compatible_shallow_copy_type(tensor, new):
        tensor.data = new
        return
    grad, tensor.grad = tensor.grad, None
    values = nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    try:
        torch.utils.swap_tensors(tensor, values)
    except RuntimeError as exc:
        tensor.grad = grad
        raise UsageError(
            f"a weight cannot be moved to {device} while a graph of the model still holds it",
            hint="drop the results that were computed with gradients, then try again",
        ) from exc
    tensor.grad = None if grad is None else grad.to(device)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors on this device, also within tuples, lists and dictionaries; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        changed = {key: moved(item, device) for key, item in value.items()}
        return value if all(changed[key] is item for key, item in value.items()) else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        items = [moved(item, device) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _on_card(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*moved(args, device), **moved(kwargs, device))

    return run


def _back_home(forward: Callable[..., Any], first: torch.device) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        home = first if given is None else given.device
        return moved(forward(*moved(args, first), **moved(kwargs, first)), home)

    return run


def _refuse_moving(cards: Sequence[torch.device]) -> Callable[..., Any]:
    def apply(function: Any, recurse: bool = True) -> Any:
        raise UsageError(
            f"this model is spread over {', '.join(map(str, cards))} and cannot be moved or converted as a whole",
            hint="anytorch.memory.unfit(model) first",
        )

    return apply


def spread(
    model: nn.Module,
    devices: Sequence[str | torch.device],
    budgets: Sequence[Size] | Size | None,
    *,
    blocks: Sequence[str] | None,
    reserve: int,
    handle: str,
) -> None:
    """Put a model's blocks on these cards. Raises BudgetTooSmall; the model is left as it was if anything fails."""
    cards = cards_of(devices, budgets)
    found = find_units(model, blocks=blocks)
    if not found.units:
        raise UsageError("this model has no parameters that could be moved", hint="use model.to(device)")
    sizes = {name: sum(tensor.nbytes for tensor in group.parameters) for name, group in found.groups.items()}
    cards = [Card(card.device, max(0, card.budget - reserve)) for card in cards]
    units = [(unit.name, unit.blocks) for unit in found.units]
    Spread(model, found, plan_spread(units, sizes, cards, found.extras_nbytes(model)), handle)
