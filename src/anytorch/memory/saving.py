"""Writing a state_dict as safetensors, tensor by tensor: never more than one tensor is in memory for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from anytorch.errors import ModelError
from anytorch.files import replace_file, replacing
from anytorch.memory.buffers import bytes_of
from anytorch.memory.images import dtype_name
from anytorch.memory.manifest import Sum
from anytorch.native.sums import SummedFile
from anytorch.safetensors_files import CODES, INDEX, SINGLE, header_bytes

PART = 64 * 2**20


def save_state(
    state: Mapping[str, torch.Tensor], folder: Path, shard_nbytes: int, sums: dict[Path, Sum] | None = None
) -> list[Path]:
    """model.safetensors, or several shards with an index. Files are complete or not there. Tied tensors are written once.

    `sums` gets the sizes and checksums of the shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unique: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        unique[name] = tensor
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in unique.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_nbytes:
            shards.append({})
        shards[-1][name] = tensor
    written, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = write_shard(folder / name, shard)
        if sums is not None:
            sums[folder / name] = made
        written.append(folder / name)
        weight_map.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in unique.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_file(folder / INDEX, json.dumps(index, indent=1).encode())
    return written


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> Sum:
    """Write one file, and return its size and checksum, added up on the way. Raises ModelError."""
    # Larger elements first keeps every tensor on a boundary of its element size, as the format's own writer does.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    layout = [(name, CODES[dtype_name(tensor.dtype)], tuple(tensor.shape), tensor.nbytes) for name, tensor in ordered]
    try:
        with replacing(path) as whole:
            file = SummedFile(whole)
            file.write(header_bytes(layout, {"format": "pt"}))
            for _, tensor in ordered:
                flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                for at in range(0, flat.numel(), PART):
                    file.write(bytes_of(flat[at : at + PART].cpu()))
        return file.nbytes, file.crc32
    except OSError as exc:
        hint = "free space there or name another folder"
        raise ModelError(f"cannot write {path}: {exc.strerror}", hint=hint) from exc
