"""Kernels with one thread per element of their result: pooling, resampling, padding, cells, sums of parts.

The body is WGSL that sees `i` (which element), the parameters in `p`, a function `load_<name>(index)` for every input and
`store_<name>(index, value)` for every output; both count elements from the start of the tensor. The output that `added`
names has `add_<name>(index, value)` instead: threads add to one element at once, in an order that is the GPU's.
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
    added: str = ""  # a float32 output
    float_atomics: bool = False  # the adapter adds floats atomically

    @property
    def writable(self) -> int:
        return ((1 << len(self.outputs)) - 1) << len(self.inputs)


def render(kernel: PerElement) -> str:
    named = (*kernel.inputs, *kernel.outputs)
    read, written = ({f"buffer_{name}": dtype for name, dtype in each} for each in (kernel.inputs, kernel.outputs))
    if kernel.added:
        written[f"buffer_{kernel.added}"] = "atomic<f32>" if kernel.float_atomics else "atomic<u32>"
    lines = [head(("n", "row", *[f"at_{name}" for name, _ in named], *kernel.parameters), read, written)]
    for name, dtype in kernel.inputs:
        value = load(dtype, f"buffer_{name}", "at")
        lines.append(
            f"fn load_{name}(index: u32) -> {KINDS[dtype].compute} {{ let at = p.at_{name} + index; return {value}; }}\n"
        )
    for name, dtype in kernel.outputs:
        if name == kernel.added:
            lines.append(_adding(name, kernel.float_atomics))
            continue
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


def _adding(name: str, float_atomics: bool) -> str:
    begin = f"fn add_{name}(index: u32, value: f32) {{\n  let at = p.at_{name} + index;\n"
    if float_atomics:
        return f"{begin}  atomicAdd(&buffer_{name}[at], value);\n}}\n"
    return (
        f"{begin}  var bits = atomicLoad(&buffer_{name}[at]);\n  loop {{\n"
        "    let changed = bitcast<u32>(bitcast<f32>(bits) + value);\n"
        f"    let tried = atomicCompareExchangeWeak(&buffer_{name}[at], bits, changed);\n"
        "    if (tried.exchanged) { return; }\n    bits = tried.old_value;\n  }\n}\n"
    )
