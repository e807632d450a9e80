"""Kernels with one thread per element of their result: pooling, resampling, padding, cells, sums of parts.

The body is WGSL that sees `i` (which element), the parameters in `p`, a function `load_<name>(index)` for every input and
`store_<name>(index, value)` for every output; both count elements from the start of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.types import KINDS, head, helpers, load, stored

WORKGROUP = 64


@dataclass(frozen=True)
class PerElement:
    """Outputs are of types that have a word of their own; the caller casts to narrower ones."""

    inputs: tuple[tuple[str, str], ...]  # (name, dtype)
    outputs: tuple[tuple[str, str], ...]
    parameters: tuple[str, ...]  # "name: type"
    body: str
    functions: str = ""

    @property
    def writable(self) -> int:
        return ((1 << len(self.outputs)) - 1) << len(self.inputs)


def render(kernel: PerElement) -> str:
    named = (*kernel.inputs, *kernel.outputs)
    read, written = ({f"buffer_{name}": dtype for name, dtype in each} for each in (kernel.inputs, kernel.outputs))
    lines = [head(("n", "row", *[f"at_{name}" for name, _ in named], *kernel.parameters), read, written)]
    for name, dtype in kernel.inputs:
        value = load(dtype, f"buffer_{name}", "at")
        lines.append(
            f"fn load_{name}(index: u32) -> {KINDS[dtype].compute} {{ let at = p.at_{name} + index; return {value}; }}\n"
        )
    for name, dtype in kernel.outputs:
        kind = KINDS[dtype].compute
        lines.append(
            f"fn store_{name}(index: u32, value: {kind}) "
            f"{{ buffer_{name}[p.at_{name} + index] = {stored(dtype, 'value')}; }}\n"
        )
    text = kernel.functions + kernel.body
    lines.append(helpers(text))
    lines.append(kernel.functions)
    lines.append(
        f"@compute @workgroup_size({WORKGROUP}) fn main(@builtin(global_invocation_id) invocation: vec3<u32>) {{\n"
        f"  let i = invocation.x + invocation.y * p.row;\n  if (i >= p.n) {{ return; }}\n{kernel.body}\n}}\n"
    )
    return "".join(lines)
