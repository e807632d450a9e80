"""The attention of one generated row by our own kernels, and the ways to divide it among programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from anytorch.forecast.decoding.cache import Cache
from anytorch.forecast.kernels.choice import Option, Part
from anytorch.forecast.kernels.product_parts import waves
from anytorch.forecast.kernels.products import SMALLEST_PRODUCT, power_of_two


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


class Attention:
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
        kernel, grid, arguments, constants = self.launch(layer, share, self.room(share))
        kernel[grid](*arguments, **constants)

    def compile(self, share: Share) -> None:
        """Have the kernel ready, without running it. Takes no memory: somebody may be recording meanwhile."""
        kernel, grid, arguments, constants = self.launch(0, share, (self.out, self.out, self.out, self.count))
        kernel.warmup(*arguments, grid=grid, **constants)

    def launch(
        self, layer: int, share: Share, room: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
        cache, decoder = self.cache, self.cache.decoder
        series = len(cache.lengths)
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
            return self.kernels.attend, grid, arguments, constants | {"GROUP": share.group}
        own = {"SAMPLES": self.padded(), "OWN_BLOCK": share.own_block, "PRECISION": "tf32x3"}
        return (
            self.kernels.attend_many,
            (decoder.heads, series, share.splits + cache.samples),
            arguments,
            constants | own,
        )

    def tidy(self) -> None:
        """Give back what only the ways that were not chosen needed."""
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


def part_of(attention: Attention, shares: Mapping[str, Share], heads: str) -> Part:
    """The attention as a part to choose for: in the middle of the steps, in all layers, of made-up rows.

    The built-in way is the truth: the caller compares it with torch's. What is written to the cache is written again.
    """
    cache = attention.cache
    layers = range(len(cache.own_keys))
    truth: list[Tensor] = []
    attention.counters[0] = cache.capacity // 2
    attention.qkv.copy_(waves(attention.qkv.shape, attention.qkv.device))

    def run(share: Share) -> Tensor:
        for layer in layers:
            attention.compute(layer, share)
        return attention.out

    def error(found: Tensor) -> float:
        if not truth:
            truth.append(found.double().clone())
        return float((found.double() - truth[0]).norm() / truth[0].norm().clamp(min=1e-30))

    options = [Option(name, partial(run, share), partial(attention.compile, share)) for name, share in shares.items()]
    # Rows in classes: forecasts of about the same length share a choice.
    shared, own = power_of_two(cache.context.shape[1]), power_of_two(cache.capacity)
    rows = f"{len(cache.lengths)}x{cache.samples} samples, up to {shared} + {own} rows"
    evicting = ", evicting" if cache.evict else ""
    return Part(f"attention of {heads}, {rows}{evicting}", options, error, len(layers))
