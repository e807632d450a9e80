"""Reductions: every output folds the elements of one row; rows and their elements are any dimensions of strided inputs.

A `Reducer` says what is folded: a state, how an element enters it, how two states become one, what comes out. The same
reducers drive the row kernels (`rows`) and the scans (`scan`).

Two ways to share the work, each of which may split a row over several workers whose states a second launch folds:

* group: a workgroup per row (or part of one), neighbouring threads read neighbouring elements of the row;
* thread: a thread per row (or part of one), neighbouring threads read neighbouring rows. For short rows, for reductions
  over the outer dimensions, and for software adapters, where barriers are slow.

The order of every fold is fixed by the geometry: results are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anytorch.gpu.wgsl.functions import needed
from anytorch.gpu.wgsl.types import KINDS, element, head, load, numbered, stored

THREADS = 64  # workgroup size of the thread form
UNROLL = 4  # loads in flight per thread
BLOCK = 64  # elements that a thread folds one after the other before it starts a new state


# Four elements in one load, for rows that start on a multiple of four elements and have only whole quads.
QUADS = {name: element(name, True) for name in ("float32", "float16", "bfloat16", "int32")}


def quad_lane(name: str, quad: str, lane: int) -> str:
    """Element `lane` of a loaded quad, in the compute type."""
    if name == "bfloat16":
        word = f"{quad}.{'xy'[lane // 2]}"
        return f"bitcast<f32>({word} & 0xffff0000u)" if lane % 2 else f"bitcast<f32>({word} << 16u)"
    value = f"{quad}.{'xyzw'[lane]}"
    return f"f32({value})" if name == "float16" else value


@dataclass(frozen=True)
class Reducer:
    """What is folded. `{T}` in the texts stands for the type the elements are computed in.

    `fields` are (name, WGSL type, initial value); `add` changes the state `s` by an element with values x0, x1, … at
    position `i` of its row; `merge` changes `s` by another state `o`; `results` are computed from `s` and the row's
    length `n` (an f32).
    """

    fields: tuple[tuple[str, str, str], ...]
    add: str
    merge: str
    results: tuple[str, ...]


def levels_of(elements: int) -> int:
    """How many levels of states a thread needs for so many elements of its own. A long sum in one state loses a bit with
    every doubling; with states of states, the error is that of the longest level, as in torch's own cascade on the CPU."""
    return 1 if elements <= 2 * BLOCK else 2 if elements <= BLOCK * BLOCK else 3


def cascade(levels: int, last: str, step: str, fold: Callable[[str, str], str]) -> str:
    """Statements that fold elements from `i` up to `last`, `step` apart, into `s`, by states of BLOCK elements each.
    `fold(state, last)` are the statements of the innermost level; they move `i`. A `step` of quads counts as one element."""
    if levels == 1:
        return fold("s", last)
    text, state, stop = "", "s", last
    for level in range(levels - 1, 0, -1):
        text += (
            f"  for (; i < {stop};) {{ let end_{level} = min({stop}, i + {BLOCK**level}u * {step}); "
            f"var s_{level} = start();\n"
        )
        state, stop = f"s_{level}", f"end_{level}"
    text += fold(state, stop)
    for level in range(1, levels):
        outer = "s" if level == levels - 1 else f"s_{level + 1}"
        text += f"  {outer} = merge({outer}, s_{level}); }}\n"
    return text


# Rows a workgroup takes when each subgroup takes one: short rows need no barrier then, and no threads idle.
SLOTS = 8
SLOT_THREADS = 256


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What computes a row: a workgroup, a subgroup or a thread."""

    threads: int = THREADS  # per workgroup
    group: bool = False  # a workgroup per row; else a thread
    subgroups: bool = False
    slots: bool = False  # a subgroup per row

    def render_rows(
        self,
        reducer: Reducer,
        rows: str,
        body: Callable[[str, str, str, str], str],
        compute: str = "f32",
        parts: bool = False,
    ) -> str:
        """A kernel whose workers each take one of `rows`.

        `body(first, step, fold, once)` is run with `row` set, and `part` where a row is split. A worker's threads take
        elements from `first` on, `step` apart; `fold` makes one of their states `s`; `once` goes before what only one does.
        """
        threads, subgroups = self.threads, self.subgroups
        if self.slots:  # the subgroup's size is the adapter's affair, so subgroups take slots until none is left
            return (
                _subgroup_text(reducer)
                + group_main(SLOT_THREADS, True)
                + f"  for (var slot = number; slot < {SLOTS}u; "
                f"slot += {SLOT_THREADS}u / size) {{\n  let row = group * {SLOTS}u + slot;\n"
                f"  if (row >= {rows}) {{ break; }}\n"
                + body("within", "size", "  s = fold_subgroup(s, size);\n", "if (within == 0u) ")
                + "  }\n}\n"
            )
        if self.group:
            worker, head = "group", group_text(reducer, compute, threads, subgroups) + group_main(threads, subgroups)
            work = body("lane", f"{threads}u", "  s = fold(s, lane, size, number, within);\n", "if (lane == 0u) ")
        else:
            worker, head, work = "thread", thread_main(threads), body("0u", "1u", "", "")
        row = f"let row = {worker} % {rows}; let part = {worker} / {rows};" if parts else f"let row = {worker};"
        most = f"{rows} * p.parts" if parts else rows
        return f"{head}  if ({worker} >= {most}) {{ return; }}\n  {row}\n{work}}}\n"


@dataclass(frozen=True)
class Reduce(Workers):
    reducer: Reducer
    inputs: tuple[str, ...]  # dtypes
    outputs: tuple[str, ...]  # dtypes that have a word of their own
    compute: str  # WGSL type of the elements
    kept: int  # dimensions of the rows' grid
    reduced: int  # dimensions of a row
    stage: str = "whole"  # or "first": states are written; or "second": states are read
    scalars: int = 0  # f32 parameters s0, s1, …
    quads: bool = False  # one input, whose rows are dense and made of whole quads
    levels: int = 1  # of states per thread (`levels_of`)

    @property
    def words(self) -> int:
        geometry = (
            0 if self.stage == "second" else (self.kept + self.reduced) * (len(self.inputs) + 1) + len(self.inputs)
        )
        return 5 + self.scalars + geometry

    @property
    def buffers(self) -> int:
        return (1 if self.stage == "second" else len(self.inputs)) + (1 if self.stage == "first" else len(self.outputs))

    @property
    def writable(self) -> int:
        first = 1 if self.stage == "second" else len(self.inputs)
        return ((1 << self.buffers) - 1) & ~((1 << first) - 1)


def typed(text: str, compute: str) -> str:
    """The text with `{T}`, `{low}` and `{high}` (a type's smallest and largest value) filled in."""
    limits = {
        "f32": ("(-infinity())", "infinity()"),
        "i32": ("(-2147483647i - 1i)", "2147483647i"),
        "i64": ("(i64(1) << 63u)", "(~(i64(1) << 63u))"),
    }
    low, high = limits[compute]
    return text.replace("{T}", compute).replace("{low}", low).replace("{high}", high)


def state_text(reducer: Reducer, compute: str, arguments: int) -> str:
    """State, start(), add() and merge() of a reducer, with the helpers they need."""
    fields = ", ".join(f"{name}: {typed(kind, compute)}" for name, kind, _ in reducer.fields)
    begin = " ".join(f"s.{name} = {typed(value, compute)};" for name, _, value in reducer.fields)
    values = "".join(f", x{j}: {compute}" for j in range(arguments))
    whole = "".join((reducer.add, reducer.merge, *reducer.results, begin))
    text = _helpers(typed(whole, compute), compute)
    return text + (
        f"struct State {{ {fields} }}\n"
        f"fn start() -> State {{ var s: State; {begin} return s; }}\n"
        f"fn add(a: State{values}, i: u32) -> State {{ var s = a; {typed(reducer.add, compute)} return s; }}\n"
        f"fn merge(a: State, o: State) -> State {{ var s = a; {typed(reducer.merge, compute)} return s; }}\n"
    )


# WGSL need not divide by zero as IEEE does; torch does.
_DIVIDED = (
    "fn divided(a: f32, b: f32) -> f32 { if (b != 0.0) { return a / b; } "
    "return select(select(infinity(), -infinity(), a < 0.0), quiet_nan(), a == 0.0 || is_nan(a)); }\n"
)


# A number behind a bit that is never set, so that no compiler takes (a + b) - a for b. There are fewer than 2³¹ rows.
OPAQUE = "fn opaque(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) ^ (p.rows >> 31u)); }\n"


def _helpers(text: str, compute: str) -> str:
    found = ""
    if "divided(" in text:
        found, text = _DIVIDED, text + _DIVIDED
    if "unordered(" in text:  # is x a NaN? Integers never are
        answer = "is_nan(x)" if compute == "f32" else "false"
        found += f"fn unordered(x: {compute}) -> bool {{ return {answer}; }}\n"
        text += found
    if "opaque(" in text:
        found += OPAQUE
    return needed(text) + found


def shufflable(reducer: Reducer, compute: str) -> bool:
    """Whether a subgroup's lanes can exchange the state. 64-bit fields cannot be shuffled."""
    return all(typed(kind, compute) != "i64" for _, kind, _ in reducer.fields)


def _subgroup_text(reducer: Reducer) -> str:
    """fold_subgroup(): the states of a subgroup's lanes become one, the same to the bit in each."""
    names = [name for name, _, _ in reducer.fields]
    shuffles = " ".join(f"o.{name} = subgroupShuffleXor(s.{name}, d);" for name in names)
    first = " ".join(f"s.{name} = subgroupBroadcastFirst(s.{name});" for name in names)
    return (
        "fn fold_subgroup(mine: State, size: u32) -> State {\n  var s = mine; var o: State;\n"
        f"  for (var d = size >> 1u; d > 0u; d = d >> 1u) {{ {shuffles} s = merge(s, o); }}\n  {first}\n  return s;\n}}\n"
    )


def group_text(reducer: Reducer, compute: str, threads: int, subgroups: bool) -> str:
    """fold(): the states of a workgroup's threads become one, which every thread gets. To be called once per launch."""
    if not (subgroups and shufflable(reducer, compute)):
        return (
            f"var<workgroup> states: array<State, {threads}>;\n"
            f"fn fold(mine: State, lane: u32, size: u32, number: u32, within: u32) -> State {{\n"
            f"  states[lane] = mine;\n  workgroupBarrier();\n"
            f"  for (var d = {threads // 2}u; d > 0u; d = d >> 1u) {{\n"
            f"    if (lane < d) {{ states[lane] = merge(states[lane], states[lane + d]); }}\n    workgroupBarrier();\n  }}\n"
            f"  return states[0];\n}}\n"
        )
    return _subgroup_text(reducer) + (
        f"var<workgroup> states: array<State, {threads}>;\n"
        f"fn fold(mine: State, lane: u32, size: u32, number: u32, within: u32) -> State {{\n"
        f"  var s = fold_subgroup(mine, size);\n"
        f"  if (within == 0u) {{ states[number] = s; }}\n  workgroupBarrier();\n"
        f"  s = states[0];\n"
        f"  for (var j = 1u; j < {threads}u / size; j++) {{ s = merge(s, states[j]); }}\n"
        f"  return s;\n}}\n"
    )


def group_main(threads: int, subgroups: bool) -> str:
    """The head of a kernel whose workgroups each take a row; sets `group`, `lane` and what fold() wants."""
    builtins = (
        "@builtin(workgroup_id) w: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, "
        "@builtin(local_invocation_index) lane: u32"
    )
    sizes = "let size = 1u; let number = 0u; let within = 0u;"
    if subgroups:
        builtins += (
            ", @builtin(subgroup_size) size: u32, @builtin(subgroup_id) number: u32, "
            "@builtin(subgroup_invocation_id) within: u32"
        )
        sizes = ""
    return f"@compute @workgroup_size({threads}) fn main({builtins}) {{\n  {sizes}\n  let group = w.x + w.y * grid.x;\n"


def thread_main(threads: int) -> str:
    return (
        f"@compute @workgroup_size({threads}) fn main(@builtin(global_invocation_id) g: vec3<u32>, "
        f"@builtin(num_workgroups) grid: vec3<u32>) {{\n  let thread = g.x + g.y * grid.x * {threads}u;\n"
    )


def render(kernel: Reduce) -> str:
    reducer, compute = kernel.reducer, kernel.compute
    second = kernel.stage == "second"
    read = {"partial": "State"} if second else numbered("b", [element(name, kernel.quads) for name in kernel.inputs])
    written = {"partial": "State"} if kernel.stage == "first" else numbered("r", kernel.outputs)
    parts = [
        head(_fields(kernel), read, written, kernel.inputs),
        state_text(reducer, compute, len(kernel.inputs)),
    ]
    if kernel.stage == "first":
        write = "partial[part * p.rows + row] = s;"
    else:
        values = [typed(text, compute) for text in reducer.results[: len(kernel.outputs)]]
        write = "let n = f32(p.total); " + " ".join(
            f"r{j}[row] = {stored(name, f'{KINDS[name].compute}({value})')};"
            for j, (name, value) in enumerate(zip(kernel.outputs, values, strict=True))
        )
    return "".join(parts) + kernel.render_rows(
        reducer, "p.rows", lambda *worker: _body(kernel, write, *worker), compute, parts=not kernel.slots
    )


def _fields(kernel: Reduce) -> list[str]:
    names = ["rows", "length", "parts", "chunk", "total"]
    if kernel.stage != "second":
        inputs, kept, reduced = range(len(kernel.inputs)), range(kernel.kept), range(kernel.reduced)
        names += [*[f"k{d}" for d in kept], *[f"e{d}" for d in reduced], *[f"o{j}" for j in inputs]]
        names += [name for j in inputs for name in (*[f"k{j}_{d}" for d in kept], *[f"e{j}_{d}" for d in reduced])]
    return [*names, *[f"s{j}: f32" for j in range(kernel.scalars)]]


def _walk(kernel: Reduce, prefix: str, rank: int, variable: str, result: str) -> str:
    """Statements that add to each input's `result` the offset of linear index `variable` over `rank` dimensions."""
    count = len(kernel.inputs)
    if rank == 0:
        return ""
    if rank == 1:
        return " ".join(f"{result}{j} += {variable} * p.{prefix}{j}_0;" for j in range(count))
    lines = [f"var rest_{prefix} = {variable};"]
    for d in range(rank - 1, 0, -1):
        lines.append(
            f"let c_{prefix}{d} = rest_{prefix} % p.{prefix}{d}; rest_{prefix} = rest_{prefix} / p.{prefix}{d};"
        )
        lines += [f"{result}{j} += c_{prefix}{d} * p.{prefix}{j}_{d};" for j in range(count)]
    lines += [f"{result}{j} += rest_{prefix} * p.{prefix}{j}_0;" for j in range(count)]
    return " ".join(lines)


def _row_base(kernel: Reduce) -> str:
    if kernel.stage == "second":
        return ""
    start = " ".join(f"var base{j} = p.o{j};" for j in range(len(kernel.inputs)))
    return f"{start} {_walk(kernel, 'k', kernel.kept, 'row', 'base')}"


def _element(kernel: Reduce, index: str, tag: str) -> str:
    """Loads of one element, named by `tag`; `_fold` then adds it. Kept apart so several loads are in flight."""
    if kernel.stage == "second":
        return f"let m{tag} = partial[({index}) * p.rows + row];"
    count = len(kernel.inputs)
    return (
        f"let i{tag} = {index}; "
        + " ".join(f"var a{tag}_{j} = base{j};" for j in range(count))
        + _walk(kernel, "e", kernel.reduced, f"i{tag}", f"a{tag}_")
        .replace("rest_e", f"rest{tag}")
        .replace("c_e", f"c{tag}_")
        + " ".join(
            f" let x{tag}_{j} = {_converted(name, f'b{j}', f'a{tag}_{j}', kernel.compute)};"
            for j, name in enumerate(kernel.inputs)
        )
    )


def _converted(name: str, binding: str, index: str, compute: str) -> str:
    value = load(name, binding, index)
    return value if KINDS[name].compute == compute else f"{compute}({value})"


def _fold(kernel: Reduce, tag: str, state: str) -> str:
    if kernel.stage == "second":
        return f"{state} = merge({state}, m{tag});"
    values = "".join(f", x{tag}_{j}" for j in range(len(kernel.inputs)))
    return f"{state} = add({state}{values}, i{tag});"


def _quad_loop(kernel: Reduce, first: str, last: str, step: str) -> str:
    """As _loop, over quads; two loads are in flight."""
    name = kernel.inputs[0]

    def folds(state: str, quad: str, at: str) -> str:
        values = [quad_lane(name, quad, lane) for lane in range(4)]
        if KINDS[name].compute != kernel.compute:
            values = [f"{kernel.compute}({value})" for value in values]
        return " ".join(f"{state} = add({state}, {value}, {at} + {lane}u);" for lane, value in enumerate(values))

    def innermost(state: str, last: str) -> str:
        return (
            f"  for (; i + {step} < {last}; i += 2u * {step}) {{\n"
            f"    let a = b0[(base0 + i) >> 2u]; let b = b0[(base0 + i + {step}) >> 2u];\n"
            f"    {folds(state, 'a', 'i')}\n    {folds(state, 'b', f'i + {step}')}\n  }}\n"
            f"  for (; i < {last}; i += {step}) {{ let a = b0[(base0 + i) >> 2u]; {folds(state, 'a', 'i')} }}\n"
        )

    return f"  var i = {first};\n" + cascade(kernel.levels, last, step, innermost)


def _loop(kernel: Reduce, first: str, last: str, step: str) -> str:
    several = range(UNROLL)
    loads = "\n      ".join(_element(kernel, f"i + {u}u * {step}", f"_{u}") for u in several)

    def innermost(state: str, last: str) -> str:
        folds = " ".join(_fold(kernel, f"_{u}", state) for u in several)
        return (
            f"  for (; i + {UNROLL - 1}u * {step} < {last}; i += {UNROLL}u * {step}) "
            f"{{\n      {loads}\n      {folds}\n  }}\n"
            f"  for (; i < {last}; i += {step}) {{ {_element(kernel, 'i', '_r')} {_fold(kernel, '_r', state)} }}\n"
        )

    return f"  var i = {first};\n" + cascade(kernel.levels, last, step, innermost)


def _body(kernel: Reduce, write: str, first: str, step: str, fold: str, once: str) -> str:
    begin, last = ("", "p.length") if kernel.slots else ("part * p.chunk + ", "end")
    if kernel.quads:
        wide = "(size * 4u)" if kernel.slots else f"{4 * kernel.threads}u"
        loop = _quad_loop(kernel, f"{begin}{first} * 4u", last, wide)
    else:
        loop = _loop(kernel, f"{begin}{first}", last, step)
    end = "" if kernel.slots else "  let end = min(p.length, (part + 1u) * p.chunk);\n"
    return f"{end}  {_row_base(kernel)}\n  var s = start();\n{loop}{fold}  {once}{{ {write} }}\n"


# --- what can be folded ----------------------------------------------------------------------------------------------


def _simple(initial: str, add: str, merge: str, result: str = "s.v", kind: str = "{T}") -> Reducer:
    return Reducer((("v", kind, initial),), add, merge, (result,))


def sums(results: tuple[str, ...] = (), **added: str) -> Reducer:
    """Several sums at once: what each adds up, by its name in the state; the results are the sums unless given."""
    add, merge = (
        " ".join(f"s.{name} += {value};" for name, value in each.items())
        for each in (added, {name: f"o.{name}" for name in added})
    )
    fields = tuple((name, "f32", "0.0") for name in added)
    return Reducer(fields, add, merge, results or tuple(f"s.{name}" for name in added))


def extreme(sign: str, latest: bool = False) -> Reducer:
    """The largest (sign ">") or smallest ("<") element and the position of the first (or latest); a NaN wins over all."""
    none, earlier = "0xffffffffu", "o.i > s.i" if latest else "o.i < s.i"
    better = f"(!unordered(s.v) && (unordered(x0) || x0 {sign} s.v))"
    if latest:
        better = f"unordered(x0) || (!unordered(s.v) && x0 {sign}= s.v)"
    return Reducer(
        (("v", "{T}", "{T}(0)"), ("i", "u32", none)),
        f"if (s.i == {none} || {better}) {{ s.v = x0; s.i = i; }}",
        f"if (o.i != {none}) {{ let on = unordered(o.v); let sn = unordered(s.v);\n"
        f"  let tie = (on && sn) || (!on && !sn && o.v == s.v);\n"
        f"  if (s.i == {none} || (tie && {earlier}) || (!tie && !sn && (on || o.v {sign} s.v))) {{ s = o; }} }}",
        ("s.v", "s.i"),
    )


def _furthest(sign: str, initial: str) -> Reducer:
    """The largest or smallest distance from zero; a NaN wins over all."""
    add, merge = (
        f"if (!unordered(s.v) && (unordered({x}) || {value} {sign} s.v)) {{ s.v = {value}; }}"
        for x, value in (("x0", "abs(x0)"), ("o.v", "o.v"))
    )
    return _simple(initial, add, merge, kind="f32")


def add_moments(x: str) -> str:
    """Welford's update of count, mean and sum of squared deviations."""
    return f"s.n += 1.0; let d = {x} - s.mean; s.mean += d / s.n; s.m2 += d * ({x} - s.mean);"


MOMENTS = (("n", "f32", "0.0"), ("mean", "f32", "0.0"), ("m2", "f32", "0.0"))
MERGE_MOMENTS = (
    "let t = s.n + o.n; if (t > 0.0) { let d = o.mean - s.mean; let share = o.n / t; "
    "s.mean += d * share; s.m2 += o.m2 + d * d * s.n * share; s.n = t; }"
)
_VARIANCE = "divided(s.m2, max(n - p.s0, 0.0))"

# log of a sum of exponentials, with the largest term kept apart; inf - inf is never computed.
EXPONENTIALS = Reducer(
    (("m", "f32", "(-infinity())"), ("z", "f32", "0.0")),
    "if (!unordered(s.m)) { if (unordered(x0)) { s.m = x0; s.z = 1.0; }\n"
    "  else if (x0 > s.m) { s.z = select(s.z * exp(s.m - x0), 0.0, is_inf(x0) || s.z == 0.0) + 1.0; s.m = x0; }\n"
    "  else if (!is_inf(s.m)) { s.z += exp(x0 - s.m); } }",
    "if (!unordered(s.m)) { if (unordered(o.m)) { s = o; }\n"
    "  else if (o.m > s.m) { s.z = select(s.z * exp(s.m - o.m), 0.0, is_inf(o.m) || s.z == 0.0) + o.z; s.m = o.m; }\n"
    "  else if (o.z > 0.0) { if (o.m == s.m) { s.z += o.z; } else if (!is_inf(s.m)) { s.z += o.z * exp(o.m - s.m); } } }",
    ("select(s.m + log(s.z), s.m, is_inf(s.m))",),
)

REDUCERS: dict[str, Reducer] = {
    "sum": _simple("{T}(0)", "s.v += x0;", "s.v += o.v;"),
    "mean": _simple("{T}(0)", "s.v += x0;", "s.v += o.v;", "s.v / n"),
    "nansum": _simple("{T}(0)", "if (!unordered(x0)) { s.v += x0; }", "s.v += o.v;"),
    "prod": _simple("{T}(1)", "s.v *= x0;", "s.v *= o.v;"),
    # Not `x0 != 0`: a NaN is true, but need not be unequal to anything.
    "any": _simple("0i", "if (is_true_{T}(x0)) { s.v = 1i; }", "s.v |= o.v;", kind="i32"),
    "all": _simple("1i", "if (!is_true_{T}(x0)) { s.v = 0i; }", "s.v &= o.v;", kind="i32"),
    "count_nonzero": _simple("0i", "if (is_true_{T}(x0)) { s.v += 1i; }", "s.v += o.v;", kind="i32"),
    "count_numbers": _simple("0i", "if (!unordered(x0)) { s.v += 1i; }", "s.v += o.v;", kind="i32"),
    "amax": extreme(">"),
    "amin": extreme("<"),
    "var": Reducer(MOMENTS, add_moments("x0"), MERGE_MOMENTS, (_VARIANCE, "s.mean")),
    "std": Reducer(MOMENTS, add_moments("x0"), MERGE_MOMENTS, (f"sqrt({_VARIANCE})", "s.mean")),
    "norm0": _simple("0.0", "if (is_true_f32(x0)) { s.v += 1.0; }", "s.v += o.v;", kind="f32"),
    "norm1": sums(v="abs(x0)"),
    "norm2": sums(("sqrt(s.v)",), v="x0 * x0"),
    "normp": _simple("0.0", "s.v += pow_f32(abs(x0), p.s0);", "s.v += o.v;", "pow_f32(s.v, 1.0 / p.s0)", "f32"),
    "dot": sums(v="x0 * x1"),
    "normmax": _furthest(">", "0.0"),
    "normmin": _furthest("<", "infinity()"),
    "logsumexp": EXPONENTIALS,
}
