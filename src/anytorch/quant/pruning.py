"""Taking weights away: single ones (they become zero and stay zero in training) or whole neurons (layers get smaller)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from anytorch.errors import UsageError
from anytorch.quant.model import Skip, linear_targets, replace_module
from anytorch.quant.tensor import linear_of

MASK = "pruning_mask"  # a buffer beside the weight, until `finish_pruning`


def prune(
    model: nn.Module,
    amount: float,
    *,
    pattern: Literal["global", "layer", "2:4"] = "global",
    skip: Skip | Iterable[Skip] = (),
) -> dict[str, float]:
    """Set the smallest weights of the linear layers to zero, in place, and keep them there while the model trains.

    "global" compares weights across layers (each relative to its layer's size), "layer" takes the same share of each,
    "2:4" leaves the two largest of every four neighbours, which NVIDIA's sparse tensor cores need. Returns each layer's
    share of zeros. `finish_pruning` ends the keeping.
    """
    if not 0 <= amount < 1:
        raise UsageError(f"amount={amount} is invalid: the share of weights to remove must be from 0 to below 1")
    if pattern == "2:4" and amount != 0.5:
        raise UsageError(f"amount={amount} is invalid: the pattern 2:4 removes exactly half", hint="use amount=0.5")
    layers, _ = linear_targets(model, skip)
    masks = _masks(layers, amount, pattern)
    shares = {}
    for name, mask in masks.items():
        layer = layers[name]
        before = getattr(layer, MASK, None)
        if before is not None:
            mask = mask & before
        layer.register_buffer(MASK, mask, persistent=False)
        with torch.no_grad():
            layer.weight.mul_(mask)
        if before is None:
            layer.weight.register_hook(_masked(layer))
            layer.register_forward_pre_hook(_hold)
        shares[name] = 1.0 - float(mask.float().mean())
    return shares


def _masks(layers: dict[str, nn.Linear], amount: float, pattern: str) -> dict[str, torch.Tensor]:
    sizes = {name: layer.weight.detach().abs().float() for name, layer in layers.items()}
    if pattern == "2:4":
        return {name: _two_of_four(name, size) for name, size in sizes.items()}
    if pattern == "layer":
        return {name: size > _limit(size.flatten(), amount) for name, size in sizes.items()}
    # Layers differ in scale: what is small for a layer is measured against its own root mean square.
    sizes = {name: size / size.square().mean().sqrt().clamp(min=1e-30) for name, size in sizes.items()}
    limit = _limit(torch.cat([size.flatten() for size in sizes.values()]), amount)
    return {name: size > limit for name, size in sizes.items()}


def _limit(sizes: torch.Tensor, amount: float) -> torch.Tensor:
    count = int(amount * sizes.numel())
    return sizes.new_tensor(-1.0) if count == 0 else sizes.kthvalue(count).values


def _two_of_four(name: str, size: torch.Tensor) -> torch.Tensor:
    if size.shape[1] % 4:
        raise UsageError(f"{name} has {size.shape[1]} input features; 2:4 needs a multiple of 4", hint="skip it")
    fours = size.reshape(size.shape[0], -1, 4)
    mask = torch.zeros_like(fours, dtype=torch.bool)
    mask.scatter_(2, fours.topk(2, dim=2).indices, True)
    return mask.reshape(size.shape)


def _masked(layer: nn.Module) -> object:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        mask = getattr(layer, MASK, None)
        return gradient if mask is None else gradient * mask

    return hook


def _hold(layer: nn.Module, _inputs: object) -> None:
    """Weight decay and momentum move weights whose gradient is zero: put them back before they are used."""
    mask = getattr(layer, MASK, None)
    if mask is not None and isinstance(layer, nn.Linear):
        with torch.no_grad():
            layer.weight.mul_(mask)


def finish_pruning(model: nn.Module) -> int:
    """Forget the masks; the zeros stay, as ordinary weights. Returns how many layers had one."""
    count = 0
    for module in model.modules():
        mask = getattr(module, MASK, None)
        if mask is not None and isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(mask)
            delattr(module, MASK)
            count += 1
    return count


def sparsity(model: nn.Module) -> float:
    """The share of zeros among the weights of linear layers."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    total = sum(weight.numel() for weight in weights)
    return sum(int((weight == 0).sum()) for weight in weights) / total if total else 0.0


def prune_neurons(model: nn.Module, pairs: Sequence[tuple[str, str]], amount: float) -> dict[str, int]:
    """Make layers smaller: for each pair (first, second) of layers with only an elementwise function between them, take
    away the share `amount` of the neurons that matter least. Returns how many neurons each first layer keeps.

    A neuron matters as much as its incoming weights times its outgoing ones.
    """
    if not 0 <= amount < 1:
        raise UsageError(f"amount={amount} is invalid: the share of neurons to remove must be from 0 to below 1")
    kept = {}
    for first_name, second_name in pairs:
        first, second = model.get_submodule(first_name), model.get_submodule(second_name)
        if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
            raise UsageError(f"{first_name} and {second_name} must both be linear layers")
        if first.out_features != second.in_features:
            raise UsageError(
                f"{first_name} gives {first.out_features} features and {second_name} takes {second.in_features}: "
                "the two numbers must be equal"
            )
        worth = first.weight.detach().float().norm(dim=1) * second.weight.detach().float().norm(dim=0)
        count = max(1, round(first.out_features * (1 - amount)))
        keep = worth.topk(count).indices.sort().values
        replace_module(model, first_name, _smaller(first, keep, dim=0))
        replace_module(model, second_name, _smaller(second, keep, dim=1))
        kept[first_name] = count
    return kept


def _smaller(layer: nn.Linear, keep: torch.Tensor, dim: int) -> nn.Linear:
    weight = layer.weight.detach().index_select(dim, keep)
    bias = None if layer.bias is None else layer.bias.detach().clone()
    return linear_of(weight, bias[keep] if bias is not None and dim == 0 else bias, training=layer.training)
