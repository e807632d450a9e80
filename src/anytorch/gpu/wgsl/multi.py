"""Kernels that read and write several tensors at one place each: optimizer steps, unscaling of gradients.

Every tensor is walked in the order of its memory, so all must be dense and of one layout. Besides tensors there are cells,
float32 tensors of one element that every thread reads (a step count, a learning rate), and numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.types import KINDS, MAIN, buffers, head, lane_bits, load, stored

WORKGROUP = 256


@dataclass(frozen=True)
class Multi:
    """`body` is statements over v0, v1, … (each tensor's element, in its compute type), cell0, … and the named numbers.

    It assigns to the v's of tensors that are `written`, and to cells that are `cells_written`.
    """

    body: str
    tensors: tuple[str, ...]  # dtypes
    written: tuple[bool, ...]
    cells: int = 0
    cells_written: tuple[bool, ...] = ()
    numbers: tuple[str, ...] = ()
    shared: bool = False  # some operands live in one buffer, which may not be bound both read-only and writable

    @property
    def per_thread(self) -> int:
        """How many elements a thread computes: as many as share a word of some written tensor."""
        return max((KINDS[t].lanes for t, w in zip(self.tensors, self.written, strict=True) if w), default=1)

    @property
    def buffers(self) -> int:
        return len(self.tensors) + self.cells

    @property
    def writable(self) -> int:
        if self.shared:
            return (1 << self.buffers) - 1
        flags = (*self.written, *(self.cells_written or (False,) * self.cells))
        return sum(1 << i for i, flag in enumerate(flags) if flag)


def render(kernel: Multi) -> str:
    """Parameters: n, threads per row, the numbers, the offset of every tensor and cell in elements."""
    count = len(kernel.tensors)
    names = [*kernel.tensors, *("float32",) * kernel.cells]
    declared = ""
    for i, name in enumerate(names):
        bound = {f"b{i}": name}
        declared += buffers({}, bound, i) if kernel.writable >> i & 1 else buffers(bound, {}, i)
    fields = ["n", "row", *[f"{number}: f32" for number in kernel.numbers], *[f"o{i}" for i in range(len(names))]]
    body = re.sub(r"\bcell(\d+)\b", lambda m: f"b{count + int(m[1])}[p.o{count + int(m[1])}]", kernel.body)
    for number in kernel.numbers:
        body = re.sub(rf"\b{number}\b", f"p.{number}", body)
    lanes = kernel.per_thread
    loads = "".join(
        f"    var v{i} = {load(name, f'b{i}', f'(p.o{i} + at)')};\n" for i, name in enumerate(kernel.tensors)
    )
    narrow = [i for i in range(count) if kernel.written[i] and KINDS[kernel.tensors[i]].lanes > 1]
    stores = ""
    for i, name in enumerate(kernel.tensors):
        if kernel.written[i]:
            if i in narrow:
                stores += f"    w{i} |= {lane_bits(name, f'v{i}')} << (k * {32 // lanes}u);\n"
            else:
                stores += f"    b{i}[p.o{i} + at] = {stored(name, f'v{i}')};\n"
    # Past the end of the tensor a word belongs to someone else: those bits are written back as they are.
    words = "".join(
        f"  var w{i} = 0u;\n"
        f"  if (p.n - first < {lanes}u) {{\n"
        f"    w{i} = b{i}[p.o{i} / {lanes}u + thread] & (0xffffffffu << ((p.n - first) * {32 // lanes}u));\n  }}\n"
        for i in narrow
    )
    ends = "".join(f"  b{i}[p.o{i} / {lanes}u + thread] = w{i};\n" for i in narrow)
    return (
        head(fields, {}, None, kernel.tensors)
        + declared
        + needed(kernel.body)
        + MAIN
        + f"  let first = thread * {lanes}u;\n  if (first >= p.n) {{ return; }}\n{words}"
        f"  for (var k = 0u; k < min({lanes}u, p.n - first); k++) {{\n    let at = first + k;\n{loads}{body}{stores}  }}\n"
        f"{ends}}}\n"
    )
