"""The attention of one generated row, and of full windows, by our own kernels, and the ways to divide it among programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from anytorch.forecast.decoding.decoder import Cache
from anytorch.forecast.kernels.choice import Option, Part
from anytorch.forecast.kernels.products import SMALLEST_PRODUCT, KernelLaunch, distance_from, power_of_two, waves
from anytorch.forecast.model.fused import Tables, attend_masked, turn, window_mask


@dataclass(frozen=True)
class Share:
    """How the work is divided. None of it changes what is computed beyond the order of sums."""

    splits: int  # of the rows that are looked at
    block: int  # keys at a time
    warps: int = 4
    group: int = 1  # samples that read a prompt's keys together; 0: all of them, on the matrix units
    own_block: int = 64  # keys of a sample's own at a time, where group is 0

    def __str__(self) -> str:
        together = f"{self.group} samples" if self.group else "all samples"
        return f"{together} together, {self.splits} parts, {self.block} keys, {self.warps} warps"


# The best few of two dozen on an H200, as in `products`.
MATRIX = (Share(8, 64, 4, 0), Share(4, 64, 4, 0), Share(8, 32, 4, 0), Share(8, 32, 4, 2))
ONE = (Share(16, 32, 1), Share(8, 64, 4), Share(8, 64, 2))


def candidates(samples: int, built_in: Share) -> list[Share]:
    """The ways that are worth timing, the built-in one first. Pure."""
    return list(dict.fromkeys((built_in, *(MATRIX if samples > 1 else ONE))))


class RowAttention:
    """Turns, keeps and attends: from q, k and v of one row per sample to what they found, `out` [rows, width]."""

    def __init__(self, cache: Cache, counters: Tensor, qkv: Tensor, out: Tensor, share: Share) -> None:
        self.cache, self.counters, self.qkv, self.out, self.share = cache, counters, qkv, out, share
        self.kernels: Any = import_module("anytorch.forecast.kernels.attention_source")
        self.tile = power_of_two(cache.decoder.head_width)
        self.rooms: dict[Share, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self.count = torch.zeros(1, device=cache.decoder.device, dtype=torch.int32)  # what counts parts, for compiling

    def __call__(self, layer: int) -> None:
        self.compute(layer, self.share)

    def compute(self, layer: int, share: Share) -> None:
        self.launch(layer, share, self.room(share))()

    def compile(self, share: Share) -> None:
        self.launch(0, share, (self.out, self.out, self.out, self.count)).compile()

    def launch(self, layer: int, share: Share, room: tuple[Tensor, Tensor, Tensor, Tensor]) -> KernelLaunch:
        cache, decoder = self.cache, self.cache.decoder
        cos, sin = cache.tables
        arguments = (
            *(self.qkv, cos, sin, cos.stride(0), cos.stride(1) if cache.mixed else 0),
            *(cache.keys[layer], cache.values[layer], cache.own_keys[layer], cache.own_values[layer], self.out),
            *room,
            *(self.counters, cache.lengths, cache.samples, cache.context.shape[1], cache.capacity, cache.max_context),
        )
        constants: dict[str, Any] = {
            "HEADS": decoder.heads,
            "HEAD": decoder.head_width,
            "TILE": self.tile,
            "EVICT": cache.evict,
            "BLOCK": share.block,
            "SPLITS": share.splits,
            "num_warps": share.warps,
        }
        if share.group:
            grid = (decoder.heads, self.groups(share), share.splits)
            return KernelLaunch(self.kernels.attend, grid, arguments, constants | {"GROUP": share.group})
        constants |= {"SAMPLES": self.padded(), "OWN_BLOCK": share.own_block, "PRECISION": "tf32x3"}
        grid = (decoder.heads, len(cache.lengths), share.splits + cache.samples)
        return KernelLaunch(self.kernels.attend_many, grid, arguments, constants)

    def tidy(self) -> None:
        """Free the memory that only the rejected ways needed."""
        self.rooms = {share: room for share, room in self.rooms.items() if share == self.share}

    def groups(self, share: Share) -> int:
        return len(self.cache.lengths) * -(-self.cache.samples // share.group)

    def padded(self) -> int:
        return max(SMALLEST_PRODUCT, power_of_two(self.cache.samples))

    def room(self, share: Share) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For the parts: what each found, its largest score, its sum; and how many of them have arrived."""
        if share not in self.rooms:
            cache, heads = self.cache, self.cache.decoder.heads
            series = len(cache.lengths)
            if share.group:
                states, signs = share.splits * self.groups(share) * share.group * heads, self.groups(share) * heads
            else:
                states, signs = (share.splits + 1) * series * heads * self.padded(), series * heads
            kind: Any = {"device": cache.decoder.device, "dtype": torch.float32}
            most, total = torch.empty(2, states, **kind)
            arrived = torch.zeros(signs, dtype=torch.int32, device=cache.decoder.device)
            self.rooms[share] = (torch.empty(states, self.tile, **kind), most, total, arrived)
        return self.rooms[share]


def row_part(attention: RowAttention, shares: Mapping[str, Share], heads: str) -> Part:
    """The attention as a part to choose for: in the middle of the steps, in all layers, of made-up rows.

    The built-in way is the truth: the caller compares it with torch's. What is written to the cache is written again.
    """
    cache = attention.cache
    layers = range(len(cache.own_keys))
    attention.counters[0] = cache.capacity // 2
    attention.qkv.copy_(waves(attention.qkv.shape, attention.qkv.device))

    def run(share: Share) -> Tensor:
        for layer in layers:
            attention.compute(layer, share)
        return attention.out

    options = [Option(name, partial(run, share), partial(attention.compile, share)) for name, share in shares.items()]
    # Rows in classes: forecasts of about the same length share a choice.
    shared, own = power_of_two(cache.context.shape[1]), power_of_two(cache.capacity)
    rows = f"{len(cache.lengths)}x{cache.samples} samples, up to {shared} + {own} rows"
    evicting = ", evicting" if cache.evict else ""
    error = distance_from(lambda first: first.double().clone(), Tensor.double)
    return Part(f"attention of {heads}, {rows}{evicting}", options, error, len(layers))


# --- of full windows; torch's way is built in ----------------------------------------------------------------------

Attend = Callable[[int, Tensor], Tensor]  # layer, q, k and v side by side [rows, 3 × width] → [rows, width]


@dataclass(frozen=True)
class WindowCut:
    """How our kernel divides the work."""

    block_m: int  # own rows of one program
    block_n: int  # keys at a time
    stages: int
    warps: int

    def __str__(self) -> str:
        return f"{self.block_m} rows, {self.block_n} keys, {self.stages} stages, {self.warps} warps"


CUTS = (WindowCut(32, 64, 2, 4), WindowCut(128, 64, 2, 8), WindowCut(16, 64, 2, 4))


@dataclass(frozen=True)
class WindowAttention:
    """What the attention reads: prepared keys and values [layers, windows, series, heads, shared rows, head width], the
    tables of all positions, and the counters (which window, how many own rows)."""

    keys: Tensor
    values: Tensor
    tables: Tables
    counters: Tensor
    samples: int
    own_rows: int
    max_context: int

    def attend(self, cut: WindowCut, layer: int, qkv: Tensor) -> Tensor:
        out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
        self.launch(cut, layer, qkv, out)()
        return out

    def compile(self, cut: WindowCut, qkv: Tensor) -> None:
        self.launch(cut, 0, qkv, qkv).compile()

    def launch(self, cut: WindowCut, layer: int, qkv: Tensor, out: Tensor) -> KernelLaunch:
        kernels: Any = import_module("anytorch.forecast.kernels.attention_source")
        _, _, series, heads, shared_rows, head_width = self.keys.shape
        rows = series * self.samples
        arguments = (
            *(qkv, *self.tables, self.keys[layer], self.values[layer], out, self.counters),
            *(series, self.samples, shared_rows, self.own_rows, self.max_context, 1 / math.sqrt(head_width)),
        )
        constants = {
            "HEADS": heads,
            "HEAD": head_width,
            "TILE": power_of_two(head_width),
            "BLOCK_M": cut.block_m,
            "BLOCK_N": cut.block_n,
            "STAGES": cut.stages,
            "PRECISION": "tf32x3",
            "num_warps": cut.warps,
        }
        grid = (-(-self.own_rows // cut.block_m), heads, rows)
        return KernelLaunch(kernels.attend_window, grid, arguments, constants)

    def reference(self, layer: int, qkv: Tensor) -> Tensor:
        """The first and the last sample's rows in float64 on the CPU: [2, own rows, width]."""
        _, _, series, heads, _, head_width = self.keys.shape
        window, step = self.counters.tolist()
        before = self.max_context - step

        def host(tensor: Tensor) -> Tensor:
            return tensor.cpu().double()

        own = host(qkv.view(-1, self.own_rows, qkv.shape[1])[[0, -1]])
        own = own.view(2, self.own_rows, 3, heads, head_width).permute(2, 0, 3, 1, 4)
        cos, sin = (host(table[:, :, before : before + self.own_rows]) for table in self.tables)
        q, k = turn(own[:2], (cos, sin))
        keys, values = (host(part[layer, window, [0, series - 1], :, :before]) for part in (self.keys, self.values))
        mask = window_mask(before, self.own_rows, q)
        found = attend_masked(q, (keys, values), (k, own[2]), mask)
        return found.transpose(1, 2).reshape(2, self.own_rows, -1)


def window_part(windows: WindowAttention, by_torch: Attend, layers: int) -> tuple[Part, dict[str, WindowCut | None]]:
    """The part to choose for, timed in some layers, and its ways by name (None: torch's)."""
    _, _, series, heads, shared_rows, head_width = windows.keys.shape
    qkv = waves(torch.Size((series * windows.samples * windows.own_rows, 3 * heads * head_width)), windows.keys.device)

    def run(attend: Attend) -> Tensor:
        for layer in range(layers):
            found = attend(layer, qkv)
        return found

    options = [
        Option("torch", partial(run, by_torch)),
        *(
            Option(str(cut), partial(run, partial(windows.attend, cut)), partial(windows.compile, cut, qkv))
            for cut in CUTS
        ),
    ]
    shared, own = power_of_two(shared_rows), power_of_two(windows.own_rows)
    rows = f"{series}x{windows.samples} windows, up to {shared} + {own} rows"
    error = distance_from(
        lambda _: windows.reference(layers - 1, qkv),
        lambda found: found.view(-1, windows.own_rows, found.shape[1])[[0, -1]].cpu().double(),
    )
    name = f"attention of {heads} heads of {head_width}, full: {rows}"
    return Part(name, options, error, layers), {"torch": None, **{str(cut): cut for cut in CUTS}}
