"""Kernels that compute each element of one output from the same element of their inputs.

Three forms of the same kernel:

* contiguous, four elements per thread, where every operand has a word per element and starts on a multiple of four;
* contiguous, one word per thread;
* strided: sizes and strides are parameters, so one shader serves every shape of a rank.

A shape with more dimensions than the parameters hold gets a shader of its own with the numbers written into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.types import (
    BF16_BITS,
    KINDS,
    MAIN,
    buffers,
    enables,
    lane_bits,
    load,
    numbered,
    offsets,
    parameters,
    stored,
    words_main,
)

WORKGROUP = 256
WIDE = ("i64", "f64")  # scalars of two words
MOST_WORDS = 32  # parameters: 128 bytes is what every adapter has


@dataclass(frozen=True)
class Elementwise:
    """`expression` computes the output's value (in its compute type) from x0, x1, … and the scalars s0, s1, …

    It may name the element's place in the output, counted row by row, as `i` (not in the vector form).
    """

    expression: str
    inputs: tuple[str, ...]  # dtypes
    output: str
    scalars: tuple[str, ...] = ()  # WGSL types: "f32", "i32", "i64", "f64"
    rank: int = 0  # 0: contiguous
    vector: bool = False
    unroll: int = 1  # vectors per thread
    in_place: bool = False  # an input is the output's own buffer
    atomic: bool = False  # a narrow output whose words are shared with elements this launch must not touch
    shape: tuple[int, ...] = ()  # with `strides`: written into the shader instead of passed to it
    strides: tuple[tuple[int, ...], ...] = ()

    @property
    def lanes(self) -> int:
        return KINDS[self.output].lanes

    @property
    def per_thread(self) -> int:
        """How many elements one thread computes."""
        if self.vector:
            return 4 * self.unroll
        return 1 if self.atomic else self.lanes

    @property
    def words(self) -> int:
        """How many 32-bit parameters the shader takes."""
        scalars = sum(2 if kind in WIDE else 1 for kind in self.scalars)
        operands = len(self.inputs) + 1
        geometry = 0 if self.shape else self.rank * (operands + 1)
        return 2 + scalars + operands + geometry

    @property
    def writable(self) -> int:
        """Binding an operand both read-only and writable is an error; twice writable is allowed. So all, or the last."""
        operands = len(self.inputs) + 1
        return (1 << operands) - 1 if self.in_place else 1 << len(self.inputs)


def render(kernel: Elementwise) -> str:
    """The WGSL text of a kernel."""
    names = (*kernel.inputs, kernel.output)
    elements = [f"vec4<{KINDS[name].storage}>" if kernel.vector else name for name in names]
    if kernel.atomic:
        elements[-1] = f"atomic<{KINDS[kernel.output].storage}>"
    bound, read = [*numbered("b", elements).items()], 0 if kernel.in_place else len(kernel.inputs)
    parts = [
        enables(names),
        buffers(dict(bound[:read]), dict(bound[read:])),
        parameters(*_parameters(kernel)),
        needed(kernel.expression),
        BF16_BITS if kernel.output == "bfloat16" or "bf16_bits(" in kernel.expression else "",
        _scalar_helpers(kernel),
    ]
    body = _vector_main(kernel) if kernel.vector else _evaluate(kernel) + _main(kernel)
    return "".join(parts) + body


def _parameters(kernel: Elementwise) -> list[str]:
    operands = len(kernel.inputs) + 1
    names = ["n", "row"]
    for i, kind in enumerate(kernel.scalars):
        names += [f"s{i}_low", f"s{i}_high"] if kind in WIDE else [f"s{i}"]
    names += [f"o{i}" for i in range(operands)]
    if kernel.rank and not kernel.shape:
        names += [f"d{r}" for r in range(kernel.rank)]
        names += [f"t{i}_{r}" for i in range(operands) for r in range(kernel.rank)]
    return names


def _scalar_helpers(kernel: Elementwise) -> str:
    lines = []
    for i, kind in enumerate(kernel.scalars):
        if kind == "i64":
            # By way of u64: some compilers extend the sign of a u32 that is made an i64 at once.
            value = f"(i64(bitcast<i32>(p.s{i}_high)) << 32u) | i64(u64(p.s{i}_low))"
        elif kind == "f64":
            value = f"bitcast<f64>((u64(p.s{i}_high) << 32u) | u64(p.s{i}_low))"
        else:
            value = f"bitcast<{kind}>(p.s{i})"
        lines.append(f"fn s{i}() -> {kind} {{ return {value}; }}\n")
    return "".join(lines)


def _index(kernel: Elementwise, operands: Sequence[int], variable: str) -> str:
    """Statements that set a<i> to the element index of each operand for linear index `variable`."""
    if not kernel.rank:
        return " ".join(f"let a{i} = {variable} + p.o{i};" for i in operands)
    return offsets(variable, operands, kernel.rank, kernel.shape, kernel.strides)


def _evaluate(kernel: Elementwise) -> str:
    operands = range(len(kernel.inputs))
    loads = " ".join(f"let x{i} = {load(name, f'b{i}', f'a{i}')};" for i, name in enumerate(kernel.inputs))
    index = _index(kernel, operands, "i") if operands else ""
    result = KINDS[kernel.output].compute
    return f"fn evaluate(i: u32) -> {result} {{ {index} {loads} return {kernel.expression}; }}\n"


def _main(kernel: Elementwise) -> str:
    out = len(kernel.inputs)
    if kernel.atomic:
        bits = 32 // kernel.lanes
        word, shift = f"a{out} >> {kernel.lanes // 2}u", f"(a{out} & {kernel.lanes - 1}u) * {bits}u"
        mask = f"{(1 << bits) - 1:#x}u"
        return (
            f"{MAIN}  if (thread >= p.n) {{ return; }}\n"
            f"  {_index(kernel, [out], 'thread')}\n"
            f"  let bits = {lane_bits(kernel.output, 'evaluate(thread)')};\n"
            f"  atomicAnd(&b{out}[{word}], ~({mask} << ({shift})));\n"
            f"  atomicOr(&b{out}[{word}], bits << ({shift}));\n}}\n"
        )
    if kernel.lanes > 1:
        made = lane_bits(kernel.output, "evaluate(first + k)")
        return words_main(kernel.lanes, made, f"b{out}[thread + p.o{out} / {kernel.lanes}u]")
    return (
        f"{MAIN}  if (thread >= p.n) {{ return; }}\n"
        f"  {_index(kernel, [out], 'thread')}\n"
        f"  b{out}[a{out}] = {stored(kernel.output, 'evaluate(thread)')};\n}}\n"
    )


def _vector_main(kernel: Elementwise) -> str:
    """Four elements per load: one of 128 bits per operand instead of four of 32. `unroll` such loads are under way at once.

    A thread's vectors lie a whole launch apart, so that neighbouring threads read neighbouring addresses at every step.
    """
    out = len(kernel.inputs)
    arguments = ", ".join(f"x{i}: {KINDS[name].compute}" for i, name in enumerate(kernel.inputs))
    result = KINDS[kernel.output]
    lines = [
        f"fn evaluate({arguments}) -> {result.compute} {{ return {kernel.expression}; }}\n",
        MAIN,
        f"  let vectors = p.n / 4u;\n  let step = (vectors + {kernel.unroll - 1}u) / {kernel.unroll}u;\n"
        if kernel.unroll > 1
        else "  let vectors = p.n / 4u;\n",
        f"  if (thread >= {'step' if kernel.unroll > 1 else 'vectors'}) {{ return; }}\n",
    ]
    for u in range(kernel.unroll):
        place = "thread" if u == 0 else f"min(thread + {u}u * step, vectors - 1u)"
        lines.append(f"  let j{u} = {place};\n")
        lines += [f"  let v{i}_{u} = b{i}[j{u} + p.o{i} / 4u];\n" for i in range(out)]
    for u in range(kernel.unroll):
        parts = [
            f"evaluate({', '.join(f'{KINDS[name].compute}(v{i}_{u}.{lane})' for i, name in enumerate(kernel.inputs))})"
            for lane in "xyzw"
        ]
        values = ", ".join(stored(kernel.output, part) for part in parts)
        # The last thread's clamped vectors would be computed twice; in place, from what has been overwritten already.
        within = f"if (thread + {u}u * step < vectors) " if u else ""
        lines.append(f"  {within}{{ b{out}[j{u} + p.o{out} / 4u] = vec4<{result.storage}>({values}); }}\n")
    return "".join(lines) + "}\n"


def collapse(size: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Drop dimensions of size 1 and merge neighbours that every operand walks through without a gap."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for d, length in enumerate(size):
        if length == 1:
            continue
        if sizes and all(steps[-1] == stride[d] * length for steps, stride in zip(merged, strides, strict=True)):
            sizes[-1] *= length
            for steps, stride in zip(merged, strides, strict=True):
                steps[-1] = stride[d]
        else:
            sizes.append(length)
            for steps, stride in zip(merged, strides, strict=True):
                steps.append(stride[d])
    return sizes, merged
