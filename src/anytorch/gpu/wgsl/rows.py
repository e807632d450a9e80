"""Kernels that fold each row and then compute every element of it again with the result: softmax, layer norm, …

Rows are dense. Their elements are neighbours, or `inner` elements apart (softmax over a dimension that is not the last).
A workgroup takes a row; or a thread does, where rows are short, lie side by side, or barriers are slow. Where a workgroup's
threads can hold the whole row in registers, memory is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from anytorch.gpu.wgsl.reduce import QUADS, UNROLL, Reducer, Workers, cascade, quad_lane, state_text
from anytorch.gpu.wgsl.types import KINDS, element, head, helpers, lane_bits, load, numbered, stored, stored_four

MOST_WITH_COLUMNS = 4  # quads held per worker, beyond which weights and biases are not


@dataclass(frozen=True)
class Input:
    """Where a value comes from: `per` "element", "column" (position in the row), "row", or a WGSL index of `row` and `k`."""

    dtype: str
    per: str = "element"


@dataclass(frozen=True)
class Twice:
    """A cheaper way to the state of elements that are at hand: walk them twice, as `first` and `second` say of each.

    `before`, `between` and `after` are statements around the walks; the last sets the state `s`.
    """

    before: str
    first: str
    between: str
    second: str
    after: str

    @property
    def text(self) -> str:
        return " ".join(astuple(self))


@dataclass(frozen=True)
class Rows(Workers):
    """`enter` are the values an element brings into the fold; `output` its new value, of x0, x1, … and the state `s`.

    `prepare` are statements between the two, once per row, where `n` is the row's length as f32; `row_outputs` are f32
    values per row. Parameters: e0, e1, … (u32, `extras` of them) and s0, s1, … (f32).
    """

    reducer: Reducer
    inputs: tuple[Input, ...]
    enter: tuple[str, ...]
    prepare: str
    output: str
    dtype: str
    row_outputs: tuple[str, ...] = ()
    extras: int = 0
    scalars: int = 0
    strided: bool = False
    quads: bool = False  # rows are dense, of whole quads, and so are the tensors indexed by column
    held: int = 0  # quads that each worker keeps between folding and writing; those beyond are read again
    twice: Twice | None = None  # used for what is held; `enter` must be x0
    levels: int = 1  # of states per thread (`reduce.levels_of`)

    def in_quads(self, j: int) -> bool:
        return self.quads and self.inputs[j].per in ("element", "column")

    @property
    def buffers(self) -> int:
        return len(self.inputs) + 1 + len(self.row_outputs)

    @property
    def writable(self) -> int:
        return ((1 << self.buffers) - 1) & ~((1 << len(self.inputs)) - 1)


def render(kernel: Rows) -> str:
    count = len(kernel.inputs)
    names = ["rows", "length", "inner", *[f"o{j}" for j in range(count)], *[f"e{j}" for j in range(kernel.extras)]]
    state = state_text(kernel.reducer, "f32", len(kernel.enter))
    body = kernel.prepare + kernel.output + "".join(kernel.row_outputs) + "".join(kernel.enter)
    body += kernel.twice.text if kernel.held and kernel.twice is not None else ""
    read = numbered("b", [element(i.dtype, kernel.in_quads(j)) for j, i in enumerate(kernel.inputs)])
    written = {"out": element(kernel.dtype, kernel.quads), **numbered("r", ["f32"] * len(kernel.row_outputs))}
    fields = (*names, *[f"s{j}: f32" for j in range(kernel.scalars)])
    dtypes = (*[i.dtype for i in kernel.inputs], kernel.dtype)
    begin = head(fields, read, written, dtypes) + state + helpers(body, state)
    return begin + kernel.render_rows(kernel.reducer, "p.rows", lambda *worker: _body(kernel, *worker))


def _body(kernel: Rows, first: str, step: str, fold: str, once: str) -> str:
    """What workers do with `row`, each taking elements from `first` on, `step` apart."""
    base = "(row / p.inner) * p.length * p.inner + row % p.inner" if kernel.strided else "row * p.length"
    writes = " ".join(f"r{j}[row] = {value};" for j, value in enumerate(kernel.row_outputs))
    if kernel.quads:
        folding = _hold(kernel, first, step) + _fold_quads(kernel, first, step)
        writing = _write_quads(kernel, first, step)
    else:
        folding, writing = _fold_loop(kernel, first, step), _write_loop(kernel, first, step)
    return "".join(
        (
            f"  let base = {base};\n  let n = f32(p.length);\n",
            *[f"  let x{j} = {_value(kernel, j, 'k')};\n" for j, i in enumerate(kernel.inputs) if i.per == "row"],
            "  var s = start();\n",
            folding,
            fold,
            f"  {kernel.prepare}\n",
            f"  {once}{{ {writes} }}\n" if writes else "",
            writing,
        )
    )


def _quad_loads(kernel: Rows, needed: str, held: Sequence[int] = ()) -> str:
    """Quad `q` of the row, of every input that has quads, is needed and not held."""
    return " ".join(
        f"let v{j} = b{j}[{_quad_at(kernel, j)} + q];"
        for j in range(len(kernel.inputs))
        if kernel.in_quads(j) and f"x{j}" in needed and j not in held
    )


def _quad_at(kernel: Rows, j: int) -> str:
    return f"((p.o{j}{' + base' if kernel.inputs[j].per == 'element' else ''}) >> 2u)"


def _lane_loads(kernel: Rows, needed: str, lane: int) -> str:
    """x0, x1, … of one element of the quad; `k` is its place in the row."""
    found = []
    for j, operand in enumerate(kernel.inputs):
        if operand.per != "row" and f"x{j}" in needed:
            value = quad_lane(operand.dtype, f"v{j}", lane) if kernel.in_quads(j) else _value(kernel, j, "k")
            found.append(f"let x{j} = {value};")
    return f"let k = q * 4u + {lane}u; " + " ".join(found)


def _kept(kernel: Rows) -> list[int]:
    """The inputs whose quads are held: those by column only where that leaves registers for others."""
    needed = kernel.output + "".join(kernel.enter)
    pers = ("element", "column") if kernel.held <= MOST_WITH_COLUMNS else ("element",)
    return [j for j, i in enumerate(kernel.inputs) if kernel.in_quads(j) and i.per in pers and f"x{j}" in needed]


def _hold(kernel: Rows, first: str, step: str) -> str:
    """Load a thread's share of the row; nothing waits until all of it is under way."""
    text = ["  let quads = p.length >> 2u;\n"]
    for u in range(kernel.held):
        text.append(f"  let q_{u} = {first} + {u}u * {step};\n")
        for j in _kept(kernel):
            text.append(f"  var v{j}_{u}: {QUADS[kernel.inputs[j].dtype]}; ")
            text.append(f"if (q_{u} < quads) {{ v{j}_{u} = b{j}[{_quad_at(kernel, j)} + q_{u}]; }}\n")
    return "".join(text)


Each = Callable[[str], str]


def _quad(kernel: Rows, needed: str, loads: str, each: Each, before: str, after: str) -> str:
    """Statements for every element of quad `q`: `each` is given the place of the element in it."""
    lanes = "".join(f"    {{ {_lane_loads(kernel, needed, lane)} {each('xyzw'[lane])} }}\n" for lane in range(4))
    return f"{loads}\n    {before}\n{lanes}    {after}\n  }}\n"


def _held_quads(kernel: Rows, needed: str, each: Each, before: str = "", after: str = "") -> str:
    text = []
    kept = _kept(kernel)
    for u in range(kernel.held):
        named = " ".join(f"let v{j} = v{j}_{u};" for j in kept if f"x{j}" in needed)
        loads = named + _quad_loads(kernel, needed, kept)
        text.append(f"  if (q_{u} < quads) {{ let q = q_{u}; {_quad(kernel, needed, loads, each, before, after)}")
    return "".join(text)


def _other_quads(
    kernel: Rows, first: str, step: str, needed: str, each: Each, before: str = "", after: str = ""
) -> str:
    """Those that are not held."""
    head = f"  for (var q = {first} + {kernel.held}u * {step}; q < quads; q += {step}) {{\n    "
    return head + _quad(kernel, needed, _quad_loads(kernel, needed), each, before, after)


def _fold_other_quads(kernel: Rows, first: str, step: str, needed: str) -> str:
    """The same, entering the state by levels."""

    def innermost(state: str, last: str) -> str:
        def add(_: str) -> str:
            return f"{state} = add({state}, {', '.join(kernel.enter)}, k);"

        head = f"  for (; i < {last}; i += {step}) {{ let q = i;\n    "
        return head + _quad(kernel, needed, _quad_loads(kernel, needed), add, "", "")

    begin = f"  {{ var i = {first} + {kernel.held}u * {step};\n"
    return begin + cascade(kernel.levels, "quads", step, innermost) + "  }\n"


def _fold_quads(kernel: Rows, first: str, step: str) -> str:
    twice, needed = kernel.twice, "".join(kernel.enter)

    def add(_: str) -> str:
        return f"s = add(s, {', '.join(kernel.enter)}, k);"

    held = _held_quads(kernel, needed, add)
    if twice is not None and kernel.held:
        walks = _held_quads(kernel, "x0", lambda _: twice.first), _held_quads(kernel, "x0", lambda _: twice.second)
        held = f"  {twice.before}\n{walks[0]}  {twice.between}\n{walks[1]}  {twice.after}\n"
    return held + _fold_other_quads(kernel, first, step, needed)


def _write_quads(kernel: Rows, first: str, step: str) -> str:
    def each(lane: str) -> str:
        return f"y.{lane} = {kernel.output};"

    around = ("var y: vec4<f32>;", f"out[(base >> 2u) + q] = {stored_four(kernel.dtype, 'y')};")
    held = _held_quads(kernel, kernel.output, each, *around)
    return held + _other_quads(kernel, first, step, kernel.output, each, *around)


def _at(kernel: Rows, k: str) -> str:
    return f"base + ({k}) * p.inner" if kernel.strided else f"base + {k}"


def _value(kernel: Rows, j: int, k: str) -> str:
    operand = kernel.inputs[j]
    where = {"element": _at(kernel, k), "column": k, "row": "row"}.get(operand.per)
    index = where if where is not None else operand.per.replace("$k", f"({k})")
    value = load(operand.dtype, f"b{j}", f"(p.o{j} + {index})")
    return value if KINDS[operand.dtype].compute == "f32" else f"f32({value})"


def _loads(kernel: Rows, k: str, needed: str) -> str:
    return " ".join(
        f"let x{j} = {_value(kernel, j, k)};"
        for j, i in enumerate(kernel.inputs)
        if i.per != "row" and f"x{j}" in needed
    )


def _fold_loop(kernel: Rows, first: str, step: str) -> str:
    entering = ", ".join(kernel.enter)
    needed = "".join(kernel.enter)
    # Each block's loads come before its fold, and four blocks are open at once, so that loads overlap.
    names = [f"v{a}" for a in range(len(kernel.enter))]
    opened = "".join(f"      var {name}_{u}: f32;\n" for u in range(UNROLL) for name in names)
    blocks = "".join(
        f"      {{ let k = i + {u}u * {step}; {_loads(kernel, 'k', needed)} "
        + " ".join(f"{name}_{u} = {value};" for name, value in zip(names, kernel.enter, strict=True))
        + " }\n"
        for u in range(UNROLL)
    )

    def innermost(state: str, last: str) -> str:
        folds = " ".join(
            f"{state} = add({state}, {', '.join(f'{name}_{u}' for name in names)}, i + {u}u * {step});"
            for u in range(UNROLL)
        )
        rest = f"let k = i; {_loads(kernel, 'k', needed)} {state} = add({state}, {entering}, i);"
        return (
            f"  for (; i + {UNROLL - 1}u * {step} < {last}; i += {UNROLL}u * {step}) "
            f"{{\n{opened}{blocks}      {folds}\n  }}\n"
            f"  for (; i < {last}; i += {step}) {{ {rest} }}\n"
        )

    return f"  var i = {first};\n" + cascade(kernel.levels, "p.length", step, innermost)


def _write_loop(kernel: Rows, first: str, step: str) -> str:
    lanes = KINDS[kernel.dtype].lanes
    if lanes == 1:
        value = stored(kernel.dtype, f"({kernel.output})")
        return (
            f"  for (var k = {first}; k < p.length; k += {step}) {{ {_loads(kernel, 'k', kernel.output)} "
            f"out[{_at(kernel, 'k')}] = {value}; }}\n"
        )
    bits = 32 // lanes  # whole words: the caller sees to it that a row has only such
    lane = lane_bits(kernel.dtype, f"({kernel.output})")
    return (
        f"  for (var word = {first}; word * {lanes}u < p.length; word += {step}) {{\n    var packed = 0u;\n"
        f"    for (var part = 0u; part < {lanes}u; part++) {{ let k = word * {lanes}u + part; "
        f"{_loads(kernel, 'k', kernel.output)} packed |= {lane} << (part * {bits}u); }}\n"
        f"    out[base / {lanes}u + word] = packed;\n  }}\n"
    )
