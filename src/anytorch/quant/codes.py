"""Joining small codes into bytes and taking them apart again. The first column sits in the lowest bits."""

from __future__ import annotations

import torch

PACKED = {8: torch.int8, 4: torch.uint8, 2: torch.uint8}


def join_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """rows × columns of uint8 codes below 2^bits (8 bits: int8) → rows × bytes."""
    if bits == 8:
        return codes.to(torch.int8).contiguous()
    parts = codes.to(torch.uint8).reshape(codes.shape[0], -1, 8 // bits).unbind(-1)
    joined: torch.Tensor = parts[0]
    for place, part in enumerate(parts[1:], 1):
        joined = joined | (part << (bits * place))
    return joined.contiguous()


def split_codes(joined: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return joined
    mask = (1 << bits) - 1
    return torch.stack([(joined >> (bits * place)) & mask for place in range(8 // bits)], dim=-1).flatten(1)
