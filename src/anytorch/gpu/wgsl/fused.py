"""Several elementwise ops of one shape as one kernel: every value is computed once, in a register.

Sizes and strides are written into the shader: a compiled graph has one shape, and the compiler can fold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.types import KINDS, MAIN, dense_strides, head, lane_bits, load, numbered, stored


@dataclass(frozen=True)
class Fused:
    shape: tuple[int, ...]
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # dtype, strides over the shape (0 where it is broadcast)
    statements: tuple[str, ...]  # "let v0 = …;" from x0, x1, … and earlier values
    outputs: tuple[tuple[str, str], ...]  # dtype, the value stored; each a new contiguous tensor

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def per_thread(self) -> int:
        """A thread owns whole words of every output."""
        return max(KINDS[dtype].lanes for dtype, _ in self.outputs)

    @property
    def buffers(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def writable(self) -> int:
        return (1 << self.buffers) - (1 << len(self.inputs))

    @property
    def words(self) -> int:
        """Parameters: threads per row of groups, and every operand's offset. (Outputs start at 0.)"""
        return 1 + len(self.inputs)


def render(kernel: Fused) -> str:
    count = len(kernel.inputs)
    read, written = (
        numbered(name, [d for d, _ in each]) for name, each in (("b", kernel.inputs), ("out", kernel.outputs))
    )
    body = " ".join((loads(kernel.shape, kernel.inputs, range(count)), *kernel.statements))
    return (
        head(("row", *[f"o{i}" for i in range(count)]), read, written)
        + needed(" ".join([*kernel.statements, *[value for _, value in kernel.outputs]]))
        + f"{MAIN}  let first = thread * {kernel.per_thread}u;\n  if (first >= {kernel.elements}u) {{ return; }}\n"
        + writes(kernel.outputs, kernel.per_thread, body, kernel.elements)
        + "}\n"
    )


def writes(outputs: Sequence[tuple[str, str]], per: int, body: str, end: int | None = None) -> str:
    """Statements that compute `per` elements from `first` on and store the outputs, narrow ones in whole words.

    `body` leads from the element's index `i` to the values; elements from `end` on are left out, if there is one.
    """

    def within(element: int) -> str:
        return f"if (first + {element}u < {end}u) " if element and end is not None else ""

    narrow = [(k, KINDS[dtype].lanes) for k, (dtype, _) in enumerate(outputs) if KINDS[dtype].lanes > 1]
    lines = [f"  var word{k}_{w} = 0u;\n" for k, lanes in narrow for w in range(per // lanes)]
    for part in range(per):
        lines.append(f"  {within(part)}{{ let i = first + {part}u; {body}")
        for k, (dtype, value) in enumerate(outputs):
            lanes = KINDS[dtype].lanes
            shift = part % lanes * (32 // lanes)
            bits = f"word{k}_{part // lanes} |= {lane_bits(dtype, value)} << {shift}u;" if lanes > 1 else ""
            lines.append(" " + (bits or f"out{k}[i] = {stored(dtype, value)};"))
        lines.append(" }\n")
    for k, lanes in narrow:
        for w in range(per // lanes):
            lines.append(f"  {within(w * lanes)}{{ out{k}[first / {lanes}u + {w}u] = word{k}_{w}; }}\n")
    return "".join(lines)


def loads(shape: Sequence[int], inputs: Sequence[tuple[str, tuple[int, ...]]], which: Sequence[int]) -> str:
    """Statements that set x0, x1, … of the inputs asked for: their elements for index `i` of the shape."""
    values = [f"let x{i} = {load(inputs[i][0], f'b{i}', f'a{i}')};" for i in which]
    return " ".join((addresses(shape, inputs, which), *values))


def addresses(shape: Sequence[int], inputs: Sequence[tuple[str, tuple[int, ...]]], which: Sequence[int]) -> str:
    """Statements that set a0, a1, … of the inputs asked for: where the element for index `i` of the shape is."""
    contiguous = dense_strides(shape)
    plain = [i for i in which if inputs[i][1] == contiguous]
    lines = [f"let a{i} = i + p.o{i};" for i in plain]
    rest = [i for i in which if i not in plain]
    if rest:
        lines.append("var rest = i;")
        lines += [f"var a{i} = p.o{i};" for i in rest]
        for d in range(len(shape) - 1, -1, -1):
            used = [i for i in rest if inputs[i][1][d]]
            if shape[d] == 1:
                continue
            if used:
                lines.append(f"let c{d} = rest % {shape[d]}u;")
                lines += [f"a{i} += c{d} * {inputs[i][1][d]}u;" for i in used]
            if d:
                lines.append(f"rest = rest / {shape[d]}u;")
    return " ".join(lines)
