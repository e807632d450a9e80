"""Weights in 8 or 4 bits as the CUDA kernel reads them: every row by itself, in parts that fit into a slot.

They are rounded by `anytorch.quant` to the formats of `panels.FORMATS`: one float16 scale for 32 columns. `Rows` in
`code/decode.cu` says how a row lies; `row_of` is the same in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytorch.devices.oom import telling_out_of_memory
from anytorch.errors import UsageError
from anytorch.quant.formats import parse
from anytorch.quant.tensor import pack, split_codes
from anytorch.text.decoders.model import Decoder
from anytorch.text.persistent.joined import in_one
from anytorch.text.persistent.panels import COLUMNS, FORMATS

SLOT = 4096  # bytes; CHUNK of the source
AT_A_TIME = 1 << 26  # weights whose codes are put in order at once


@dataclass(frozen=True)
class PackedRow:
    """How a row of so many columns lies in memory: `parts` of `groups` groups each, codes first, then scales."""

    columns: int
    bits: int
    parts: int
    groups: int

    @property
    def codes_nbytes(self) -> int:
        """Of one part."""
        return self.groups * COLUMNS * self.bits // 8

    @property
    def part_nbytes(self) -> int:
        return _packed_nbytes(self.groups, self.bits)

    @property
    def nbytes(self) -> int:
        return self.parts * self.part_nbytes


def _packed_nbytes(groups: int, bits: int) -> int:
    return groups * COLUMNS * bits // 8 + -(-2 * groups // 16) * 16


@lru_cache(maxsize=64)
def row_of(columns: int, bits: int) -> PackedRow:
    """The fewest parts that fit into a slot each."""
    groups, parts = -(-columns // COLUMNS), 1
    while _packed_nbytes(-(-groups // parts), bits) > SLOT:
        parts += 1
    return PackedRow(columns, bits, parts, -(-groups // parts))


def input_nbytes(columns: int, bits: int) -> int:
    """Bytes of shared memory that a vector takes which such rows are multiplied with."""
    if bits == 16:
        return 2 * columns
    row = row_of(columns, bits)
    return row.parts * row.groups * (COLUMNS + 8)


def phases(layer: nn.Module) -> dict[str, list[nn.Linear]]:
    """The linear layers of each of a layer's phases, which lie in one matrix; those of "gate_up" row by row in turns."""
    own: Any = layer.self_attn
    mlp: Any = layer.mlp
    return {
        "qkv": [own.q_proj, own.k_proj, own.v_proj],
        "out": [own.o_proj],
        "gate_up": [mlp.gate_proj, mlp.up_proj],
        "down": [mlp.down_proj],
    }


class PackedDecoder:
    """A packed copy of a decoder's linear layers: by "number.phase" and "head", rows as uint8 and the scale of them all.

    Raises InputError where weights are not finite, OutOfMemory where there is no room.
    """

    def __init__(self, decoder: Decoder, weights: str) -> None:
        if weights not in FORMATS:
            raise UsageError(f"weights={weights!r} is unknown; use {', '.join(map(repr, FORMATS))} or None")
        self.weights, self.bits = weights, parse(FORMATS[weights]).bits
        self.matrices: dict[str, tuple[Tensor, float]] = {}
        with telling_out_of_memory(f"packing a model's weights in {weights}", "use a smaller model or free memory"):
            for number, layer in enumerate(decoder.model.layers):
                for name, layers in phases(layer).items():
                    whole = in_one([one.weight.detach() for one in layers], in_turns=name == "gate_up")
                    self.matrices[f"{number}.{name}"] = packed_rows(whole, weights)
            self.matrices["head"] = packed_rows(decoder.lm_head.weight.detach(), weights)

    @torch.no_grad()
    def lend(self, decoder: Decoder) -> None:
        """Give a decoder the numbers that its packed weights stand for, in its own dtype: whoever reads these (prompts,
        several texts at once) then computes with the same model. A head that shares the words' weights gets its own."""
        for number, layer in enumerate(decoder.model.layers):
            for name, layers in phases(layer).items():
                whole = self._unpacked(f"{number}.{name}", layers[0].in_features)
                sizes = [one.out_features for one in layers]
                parts = whole.unflatten(0, (-1, 2)).unbind(1) if name == "gate_up" else whole.split(sizes)
                for one, part in zip(layers, parts, strict=True):
                    one.weight.data.copy_(part)
        head = decoder.lm_head
        rounded = self._unpacked("head", head.in_features).to(head.weight.dtype)
        head.weight = nn.Parameter(rounded, requires_grad=False)

    def _unpacked(self, name: str, columns: int) -> Tensor:
        rows, scale = self.matrices[name]
        row, made = row_of(columns, self.bits), []
        step = max(1, AT_A_TIME // columns)
        for begin in range(0, len(rows), step):
            made.append(unpacked_rows(rows[begin : begin + step], scale, row))
        return torch.cat(made)

    @property
    def nbytes(self) -> int:
        """What one token reads."""
        return sum(rows.nbytes for rows, _ in self.matrices.values())


def packed_rows(weight: Tensor, weights: str) -> tuple[Tensor, float]:
    """A matrix rounded and laid out, uint8 [rows, bytes of one], and the scale that all its products have."""
    packed = pack(weight, FORMATS[weights])
    row = row_of(weight.shape[1], packed.format.bits)
    made = torch.empty(len(weight), row.nbytes, dtype=torch.uint8, device=weight.device)
    step = max(1, AT_A_TIME // weight.shape[1])
    for begin in range(0, len(weight), step):
        some = slice(begin, begin + step)
        codes = split_codes(packed.parts["codes"][some], packed.format.bits).view(torch.uint8)
        _put(row, codes, packed.parts["scale"][some], made[some])
    return made, float(packed.parts["tensor_scale"])


def _put(row: PackedRow, codes: Tensor, scales: Tensor, into: Tensor) -> None:
    count, groups = len(codes), row.parts * row.groups
    empty = 8 if row.bits == 4 else 0  # the code of 0
    every = F.pad(codes, (0, groups * COLUMNS - codes.shape[1]), value=empty).view(count, row.parts, row.groups, 2, 16)
    if row.bits == 4:
        plain = every[:, :, :, 0] | every[:, :, :, 1] << 4
    else:
        plain = every.transpose(2, 3)
    parts = into.view(count, row.parts, row.part_nbytes)
    parts[:, :, : row.codes_nbytes] = plain.reshape(count, row.parts, row.codes_nbytes)
    halves = F.pad(scales.view(count, -1), (0, groups - scales.numel() // count)).view(count, row.parts, row.groups)
    room = (row.part_nbytes - row.codes_nbytes) // 2
    parts[:, :, row.codes_nbytes :] = F.pad(halves, (0, room - row.groups)).contiguous().view(torch.uint8)


def unpacked_rows(rows: Tensor, scale: float, row: PackedRow) -> Tensor:
    """The matrix that packed rows stand for, float32 [rows, columns]."""
    parts = rows.view(len(rows), row.parts, row.part_nbytes)
    plain = parts[:, :, : row.codes_nbytes]
    if row.bits == 4:
        plain = plain.reshape(len(rows), row.parts, row.groups, 1, 16)
        values = torch.cat((plain & 15, plain >> 4), 3).float() - 8
    else:
        plain = plain.reshape(len(rows), row.parts, 2, row.groups, 16).transpose(2, 3)
        values = plain.contiguous().view(torch.int8).float()
    halves = parts[:, :, row.codes_nbytes :].contiguous().view(torch.float16)[:, :, : row.groups]
    values = values.reshape(len(rows), row.parts, row.groups, COLUMNS) * (halves.float() * scale)[..., None]
    return values.reshape(len(rows), -1)[:, : row.columns].contiguous()
