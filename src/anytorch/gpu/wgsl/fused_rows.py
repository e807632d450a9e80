"""Chains of elementwise ops and reductions over the last dimensions as one kernel: a worker (a workgroup, or a thread where
barriers are slow) takes a row from its inputs to its results.

The chain runs in phases. In each, every element of the row is computed as far as it can be and folded; the folds' results
are values of the row, which later phases may use. Elements are computed anew in each phase: the row is in the cache by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.fused import addresses, loads, writes
from anytorch.gpu.wgsl.reduce import Reducer, Workers, state_text
from anytorch.gpu.wgsl.types import KINDS, head, load, numbered, stored

# How a fold begins and goes on; a NaN among the elements is the result, as in torch.
FOLDS = {
    "sum": ("0.0", "{a} + {b}"),
    "max": ("(-infinity())", "select(select({b}, {a}, {a} > {b} || is_nan({a})), {b}, is_nan({b}))"),
    "min": ("infinity()", "select(select({b}, {a}, {a} < {b} || is_nan({a})), {b}, is_nan({b}))"),
}


@dataclass(frozen=True)
class Phase:
    """`elements` are statements per element that lead to the folds' values; `rows` those that follow, once per row."""

    elements: tuple[str, ...]
    folds: tuple[tuple[str, str, str], ...]  # the result's name, "sum", "max" or "min", the value folded
    rows: tuple[str, ...]


@dataclass(frozen=True)
class FusedRows(Workers):
    shape: tuple[int, ...]
    reduced: int  # how many of the last dimensions make a row
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # dtype, strides over the shape (0 where it is broadcast)
    before: tuple[str, ...]  # statements per row that need no fold
    phases: tuple[Phase, ...]
    elements: tuple[str, ...]  # statements per element that lead to the outputs
    outputs: tuple[tuple[str, str], ...]  # dtype, the value stored per element
    row_outputs: tuple[tuple[str, str], ...]  # dtype (one with words of its own), the value stored per row

    @property
    def length(self) -> int:
        return prod(self.shape[len(self.shape) - self.reduced :])

    @property
    def rows(self) -> int:
        return prod(self.shape[: len(self.shape) - self.reduced])

    @property
    def per_step(self) -> int:
        """A worker owns whole words of every output."""
        return max((KINDS[dtype].lanes for dtype, _ in self.outputs), default=1)

    @property
    def buffers(self) -> int:
        return len(self.inputs) + len(self.outputs) + len(self.row_outputs)

    @property
    def writable(self) -> int:
        return (1 << self.buffers) - (1 << len(self.inputs))

    @property
    def words(self) -> int:
        return len(self.inputs)

    def per_row(self, i: int) -> bool:
        """Is this input the same for all elements of a row?"""
        return not any(self.inputs[i][1][len(self.shape) - self.reduced :])


def render(kernel: FusedRows) -> str:
    results = [*kernel.outputs, *kernel.row_outputs]
    fields = tuple((name, "f32", FOLDS[kind][0]) for phase in kernel.phases for name, kind, _ in phase.folds)
    merges = " ".join(
        f"s.{name} = {FOLDS[kind][1].format(a=f's.{name}', b=f'o.{name}')};"
        for phase in kernel.phases
        for name, kind, _ in phase.folds
    )
    reducer = Reducer(fields, "", merges, ())
    state = state_text(reducer, "f32", 0)
    everything = " ".join(
        [*kernel.before, *kernel.elements, *[value for _, value in results]]
        + [text for phase in kernel.phases for text in (*phase.elements, *phase.rows)]
        + [FOLDS[kind][1] for phase in kernel.phases for _, kind, _ in phase.folds]
    )
    read, written = (numbered(name, [d for d, _ in each]) for name, each in (("b", kernel.inputs), ("out", results)))
    begin = head([f"o{i}" for i in range(len(kernel.inputs))], read, written) + needed(everything, state) + state
    return begin + kernel.render_rows(reducer, f"{kernel.rows}u", lambda *worker: _body(kernel, *worker))


def _body(kernel: FusedRows, first: str, step: str, fold: str, once: str) -> str:
    lines = [f"  let base = row * {kernel.length}u;\n", "  var s = start();\n"]
    fixed = [i for i in range(len(kernel.inputs)) if kernel.per_row(i)]
    if fixed:
        where = addresses(kernel.shape, kernel.inputs, fixed)
        values = " ".join(f"x{i} = {load(kernel.inputs[i][0], f'b{i}', f'a{i}')};" for i in fixed)
        declared = " ".join(f"var x{i}: {KINDS[kernel.inputs[i][0]].compute};" for i in fixed)
        lines.append(f"  {declared}\n  {{ let i = base; {where} {values} }}\n")
    lines += [f"  {statement}\n" for statement in kernel.before]
    for phase in kernel.phases:
        adding = [
            f"s.{name} = {FOLDS[kind][1].format(a=f's.{name}', b=f'f32({value})')};"
            for name, kind, value in phase.folds
        ]
        statements = [*phase.elements, *adding]
        lines.append(f"  for (var k = {first}; k < {kernel.length}u; k += {step}) {{\n")
        lines.append(f"    let i = base + k; {_loads(kernel, ' '.join(statements))}\n")
        lines += [f"    {statement}\n" for statement in statements]
        lines.append("  }\n" + (f"{fold}  workgroupBarrier();\n" if fold else ""))
        lines += [f"  {statement}\n" for statement in phase.rows]
    writes = " ".join(
        f"out{len(kernel.outputs) + k}[row] = {stored(dtype, value)};"
        for k, (dtype, value) in enumerate(kernel.row_outputs)
    )
    if writes:
        lines.append(f"  {once}{{ {writes} }}\n")
    if kernel.outputs:
        lines.append(_write(kernel, first, step))
    return "".join(lines)


def _loads(kernel: FusedRows, text: str) -> str:
    """x0, x1, … of element `i`, as far as the text needs them; inputs per row are there already."""
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").replace(";", " ").split())
    wanted = [i for i in range(len(kernel.inputs)) if not kernel.per_row(i) and f"x{i}" in words]
    return loads(kernel.shape, kernel.inputs, wanted) if wanted else ""


def _write(kernel: FusedRows, first: str, step: str) -> str:
    per = kernel.per_step
    statements = " ".join(kernel.elements)
    body = f"{_loads(kernel, ' '.join((statements, *[value for _, value in kernel.outputs])))} {statements}"
    return (
        f"  for (var t = {first}; t < {kernel.length // per}u; t += {step}) {{\n"
        f"  let first = base + t * {per}u;\n{writes(kernel.outputs, per, body)}  }}\n"
    )
