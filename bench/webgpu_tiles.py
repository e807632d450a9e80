"""What holds back half-precision products on matrix cores: tiles and variants of the kernel, launched directly.

    python bench/webgpu_tiles.py [--sizes 1024,4096,8192] [--only ahead] [--output bench/results/webgpu-tiles-h200.json]

Square products of float16, sums in float32. Every variant is checked against float64 on a product of 512 first and timed in
turns with torch's own call, without CUDA in between: its products at full power lower the clock that ours then have.
Variants:

    as it is    the kernel that torch's products race (`gpu.spirv.matmul`)
    ahead       tiles travel in registers for two steps in place of one: twice the time for memory to answer
    unshared    matrices are read from memory by each subgroup, through no workgroup memory, with no barriers

and two that compute something else, to see what time goes where; they are not checked:

    one tile    every step multiplies the first tile again: nothing is read from memory (the rest of the kernel's time)
    no sums     tiles travel and are not multiplied (what travelling costs)

A tile that a device has no room for is left out, with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_results
from webgpu_gpu import Settings, checked, interleaved

import anytorch.webgpu  # noqa: F401  (registers the device)
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.spirv import matmul as spirv
from anytorch.gpu.spirv.matmul import EIGHT, Product, Tile, Writer
from anytorch.gpu.spirv.module import COLUMN_MAJOR, ROW_MAJOR, STORAGE_BUFFER, Value
from anytorch.webgpu import matrix_products
from anytorch.webgpu.matrix_products import MatrixTiling
from anytorch.webgpu.products import Geometry, _operand

MORE_TILES = (
    Tile(128, 128, 64, 2, 2, buffers=1),
    Tile(128, 128, 16, 2, 2, buffers=1),
    Tile(128, 128, 32, 2, 2),
    Tile(256, 128, 32, 4, 2, buffers=1),
    Tile(128, 256, 32, 2, 4, buffers=1),
    Tile(256, 64, 32, 4, 1, buffers=1),
)
SMALL_TILES = (Tile(32, 32, 32, 2, 2, buffers=1),)  # a CPU's compiler takes minutes over the others
CHECKED = 512


class Ahead(Writer):
    """Two steps are under way in registers, for one buffer in workgroup memory."""

    def _sum(self) -> None:
        module, tile, nowhere = self.module, self.tile, self.module.constant(0)
        self.reads = {name: self._reads(name) for name in "ab"}
        self._start_sums()
        second = (self.first + tile.bk).minimum(self.last)
        kept = [
            {name: [module.local(self.quad, value) for value in self._fetch(name, k0)] for name in "ab"}
            for k0 in (self.first, second)
        ]
        with module.loop(self.first, self.end, 2 * tile.bk) as k0:
            self._step(kept[0], (k0 + 2 * tile.bk).minimum(self.last), nowhere)
            with module.when(k0 + tile.bk < self.end):
                self._step(kept[1], (k0 + 3 * tile.bk).minimum(self.last), nowhere)

    def _step(self, kept: dict[str, list[Value]], following: Value, nowhere: Value) -> None:
        module = self.module
        self._put({name: [module.get(one) for one in values] for name, values in kept.items()}, nowhere)
        module.barrier()
        for name in "ab":
            for variable, value in zip(kept[name], self._fetch(name, following), strict=True):
                module.put(variable, value)
        self._multiply(nowhere)
        module.barrier()


class Unshared(Writer):
    """Matrices straight from the operands' buffers. For whole tiles of whole products alone."""

    def _sum(self) -> None:
        module, tile, shape = self.module, self.tile, self.shape
        self._start_sums()
        m0 = self.m0 + self.warp_m * (tile.bm // tile.wm)
        n0 = self.n0 + self.warp_n * (tile.bn // tile.wn)
        with module.loop(self.first, self.end, tile.bk) as k0:
            for k in range(0, tile.bk, shape.k):
                left = [self._matrix("a", m0 + i * shape.m, k0 + k) for i in range(self.rows)]
                right = [self._matrix("b", n0 + j * shape.n, k0 + k) for j in range(self.columns)]
                for i, a in enumerate(left):
                    for j, b in enumerate(right):
                        module.put(self.sums[i][j], module.multiply_add(a, b, module.get(self.sums[i][j])))

    def _matrix(self, name: str, line: Value, k: Value) -> Value:
        module, p = self.module, self.p
        buffer, kind = (self.a, self.a_type) if name == "a" else (self.b, self.b_type)
        along_k = (self.kernel.a_along if name == "a" else self.kernel.b_along) == "k"
        step = p[f"{name}_step"] // EIGHT
        base = p[f"{name}_at"] // EIGHT + self.batch * (p[f"{name}_batch"] // EIGHT)
        index = base + (line * step + k // EIGHT if along_k else k * step + line // EIGHT)
        order = ROW_MAJOR if along_k == (name == "a") else COLUMN_MAJOR
        place = module.op(65, module.pointer(STORAGE_BUFFER, buffer.type), buffer, module.constant(0), index)
        return module.op(4457, kind, place, module.constant(order), step)


class OneTile(Writer):
    def _fetch(self, name: str, k0: Value) -> list[Value]:
        if not hasattr(self, "_once"):
            self._once: dict[str, list[Value]] = {}
        if name not in self._once:
            self._once[name] = super()._fetch(name, self.first)
        return self._once[name]


class NoSums(Writer):
    def _multiply(self, stage: Value) -> None:
        return None


VARIANTS: dict[str, type[Writer]] = {
    "as it is": Writer,
    "ahead": Ahead,
    "unshared": Unshared,
    "one tile": OneTile,
    "no sums": NoSums,
}
UNCHECKED = ("one tile", "no sums")


@dataclass(frozen=True)
class Contender:
    variant: str
    tile: Tile

    @property
    def name(self) -> str:
        return f"{self.variant}, {self.tile.name.removeprefix('matrix cores ')}"


def kernel_of(variant: str) -> type[Product]:
    """A kernel's name is the key of its program: one class for each variant."""
    return type(f"Product of {variant}", (Product,), {})


KERNELS = {variant: kernel_of(variant) for variant in VARIANTS}
BY_KERNEL = {kernel: VARIANTS[variant] for variant, kernel in KERNELS.items()}


def launched(contender: Contender, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], None]:
    """A launch of c = a @ b."""
    left, right, result = (_operand(one.unsqueeze(0)) for one in (a, b, c))
    geometry = Geometry(1, a.shape[0], b.shape[1], a.shape[1], left, right, result, None, "")
    spirv.Product = KERNELS[contender.variant]  # type: ignore[misc]
    try:
        plan, beside = matrix_products.plan(open_runtime(), geometry, MatrixTiling(contender.tile))
    finally:
        spirv.Product = Product  # type: ignore[misc]
    assert not beside
    return partial(plan, (a.data_ptr(), b.data_ptr(), c.data_ptr()), 1.0, 0.0)


def contenders(only: str, small: bool) -> list[Contender]:
    every = SMALL_TILES if small else (*matrix_products.TILES[:4], *MORE_TILES)
    found = [Contender("as it is", tile) for tile in every]
    found += [Contender(variant, tile) for variant in ("ahead", "unshared") for tile in every if tile.buffers == 1]
    found += [Contender(variant, every[0]) for variant in UNCHECKED]
    return [one for one in found if only in one.name]


def check(contender: Contender, size: int) -> float:
    torch.manual_seed(1)
    a, b = torch.randn(size, size).half(), torch.randn(size, size).half()
    c = torch.full((size, size), float("nan"), dtype=torch.float16, device="webgpu")
    x, y = a.to("webgpu"), b.to("webgpu")
    launched(contender, x, y, c)()
    return checked(c, a.double() @ b.double(), 2e-3, contender.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1024,4096,8192")
    parser.add_argument("--only", default="", help="contenders with this in their name")
    parser.add_argument("--window", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=120, help="no contender begins later (default: 120)")
    parser.add_argument("--small", action="store_true", help="one window: for software adapters")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    render = spirv.render
    spirv.render = lambda kernel: BY_KERNEL.get(type(kernel), Writer)(kernel).words()
    end = time.monotonic() + options.seconds
    runtime = open_runtime()
    cores = runtime.matrix_cores
    if cores.why_not:
        print(f"matrix cores are not used here: {cores.why_not}")
        return 2
    settings = Settings(options.small, options.window, False)
    shape = matrix_products.shape_of(runtime, torch.float16)
    memory = int(runtime.limits["max-compute-workgroup-storage-size"])
    threads = int(runtime.limits["max-compute-invocations-per-workgroup"])
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    right: list[Contender] = []
    for contender in contenders(options.only, options.small):
        if not contender.tile.fits(shape, memory, threads):
            refused[contender.name] = "the tile does not fit the device's shapes or memory"
            continue
        try:
            if contender.variant not in UNCHECKED:
                check(contender, CHECKED if not options.small else 4 * contender.tile.bm)
            right.append(contender)
        except Exception as exc:  # noqa: BLE001  (whatever it is, the others go on, and the file says so)
            refused[contender.name] = f"{type(exc).__name__}: {exc}"
        print(f"{contender.name:44} {refused.get(contender.name, 'right')}", flush=True)
    try:
        for size in map(int, options.sizes.split(",")):
            a, b = (torch.randn(size, size, device="webgpu", dtype=torch.float16) for _ in range(2))
            c = torch.empty_like(a)
            for contender in right:
                if time.monotonic() > end:
                    refused[f"{contender.name} at {size}"] = "the time is spent"
                    continue
                works = {"torch": partial(torch.mm, a, b, out=c), "direct": launched(contender, a, b, c)}
                found = interleaved(works, settings)
                ours, torchs = (2e-12 * size**3 / found[name][0] for name in ("direct", "torch"))
                row = {"size": size, "contender": contender.name, "tflops": ours, "torch_tflops": torchs}
                rows.append({**row, "spread": found["direct"][1], "checked": contender.variant not in UNCHECKED})
                print(f"{size:6} {contender.name:44} {ours:8.1f} TFLOP/s, torch's call {torchs:8.1f}", flush=True)
                if options.output:
                    write_results(options.output, {**provenance(), "rows": rows, "refused": refused})
    finally:
        spirv.render = render
    return 0


if __name__ == "__main__":
    sys.exit(main())
