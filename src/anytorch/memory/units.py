"""Finding what moves: the modules of a model that are used one after another, and the parameters each needs.

A *unit* is a module whose forward is a step. Repeated layers (the children of a ModuleList, Sequential or ModuleDict) are
units as wholes; outside of them every leaf module with parameters is one. Parameters that a container holds itself, and
buffers, stay on the device: they are small, and nobody says when they are used. The codes of packed layers are buffers, too,
and move as parameters do.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from anytorch.errors import UsageError
from anytorch.memory.images import Image, packed
from anytorch.quant.linear import QuantLinear
from anytorch.quant.tensor import PARTS

SMALL_PART = 0.05
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Modules that use their children's parameters without calling the children.
ATOMIC = (nn.MultiheadAttention, nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Slot:
    """One place in the module tree where a parameter hangs."""

    owner: nn.Module
    name: str  # in its owner
    path: str  # from the root: the key of state_dict


@dataclass(frozen=True)
class Unit:
    name: str
    module: nn.Module
    blocks: tuple[str, ...]


@dataclass
class Group:
    """The parameters of one block: those that the same units use."""

    name: str
    parameters: list[torch.Tensor]  # and the codes of packed layers, which are buffers
    paths: list[str]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by path."""
        return dict(zip(self.paths, self.parameters, strict=True))

    def image(self) -> Image:
        """The block as one run of bytes in memory."""
        return packed(self.name, self.tensors())


@dataclass(frozen=True)
class Found:
    units: tuple[Unit, ...]
    groups: dict[str, Group]
    staying: tuple[nn.Parameter, ...]  # parameters that stay on the device
    slots: dict[int, tuple[Slot, ...]]  # by the parameter's id

    @cached_property
    def moving(self) -> frozenset[int]:
        """The ids of everything that is in a block."""
        return frozenset(id(parameter) for group in self.groups.values() for parameter in group.parameters)

    def extras_nbytes(self, model: nn.Module) -> int:
        """What stays on the device whatever the plan: buffers, and parameters that nothing moves."""
        tensors = {id(t): t for t in (*self.staying, *model.buffers()) if id(t) not in self.moving}
        return sum(tensor.nbytes for tensor in tensors.values())

    @cached_property
    def packed_layers(self) -> dict[str, tuple[QuantLinear, ...]]:
        """Per block: the packed layers whose codes are in it. What they bound to kernels goes with the codes."""
        found: dict[str, tuple[QuantLinear, ...]] = {}
        for name, group in self.groups.items():
            owners = {slot.owner: None for p in group.parameters for slot in self.slots[id(p)]}
            found[name] = tuple(owner for owner in owners if isinstance(owner, QuantLinear))
        return found


def find_units(
    model: nn.Module,
    *,
    blocks: Sequence[str] | None = None,
    resident: Sequence[str] = (),
    finest: bool = False,
    codes: bool = True,
) -> Found:
    """The units and blocks of a model. `blocks` names the modules (patterns allowed) instead of looking for them.

    `resident` are patterns of modules that stay on the device. `finest` makes every leaf module a unit of its own, for
    budgets that cannot hold a layer. A parameter that several units use is in a block of its own, which each of them needs.
    `codes=False` leaves the codes of packed layers where they are.
    """
    slots = all_slots(model, codes=codes)
    modules = chosen_modules(model, blocks, resident, finest)
    adapters = small_trained_part(model)
    users: dict[int, list[str]] = {}
    by_id: dict[int, torch.Tensor] = {}
    for name, module in modules.items():
        for parameter in weights_of(module) if codes else module.parameters():
            if movable(parameter) and id(parameter) not in adapters:
                by_id[id(parameter)] = parameter
                users.setdefault(id(parameter), []).append(name)
    groups: dict[str, Group] = {}
    needed: dict[str, dict[str, None]] = {name: {} for name in modules}
    for key, names in users.items():
        group_name = " + ".join(names)
        group = groups.setdefault(group_name, Group(group_name, [], []))
        group.parameters.append(by_id[key])
        group.paths.append(slots[key][0].path)
        for name in names:
            needed[name][group_name] = None
    units = tuple(Unit(name, module, tuple(needed[name])) for name, module in modules.items() if needed[name])
    staying = tuple(p for p in model.parameters() if id(p) not in users)
    return Found(units, groups, staying, slots)


def weights_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a module and of those inside it, and the codes of packed layers among them."""
    yield from module.parameters()
    for part in module.modules():
        if isinstance(part, QuantLinear):
            yield from (tensor for name in PARTS if (tensor := part._buffers.get(name)) is not None)


def all_slots(model: nn.Module, *, codes: bool = False) -> dict[int, tuple[Slot, ...]]:
    """Every place of every parameter: tied weights have several. `codes`: also of the codes of packed layers."""
    found: dict[int, list[Slot]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        held: dict[str, torch.Tensor | None] = dict(module._parameters)
        if codes and isinstance(module, QuantLinear):
            held |= {name: module._buffers.get(name) for name in PARTS}
        for name, parameter in held.items():
            if parameter is not None:
                path = f"{prefix}.{name}" if prefix else name
                found.setdefault(id(parameter), []).append(Slot(module, name, path))
    return {key: tuple(slots) for key, slots in found.items()}


def small_trained_part(model: nn.Module) -> set[int]:
    """The ids of the parameters that are trained while nearly all others are frozen (LoRA): they stay on the device, so that
    a step of the optimizer does not write their whole layer anew."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.nbytes for p in weights_of(model))
    return {id(p) for p in trained} if sum(p.nbytes for p in trained) <= SMALL_PART * total else set()


def movable(parameter: torch.Tensor) -> bool:
    """Plain strided tensors move as bytes; a subclass with a layout of its own stays where it is."""
    return (
        type(parameter) in (nn.Parameter, torch.Tensor) and parameter.layout == torch.strided and parameter.nbytes > 0
    )


def chosen_modules(
    model: nn.Module, blocks: Sequence[str] | None, resident: Sequence[str], finest: bool
) -> dict[str, nn.Module]:
    chosen = _found(model, finest) if blocks is None else _named(model, blocks)
    return {name: module for name, module in chosen.items() if not any(fnmatch.fnmatch(name, p) for p in resident)}


def _found(model: nn.Module, finest: bool) -> dict[str, nn.Module]:
    """The repeated layers of a model as wholes, and every leaf module outside of them; `finest`: leaf modules alone."""
    total = sum(parameter.nbytes for parameter in weights_of(model))
    chosen: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting = [(model, "", False)]  # no recursion: a function that calls itself would keep the modules in a circle
    while waiting:
        module, name, repeated = waiting.pop()
        if id(module) in seen or not has_weights(module):
            continue
        seen.add(id(module))
        nbytes = sum(parameter.nbytes for parameter in weights_of(module))
        if is_leaf(module) or (repeated and not finest and not (nbytes > total / 2 and has_repeated(module))):
            chosen[name or type(module).__name__] = module
            continue
        children = [(key, child) for key, child in module.named_children() if has_weights(child)]
        inside = isinstance(module, CONTAINERS) and len(children) > 1
        waiting += [(child, f"{name}.{key}" if name else key, inside) for key, child in reversed(children)]
    return chosen


def is_leaf(module: nn.Module) -> bool:
    """Return True if a module's own forward uses its parameters, also if it reaches into its children for them."""
    if isinstance(module, ATOMIC) or "parametrizations" in module._modules:
        return True
    return not any(has_weights(child) for child in module.children())


def has_weights(module: nn.Module) -> bool:
    return next(weights_of(module), None) is not None


def has_repeated(module: nn.Module) -> bool:
    return any(isinstance(child, CONTAINERS) and len(child) > 1 for child in module.modules() if child is not module)


def _named(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        # "layers.*" means the layers, not also what is inside them.
        depth = pattern.count(".")
        matching = [n for n in modules if n and n.count(".") == depth and fnmatch.fnmatchcase(n, pattern)]
        if not matching:
            raise UsageError(
                f"no module is called {pattern!r}; the model has {', '.join(list(modules)[1:8])}, …",
                hint='name modules as named_modules() does, such as "model.layers.*"',
            )
        chosen |= {name: modules[name] for name in matching}
    for name in chosen:
        inside = next((other for other in chosen if other != name and name.startswith(other + ".")), None)
        if inside is not None:
            raise UsageError(f"the blocks {inside!r} and {name!r} overlap", hint="name one or the other")
    return chosen
