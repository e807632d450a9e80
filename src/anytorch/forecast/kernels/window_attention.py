"""The attention of full windows by our own kernel, as one of the ways to choose from (torch's is built in)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from anytorch.forecast.kernels.choice import Option, Part
from anytorch.forecast.kernels.product_parts import waves
from anytorch.forecast.kernels.products import power_of_two
from anytorch.forecast.model.fused import Tables, attend_masked, turn, window_mask

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
class Windows:
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
        kernel, grid, arguments, constants = self.launch(cut, layer, qkv, out)
        kernel[grid](*arguments, **constants)
        return out

    def compile(self, cut: WindowCut, qkv: Tensor) -> None:
        """Have the kernel ready, without running it. Takes no memory: somebody may be recording meanwhile."""
        kernel, grid, arguments, constants = self.launch(cut, 0, qkv, qkv)
        kernel.warmup(*arguments, grid=grid, **constants)

    def launch(
        self, cut: WindowCut, layer: int, qkv: Tensor, out: Tensor
    ) -> tuple[Any, tuple[int, int, int], tuple[Any, ...], Any]:
        kernels: Any = import_module("anytorch.forecast.kernels.window_attention_source")
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
        return kernels.attend_window, (-(-self.own_rows // cut.block_m), heads, rows), arguments, constants

    def made_up(self) -> Tensor:
        _, _, series, heads, _, head_width = self.keys.shape
        shape = torch.Size((series * self.samples * self.own_rows, 3 * heads * head_width))
        return waves(shape, self.keys.device)

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


def part_of(windows: Windows, by_torch: Attend, layers: int) -> tuple[Part, dict[str, WindowCut | None]]:
    """The part to choose for, timed in some layers, and its ways by name (None: torch's)."""
    qkv = windows.made_up()
    truth: list[Tensor] = []

    def run(attend: Attend) -> Tensor:
        for layer in range(layers):
            found = attend(layer, qkv)
        return found

    def error(found: Tensor) -> float:
        if not truth:
            truth.append(windows.reference(layers - 1, qkv))
        there = found.view(-1, windows.own_rows, found.shape[1])[[0, -1]].cpu().double()
        return float((there - truth[0]).norm() / truth[0].norm().clamp(min=1e-30))

    options = [Option("torch", partial(run, by_torch))]
    ways: dict[str, WindowCut | None] = {"torch": None}
    for cut in CUTS:
        ways[str(cut)] = cut
        compile_it = partial(windows.compile, cut, qkv)
        options.append(Option(str(cut), partial(run, partial(windows.attend, cut)), compile_it))
    _, _, series, heads, shared_rows, head_width = windows.keys.shape
    rows = (
        f"{series}x{windows.samples} windows, up to {power_of_two(shared_rows)} + {power_of_two(windows.own_rows)} rows"
    )
    return Part(f"attention of {heads} heads of {head_width}, full: {rows}", options, error, layers), ways
