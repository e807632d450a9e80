"""Weights in 8 or 4 bits as the CPU's decoder reads them: panels of 16 rows, all of a model's in one piece of memory.

They are rounded by `anytorch.quant` (`int8-g32`, `int4-sym-g32`: one scale for 32 columns, as in llama.cpp's Q8_0 and
Q4_0) and put in the order of `code/panels.h`. Rows are padded to whole panels, columns to whole groups: any shape will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytorch import large_pages
from anytorch.devices.oom import telling_out_of_memory
from anytorch.errors import InputError
from anytorch.quant.formats import parse
from anytorch.quant.tensor import QuantTensor, pack, split_codes
from anytorch.text.decoders.model import Decoder

FORMATS = {"int8": "int8-g32", "int4": "int4-sym-g32"}
ROWS, COLUMNS = 16, 32  # of a panel, of a group; mirrors code/panels.h
LINE = 64  # of a cache, in bytes
CHUNK = 1 << 22  # weights that are put in order at a time


@dataclass(frozen=True)
class Panels:
    """A packed matrix: codes uint8 [panels, groups, vectors, 16, 4], scales float16 [panels, groups, 16], times `scale`."""

    codes: Tensor
    scales: Tensor
    scale: float
    shape: tuple[int, int]

    @property
    def bits(self) -> int:
        return int(self.codes.shape[2])  # a group of 32 columns has 8 vectors of 8 bits, or 4


class PanelMemory:
    """Room for the panels of matrices of given shapes, in the order they come in, in large pages. Raises OutOfMemory."""

    def __init__(self, shapes: Iterable[Sequence[int]], weights: str) -> None:
        self.format = parse(FORMATS[weights])
        self.nbytes = sum(sum(map(_in_lines, self._nbytes(shape))) for shape in shapes)
        with telling_out_of_memory(f"packing a model's weights in {weights}", "use a smaller model or free memory"):
            room = torch.empty(self.nbytes + large_pages.NBYTES, dtype=torch.uint8)
        begin = -room.data_ptr() % large_pages.NBYTES
        self._left = room[begin : begin + self.nbytes]
        large_pages.ask(self._left.data_ptr(), self.nbytes)

    def add(self, weight: Tensor) -> Panels:
        """A matrix rounded and put in order, in the next piece of the memory. Raises InputError where it is not finite."""
        packed = pack(weight, self.format)
        shape = (packed.rows, packed.columns)
        codes_nbytes, scales_nbytes = self._nbytes(shape)
        panels, groups = -(-shape[0] // ROWS), self.format.groups(shape[1])
        codes = self._take(codes_nbytes).view(panels, groups, self.format.bits, ROWS, 4)
        scales = self._take(scales_nbytes).view(torch.float16).view(panels, groups, ROWS)
        step = max(1, CHUNK // (groups * COLUMNS * ROWS))
        for begin in range(0, panels, step):
            _arrange(packed, begin, codes[begin : begin + step], scales[begin : begin + step])
        return Panels(codes, scales, float(packed.parts["tensor_scale"]), shape)

    def _nbytes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Of a matrix's codes, and of its scales."""
        groups = -(-shape[0] // ROWS) * self.format.groups(shape[1])
        return groups * ROWS * COLUMNS * self.format.bits // 8, groups * ROWS * 2

    def _take(self, nbytes: int) -> Tensor:
        taken, self._left = self._left[:nbytes], self._left[_in_lines(nbytes) :]
        return taken


class PackedWeights:
    """The linear layers of a decoder in panels, by their names; all of its kernels read the same ones."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], weights: str) -> None:
        self._memory = PanelMemory(shapes.values(), weights)
        self._wanted = dict(shapes)
        self.by_name: dict[str, Panels] = {}

    @property
    def bits(self) -> int:
        return self._memory.format.bits

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def add(self, name: str, weight: Tensor) -> None:
        if tuple(weight.shape) != tuple(self._wanted[name]):
            raise InputError(f"{name} is {list(weight.shape)}, not {list(self._wanted[name])}")
        self.by_name[name] = self._memory.add(weight)


def linear_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """The shapes of a decoder's linear layers, the head among them, by name and in the order a token reads them."""
    return {name: tuple(one.weight.shape) for name, one in decoder.named_modules() if isinstance(one, nn.Linear)}


def unpacked(panels: Panels) -> Tensor:
    """The matrix that panels stand for, in float32 [rows, columns]."""
    count, groups = panels.codes.shape[:2]
    half = 1 << (panels.bits - 1)
    codes = panels.codes if panels.bits == 8 else torch.cat((panels.codes & 15, panels.codes >> 4), 2)
    values = (codes.float() - half).permute(0, 3, 1, 2, 4).reshape(count, ROWS, groups, COLUMNS)
    values = values * (panels.scales.float() * panels.scale).transpose(1, 2)[..., None]
    return values.reshape(count * ROWS, groups * COLUMNS)[: panels.shape[0], : panels.shape[1]].contiguous()


def rounded(x: Tensor) -> Tensor:
    """Inputs […, columns] as the kernel rounds them to 8 bits, in their own dtype: a scale for every 32."""
    groups = F.pad(x, (0, -x.shape[-1] % COLUMNS)).unflatten(-1, (-1, COLUMNS)).float()
    greatest = groups.abs().amax(-1, keepdim=True)
    # Divided by a tensor: torch takes a number's share by the reciprocal, which is rounded once more.
    inverse = torch.where(greatest > 0, torch.full_like(greatest, 127) / greatest, 0)
    whole = (groups.double() * inverse.double()).round()
    values: Tensor = (whole * (greatest / 127).double()).to(x.dtype).flatten(-2)
    return values[..., : x.shape[-1]]


def _arrange(packed: QuantTensor, begin: int, codes: Tensor, scales: Tensor) -> None:
    """Panels from `begin` on of a packed weight into their places."""
    panels, groups = codes.shape[:2]
    rows = slice(begin * ROWS, min(packed.rows, (begin + panels) * ROWS))
    missing = panels * ROWS - (rows.stop - rows.start)
    plain = split_codes(packed.parts["codes"][rows], packed.format.bits)
    if packed.format.bits == 8:
        plain = plain.view(torch.uint8) ^ 128
    plain = F.pad(plain, (0, 0, 0, missing)).view(panels, ROWS, groups, 8, 4)
    if packed.format.bits == 4:
        plain = plain[:, :, :, :4] | plain[:, :, :, 4:] << 4
    codes.copy_(plain.permute(0, 2, 3, 1, 4))
    scales.copy_(F.pad(packed.parts["scale"][rows], (0, 0, 0, missing)).view(panels, ROWS, groups).transpose(1, 2))


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
