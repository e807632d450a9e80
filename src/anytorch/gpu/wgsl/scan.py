"""Running folds along a row: every element gets the fold of the row up to and including it.

Rows are dense, their elements `inner` apart. A thread walks a row; or a workgroup does in blocks, scanning each block in
workgroup memory and carrying its total to the next. A long row is cut into parts: their totals come from a reduction's
first stage, `render_prefixes` turns them into what each part starts from, and every part is scanned by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from anytorch.gpu.wgsl.reduce import (
    EXPONENTIALS,
    REDUCERS,
    Reducer,
    extreme,
    group_main,
    state_text,
    thread_main,
    typed,
)
from anytorch.gpu.wgsl.types import KINDS, buffers, head, load, numbered, stored

PER_THREAD = 4
GROUP = 256
BLOCK = PER_THREAD * GROUP
THREADS = 64


@dataclass(frozen=True)
class Scan:
    reducer: Reducer
    input: str  # dtype
    outputs: tuple[str, ...]  # dtypes that have a word of their own
    compute: str
    group: bool = False
    parts: bool = False  # parts start from prefixes, which is the last binding

    @property
    def buffers(self) -> int:
        return 1 + len(self.outputs) + self.parts

    @property
    def writable(self) -> int:
        return ((1 << len(self.outputs)) - 1) << 1


# A running sum is rounded at every element; the CPU's is a double. What each addition loses is kept beside it and added to
# what is written (`reduce.OPAQUE` keeps compilers from folding it away).
def _lossless(x: str, lost: str) -> str:
    return (
        f"let t = opaque(s.v + {x}); let b = opaque(t - s.v); s.c += (s.v - opaque(t - b)) + ({x} - b){lost}; s.v = t;"
    )


_LOSSLESS_SUM = Reducer(
    (("v", "f32", "0.0"), ("c", "f32", "0.0")),
    _lossless("x0", ""),
    _lossless("o.v", " + o.c"),
    ("select(s.v, s.v + s.c, is_finite(s.v))",),
)

# Extremes are named where they were last reached.
SCANS: dict[str, Reducer] = {
    "cumsum": REDUCERS["sum"],
    "lossless cumsum": _LOSSLESS_SUM,
    "cumprod": REDUCERS["prod"],
    "cummax": extreme(">", latest=True),
    "cummin": extreme("<", latest=True),
    "logcumsumexp": EXPONENTIALS,
    "count": REDUCERS["count_nonzero"],
}


def render(kernel: Scan) -> str:
    outputs = len(kernel.outputs)
    value = load(kernel.input, "b0", "(p.offset + base + k * p.inner)")
    if KINDS[kernel.input].compute != kernel.compute:
        value = f"{kernel.compute}({value})"
    results = [typed(text, kernel.compute) for text in kernel.reducer.results[:outputs]]
    writes = " ".join(
        f"r{j}[base + k * p.inner] = {stored(name, f'{KINDS[name].compute}({result})')};"
        for j, (name, result) in enumerate(zip(kernel.outputs, results, strict=True))
    )
    parts = [
        head(
            ("rows", "length", "inner", "parts", "chunk", "offset"),
            {"b0": kernel.input},
            numbered("r", kernel.outputs),
        ),
        state_text(kernel.reducer, kernel.compute, 1),
        buffers({"prefixes": "State"}, first=1 + outputs) if kernel.parts else "",
        f"fn write(s: State, base: u32, k: u32) {{ let n = 1.0; {writes} }}\n",
    ]
    worker = "group" if kernel.group else "thread"
    begin = (
        f"  if ({worker} >= p.rows * p.parts) {{ return; }}\n"
        f"  let row = {worker} % p.rows; let part = {worker} / p.rows;\n"
        "  let base = (row / p.inner) * p.length * p.inner + row % p.inner;\n"
        "  let end = min(p.length, (part + 1u) * p.chunk);\n"
        f"  var carry = {'prefixes[part * p.rows + row]' if kernel.parts else 'start()'};\n"
    )
    if not kernel.group:
        parts += [
            thread_main(THREADS),
            begin,
            f"  for (var k = part * p.chunk; k < end; k++) {{\n    carry = add(carry, {value}, k);\n"
            "    write(carry, base, k);\n  }\n}\n",
        ]
        return "".join(parts)
    parts += [
        f"var<workgroup> totals: array<State, {GROUP}>;\n",
        group_main(GROUP, False),
        begin,
        f"  for (var block = part * p.chunk; block < end; block += {BLOCK}u) {{\n"
        f"    let first = block + lane * {PER_THREAD}u;\n    var own: array<State, {PER_THREAD}>;\n    var s = start();\n"
        f"    for (var e = 0u; e < {PER_THREAD}u; e++) {{\n"
        f"      let k = first + e; if (k < end) {{ s = add(s, {value}, k); }} own[e] = s;\n    }}\n"
        "    totals[lane] = s;\n    workgroupBarrier();\n"
        f"    for (var d = 1u; d < {GROUP}u; d = d << 1u) {{\n"
        "      var t = totals[lane]; if (lane >= d) { t = merge(totals[lane - d], t); }\n"
        "      workgroupBarrier();\n      totals[lane] = t;\n      workgroupBarrier();\n    }\n"
        "    var before = carry; if (lane > 0u) { before = merge(carry, totals[lane - 1u]); }\n"
        f"    for (var e = 0u; e < {PER_THREAD}u; e++) {{\n"
        "      let k = first + e; if (k < end) { write(merge(before, own[e]), base, k); }\n    }\n"
        f"    carry = merge(carry, totals[{GROUP - 1}]);\n    workgroupBarrier();\n  }}\n}}\n",
    ]
    return "".join(parts)


def render_prefixes(reducer: Reducer, compute: str) -> str:
    """Totals of parts become, in place, the fold of all parts before each. A thread per row: parts are few."""
    return "".join(
        (
            head(("rows", "parts"), {}, {"totals": "State"}),
            state_text(reducer, compute, 1),
            thread_main(THREADS),
            "  if (thread >= p.rows) { return; }\n  var s = start();\n"
            "  for (var part = 0u; part < p.parts; part++) {\n"
            "    let at = part * p.rows + thread; let total = totals[at]; totals[at] = s; s = merge(s, total);\n  }\n}\n",
        )
    )
