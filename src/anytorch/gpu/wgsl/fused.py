"""Several elementwise ops of one shape as one kernel: every value is computed once, in a register.

Sizes and strides are written into the shader: a compiled graph has one shape, and the compiler can fold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from anytorch.gpu.wgsl.elementwise import WORKGROUP
from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.types import BF16_BITS, KINDS, dense_strides, enables, lane_bits, load, stored


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
    dtypes = {dtype for dtype, _ in (*kernel.inputs, *kernel.outputs)}
    lines = [enables(dtypes)]
    lines += [
        f"@group(0) @binding({i}) var<storage, read> b{i}: array<{KINDS[dtype].storage}>;\n"
        for i, (dtype, _) in enumerate(kernel.inputs)
    ]
    lines += [
        f"@group(0) @binding({count + k}) var<storage, read_write> out{k}: array<{KINDS[dtype].storage}>;\n"
        for k, (dtype, _) in enumerate(kernel.outputs)
    ]
    offsets = ", ".join(["row: u32", *[f"o{i}: u32" for i in range(count)]])
    lines.append(f"struct Parameters {{ {offsets} }}\nvar<immediate> p: Parameters;\n")
    lines.append(needed(" ".join([*kernel.statements, *[value for _, value in kernel.outputs]])))
    if "bfloat16" in {dtype for dtype, _ in kernel.outputs}:
        lines.append(BF16_BITS)
    lines.append(
        f"@compute @workgroup_size({WORKGROUP}) fn main(@builtin(global_invocation_id) g: vec3<u32>) {{\n"
        f"  let first = (g.x + g.y * p.row) * {kernel.per_thread}u;\n  if (first >= {kernel.elements}u) {{ return; }}\n"
    )
    for k, (dtype, _) in enumerate(kernel.outputs):
        words = kernel.per_thread // KINDS[dtype].lanes
        lines += [f"  var word{k}_{w} = 0u;\n" for w in range(words) if KINDS[dtype].lanes > 1]
    for part in range(kernel.per_thread):
        lines.append(_one_element(kernel, part))
    for k, (dtype, _) in enumerate(kernel.outputs):
        lanes = KINDS[dtype].lanes
        if lanes > 1:
            for w in range(kernel.per_thread // lanes):
                within = f"first + {w * lanes}u < {kernel.elements}u"
                lines.append(f"  if ({within}) {{ out{k}[first / {lanes}u + {w}u] = word{k}_{w}; }}\n")
    return "".join(lines) + "}\n"


def _one_element(kernel: Fused, part: int) -> str:
    body = [f"let i = first + {part}u;", addresses(kernel.shape, kernel.inputs, range(len(kernel.inputs)))]
    body += [f"let x{i} = {load(dtype, f'b{i}', f'a{i}')};" for i, (dtype, _) in enumerate(kernel.inputs)]
    body += kernel.statements
    for k, (dtype, value) in enumerate(kernel.outputs):
        lanes = KINDS[dtype].lanes
        if lanes == 1:
            body.append(f"out{k}[i] = {stored(dtype, value)};")
        else:
            shift = part % lanes * (32 // lanes)
            body.append(f"word{k}_{part // lanes} |= {lane_bits(dtype, value)} << {shift}u;")
    inside = "\n    ".join(body)
    if part == 0:
        return f"  {{\n    {inside}\n  }}\n"
    return f"  if (first + {part}u < {kernel.elements}u) {{\n    {inside}\n  }}\n"


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
