"""Several tensors one after the other along a dimension, in one launch. Elements travel as 4, 8 or 16 bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anytorch.gpu.wgsl.types import MAIN, head, numbered

WORKGROUP = 256
MOST_WORDS = 32  # of parameters
_UNITS = {4: "u32", 8: "vec2<u32>", 16: "vec4<u32>"}


@dataclass(frozen=True)
class Cat:
    unit: int  # bytes
    inputs: int
    rank: int
    axis: int

    @property
    def words(self) -> int:
        return 2 + self.inputs + self.rank + self.inputs - 1 + self.inputs * self.rank


def render(kernel: Cat) -> str:
    """Parameters: units in the result, threads per row of groups, each input's offset, the result's sizes, where inputs
    begin along the axis (from the second on), each input's strides."""
    inputs, dims = range(kernel.inputs), range(kernel.rank)
    names = [
        *("n", "row"),
        *[f"o{j}" for j in inputs],
        *[f"s{d}" for d in dims],
        *[f"e{j}" for j in inputs[1:]],
        *[f"t{j}_{d}" for j in inputs for d in dims],
    ]
    unit = _UNITS[kernel.unit]
    text = [head(names, numbered("b", [unit] * kernel.inputs), {"out": unit}), MAIN]
    text.append("  let i = thread; if (i >= p.n) { return; }\n  var rest = i;\n")
    text += [f"  let c{d} = rest % p.s{d}; rest = rest / p.s{d};\n" for d in reversed(dims[1:])]
    text.append("  let c0 = rest;\n")
    for j in inputs:
        own = [f"(c{d} - p.e{j})" if j and d == kernel.axis else f"c{d}" for d in dims]  # its place in the input
        at = " + ".join([f"p.o{j}", *[f"{own[d]} * p.t{j}_{d}" for d in dims]])
        condition = f"if (c{kernel.axis} < p.e{j + 1}) " if j + 1 < kernel.inputs else ""
        text.append(f"  {'else ' if j else ''}{condition}{{ out[i] = b{j}[{at}]; }}\n")
    return "".join(text) + "}\n"


def merge(
    sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], axis: int
) -> tuple[list[list[int]], list[list[int]], int]:
    """The inputs' sizes and strides with neighbouring dimensions made one where that is so for all of them, and the axis.

    Inner dimensions may join the axis: an input is then longer along it by the same factor.
    """
    kept: list[int] = []  # the innermost dimension of each that remains, from the last to the first
    lengths = [list(size) for size in sizes]
    for d in range(len(sizes[0]) - 1, -1, -1):
        if d != axis and lengths[0][d] == 1:
            continue
        inner = kept[-1] if kept else None
        if (
            inner is not None
            and inner != axis
            and all(step[d] == step[inner] * size[inner] for step, size in zip(strides, lengths, strict=True))
        ):
            for size in lengths:
                size[inner] *= size[d]
            if d == axis:
                axis = inner
            continue
        kept.append(d)
    kept.reverse()
    return (
        [[size[d] for d in kept] for size in lengths],
        [[step[d] for d in kept] for step in strides],
        kept.index(axis),
    )


def unit_of(
    itemsize: int, sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]], offsets: int
) -> int | None:
    """The widest unit in which all can travel; `offsets` are the inputs' first elements, or-ed. None: less than a word."""
    for unit in (16, 8, 4):
        factor = unit // itemsize
        if factor == 1:
            return unit
        if (
            factor
            and unit % itemsize == 0
            and not offsets % factor
            and all(step[-1] == 1 and not size[-1] % factor for size, step in zip(sizes, strides, strict=True))
            and not any(step % factor for steps in strides for step in steps[:-1])
        ):
            return unit
    return None
