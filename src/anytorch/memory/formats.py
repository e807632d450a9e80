"""Weights that rest in fewer bits: packed when a block is put at its home, unpacked on the device before each use.

Only the matrices of linear layers are packed; embeddings, norms and biases rest as they are. It is lossy, and asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from anytorch.memory.images import Image
from anytorch.memory.sizes import ALIGNMENT, PAGE, round_up
from anytorch.memory.units import Found
from anytorch.quant.formats import Format, parse
from anytorch.quant.tensor import PARTS, QuantTensor, expected_parts, pack, unpack

LEAST_ELEMENTS = 4096  # below that there is nothing to save
# Elements unpacked in one go: bounds the temporary memory on the device. What fits a CPU's caches is unpacked several times
# as fast there (4096 × 2048 int4: 59 ms and 75 MiB by 4 Mi elements, 13 ms and 6 MiB by 256 Ki); a GPU wants few launches.
AT_ONCE, AT_ONCE_ON_CPU = 4 * 2**20, 2**18
SEPARATOR = "::"  # between a weight's path and the name of its part


@dataclass(frozen=True)
class Packing:
    """How one block rests: which of its tensors are packed, and the image they are unpacked to."""

    format: Format
    live: Image
    weights: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # path → shape and dtype of what it stands for


def packing_of(found: Found, name: str, format: str) -> Packing | None:
    """None if the block has nothing that can be packed."""
    group = found.groups[name]
    chosen = parse(format)
    weights = {
        path: (tuple(parameter.shape), parameter.dtype)
        for path, parameter in group.tensors().items()
        if packable(found, parameter)
    }
    if not weights:
        return None
    return Packing(chosen, group.image(), weights)


def unpacked_nbytes(found: Found, format: str) -> int:
    """Device memory that the packed blocks of one unit are unpacked to: the largest unit's."""
    packings = {name: packing_of(found, name, format) for name in found.groups}
    return max(sum(p.live.nbytes for name in unit.blocks if (p := packings[name])) for unit in found.units)


def packable(found: Found, parameter: torch.Tensor) -> bool:
    owners = [slot.owner for slot in found.slots[id(parameter)]]
    return (
        parameter.ndim == 2
        and parameter.is_floating_point()
        and parameter.numel() >= LEAST_ELEMENTS
        and all(isinstance(owner, nn.Linear) for owner in owners)
    )


def resting_nbytes(packing: Packing) -> int:
    """The length of the packed image, without packing anything."""
    end = 0
    for view in packing.live.views:
        if view.name in packing.weights:
            sizes = [
                torch.Size(shape).numel() * dtype.itemsize
                for shape, dtype in expected_parts(packing.format, view.shape).values()
            ]
        else:
            sizes = [view.nbytes]
        for size in sizes:
            end = round_up(end, ALIGNMENT) + size
    return round_up(end, PAGE)


def pack_block(packing: Packing, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is stored: parts under "path::part", other tensors under their path."""
    stored: dict[str, torch.Tensor] = {}
    for path, tensor in tensors.items():
        if path not in packing.weights:
            stored[path] = tensor
            continue
        quantized = pack(tensor.detach(), packing.format)
        for part in PARTS:
            if part in quantized.parts:
                stored[f"{path}{SEPARATOR}{part}"] = quantized.parts[part].contiguous()
    return stored


def unpack_block(packing: Packing, stored: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """From stored tensors on a device to the weights there, some rows at a time."""
    for path, target in targets.items():
        if path not in packing.weights:
            target.copy_(stored[path])
            continue
        parts = {part: stored[key] for part in PARTS if (key := f"{path}{SEPARATOR}{part}") in stored}
        rows, columns = target.shape
        step = max(1, (AT_ONCE_ON_CPU if target.device.type == "cpu" else AT_ONCE) // columns)
        for row in range(0, rows, step):
            end = min(rows, row + step)
            some = {name: part if part.ndim == 0 else part[row:end] for name, part in parts.items()}
            target[row:end].copy_(unpack(QuantTensor(packing.format, (end - row, columns), target.dtype, some)))


def whole_tensors(packing: Packing, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights a block stands for, in memory of their own: for state_dict and unfit."""
    device = next(iter(stored.values())).device
    found = {
        view.name: torch.empty(view.shape, dtype=getattr(torch, view.dtype), device=device)
        for view in packing.live.views
    }
    unpack_block(packing, stored, found)
    return found
