"""Convolutions on matrix cores, as products whose right side is gathered while it is read: no im2col buffer.

    C[o, (image, place)] = sum over (c, tap) of weight[o, c, tap] * x[image, c, place * stride + tap * dilation - padding]

for one or two dimensions; a batch of the product is a group. The weight is read 16 bytes at a time, as a product's left
side; x element by element, eight neighbouring places by each invocation, which finds out once where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.spirv.matmul import EIGHT, Product, Writer, eight_halves, half_of, load_float, word_of_two
from anytorch.gpu.spirv.module import Value

Pair = tuple[int, int]
PARAMETERS = (
    *("m", "n", "k", "chunk", "splits", "tiles_m", "tiles_n", "grid_x", "batches"),
    *("channels", "xh", "xw", "oh", "ow"),  # channels of x per group; sizes of x and of the result
    *("x_image", "x_channel", "x_place", "o_image", "o_channel"),  # steps; places of the result are neighbours
)


@dataclass(frozen=True)
class Convolution(Product):
    """`stored` is float16 or bfloat16; `added` is the bias. `whole_rows`: an image's places are a multiple of eight."""

    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]


def render(kernel: Convolution) -> bytes:
    return _Writer(kernel).words()


class _Writer(Writer):
    kernel: Convolution

    def _bind(self) -> None:
        module, kernel = self.module, self.kernel
        self.a = self._halves(0, units=True)
        self.b = self._halves(1, units=False)
        self.d = module.buffer(2, module.u32, 4) if kernel.added else None
        self.c = self._halves(kernel.bindings - 1, units=kernel.whole_rows, writable=True)
        places = ("a_at", "b_at", *(("d_at",) if kernel.added else ()), "c_at")
        self.p = module.parameters((*places, *PARAMETERS))

    def _place(self) -> None:
        super()._place()
        # The weight of a group follows that of the group before.
        p = self.p
        p["a_step"], p["a_batch"] = p["k"], p["m"] * p["k"]
        self.places = p["oh"] * p["ow"]

    def _reads(self, name: str) -> list[tuple[Value, Value, Value]]:
        if name == "a":
            return super()._reads("a")
        module, p, tile, kernel = self.module, self.p, self.tile, self.kernel
        units = tile.bn // EIGHT
        assert self.threads % units == 0  # so that all reads of an invocation are of the same eight places
        self.corners: list[tuple[Value, Value, Value]] = []  # of the window: its image, its first row and column
        for j in range(EIGHT):
            n = (self.n0 + self.thread % units * EIGHT + j).minimum(p["n"] - 1)
            place = n % self.places
            image = p["b_at"] + n // self.places * p["x_image"]
            y = place // p["ow"] * kernel.stride[0] - kernel.padding[0]
            x = place % p["ow"] * kernel.stride[1] - kernel.padding[1]
            self.corners.append((image, y, x))
        found = []
        for number in range(tile.bn * tile.bk // EIGHT // self.threads):
            row = self.thread // units + number * (self.threads // units)
            found.append((module.constant(0), row, row * self.layout.b_row + self.thread % units + self.layout.b_at))
        return found

    def _fetch(self, name: str, k0: Value) -> list[Value]:
        if name == "a":
            return super()._fetch("a", k0)
        return [self._gathered(k0 + row) for _, row, _ in self.reads["b"]]

    def _gathered(self, k: Value) -> Value:
        """Eight places' elements under one tap of one channel; zeros in the padding."""
        module, p, kernel = self.module, self.p, self.kernel
        tap = k % kernel.taps
        channel = (self.batch * p["channels"] + k // kernel.taps) * p["x_channel"]
        down = tap // kernel.kernel[1] * kernel.dilation[0]
        right = tap % kernel.kernel[1] * kernel.dilation[1]
        inside = k < self.end
        halves = []
        for image, top, left in self.corners:
            y, x = top + down, left + right  # below zero they are beyond every size: the numbers have no sign
            there = module.both(module.both(y < p["xh"], x < p["xw"]), inside)
            at = image + channel + (y * p["xw"] + x) * p["x_place"]
            value = module.read(self.b, module.select(there, at, module.constant(0)))
            halves.append(module.select(there, value, module.zero(module.float16())))
        return eight_halves(module, halves)

    def _write(self, m: Value, n: Value, values: list[Value]) -> None:
        module, p, kernel = self.module, self.p, self.kernel
        channel = self.batch * p["m"] + m
        if self.d is not None:
            bias = load_float(module, self.d, kernel.added, p["d_at"] + channel)
            values = [module.add(value, bias) for value in values]
        pairs = [word_of_two(module, kernel.stored, values[i], values[i + 1]) for i in range(0, EIGHT, 2)]
        line = p["c_at"] + channel * p["o_channel"]
        if kernel.whole_rows:  # eight places from a multiple of eight on are of one image
            at = line + n // self.places * p["o_image"] + n % self.places
            module.write(self.c, at // EIGHT, module.op(80, self.quad, *pairs))
            return
        for j in range(EIGHT):
            one = n + j
            with module.when(one < p["n"]):
                at = line + one // self.places * p["o_image"] + one % self.places
                module.write(self.c, at, half_of(module, pairs, j))
