"""Moving a model's blocks to their homes, from memory or from the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from anytorch.memory.buffers import scatter
from anytorch.memory.formats import pack_block
from anytorch.memory.handle import Fitted
from anytorch.memory.images import Image, from_files, packed, views_of
from anytorch.memory.planning import packed_image
from anytorch.memory.spill import Spill

Tensors = Mapping[str, torch.Tensor]


def place(handle: Fitted) -> None:
    """Move every block to its home. On any failure everything is put back, then the failure is raised."""
    try:
        handle.open({name: packed_image(handle.found, name) for name in handle.found.groups})
        for name in handle.found.groups:
            _place_block(handle, name)
        handle.start()
    except BaseException:
        handle.put_back()
        raise


def place_from(handle: Fitted, images: dict[str, Image]) -> None:
    """The same for a model whose weights are in files: what lives in memory is read, the rest stays where it is."""
    try:
        handle.open(images)
        for name in handle.found.groups:
            _place_file(handle, name)
        handle.start()
    except BaseException:
        handle.close()
        raise


def _place_block(handle: Fitted, name: str) -> None:
    group = handle.found.groups[name]
    if handle.plan.homes[name] == "device":
        handle.ledger.reserve("device", f"block {name}", handle.images[name].nbytes)
        for parameter in group.parameters:
            parameter.data = parameter.data.to(handle.device)
        return
    stored = {path: parameter.detach() for path, parameter in zip(group.paths, group.parameters, strict=True)}
    if name in handle.packings:
        stored = pack_block(handle.packings[name], stored)
    _put(handle, name, stored)


def _place_file(handle: Fitted, name: str) -> None:
    group, home, rest = handle.found.groups[name], handle.plan.homes[name], handle.rest
    if name in handle.packings:
        _put(handle, name, pack_block(handle.packings[name], _read_whole(handle, name)))
    elif home == "device":
        buffer = rest.add_resident(name)
        rest.load(name, buffer)
        views = views_of(handle.images[name], buffer)
        for path, parameter in zip(group.paths, group.parameters, strict=True):
            parameter.data = views[path]
    else:
        if home == "host":
            rest.load_host(name)
        handle.park(name)


def _put(handle: Fitted, name: str, stored: Tensors) -> None:
    """Store a block at its home below the device, then let go of the first copy: only now there is a second one."""
    if handle.plan.homes[name] == "host":
        image = handle.images[name] = packed(name, stored)
        pieces = handle.rest.add_host(name)
        for view in image.views:
            flat = stored[view.name].cpu().contiguous().view(-1).view(torch.uint8)
            scatter(flat, pieces, view.offset)
    else:
        _write(handle, name, stored)
    handle.park(name)


def _write(handle: Fitted, name: str, tensors: Tensors) -> None:
    """Write a block to a file of our own and remember where it is."""
    disk = handle.tiers.find("disk")
    assert disk is not None
    if handle.spill is None:
        handle.spill = Spill(disk.place)
    handle.ledger.reserve("disk", f"block {name}", sum(tensor.nbytes for tensor in tensors.values()))
    try:
        located = handle.spill.write({path: tensor.detach().cpu() for path, tensor in tensors.items()})
    except BaseException:
        handle.ledger.release("disk", f"block {name}")
        raise
    handle.images[name] = from_files(name, located.values(), in_place=handle.tiers.shared)


def _read_whole(handle: Fitted, name: str) -> Tensors:
    """A block's tensors from its files before they are packed, in the memory that they will be unpacked to later."""
    assert handle.live is not None
    live = handle.packings[name].live
    target = {view.name: handle.live[view.offset : view.offset + view.nbytes] for view in live.views}
    for chunk, wanted in handle.rest.chunks(name):
        for view in handle.images[name].views:
            begin = max(view.offset, chunk.image_offset)
            end = min(view.offset + view.nbytes, chunk.image_offset + chunk.nbytes)
            if begin < end:
                part = wanted[begin - chunk.image_offset : end - chunk.image_offset]
                target[view.name][begin - view.offset : end - view.offset].copy_(part)
    return views_of(live, handle.live[: live.nbytes])
