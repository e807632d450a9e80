"""Kernels that read or write elements at places other tensors name.

Gather, index, take, embedding and index_select are one kernel: walk over the result, add up where each index tensor
points, copy the element there. Scatter, index_put, index_copy and their accumulating forms are the same walk over the
source, writing. A tensor that is not indexed by anything (no index tensors) is a strided copy with steps of either sign,
which is what flip needs.

Copies move bits: an element is 1, 2, 4, 8 or 16 bytes whatever its dtype, and neighbours that travel together travel as
one wide element. int64 indices are read as two words, so no adapter needs 64-bit integers for them.

An index out of range reads zero and writes nothing: no launch touches memory outside its tensors. A walk that `reports` says
so in the fault buffer (`faults`), which is bound last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anytorch.gpu.wgsl.faults import reporting
from anytorch.gpu.wgsl.types import HELPERS, MAIN, buffers, head, offsets, parameters, words_main

WORKGROUP = 256
MOST_WORDS = 32

# Storage type of a buffer of elements of this many bytes, and how many of them are in one.
UNITS = {1: ("u32", 4), 2: ("u32", 2), 4: ("u32", 1), 8: ("vec2<u32>", 1), 16: ("vec4<u32>", 1)}

# Reductions that write: on 32-bit floats and integers. `narrower` dtypes are reduced in one of these, beside.
REDUCTIONS = ("sum", "prod", "amin", "amax")


@dataclass(frozen=True)
class Walk:
    """The geometry all these kernels share: a linear index becomes an offset per operand and one per index tensor."""

    operands: int  # tensors walked with strides of their own
    indices: tuple[str, ...]  # dtypes of the index tensors: "int64" or "int32"
    rank: int
    wrap: bool = False  # negative indices count from the end
    shape: tuple[int, ...] = ()  # with the two below: written into the shader, where the parameters cannot hold them
    strides: tuple[tuple[int, ...], ...] = ()
    extents: tuple[tuple[int, int], ...] = ()  # size and stride of each indexed dimension
    reports: bool = False  # indices out of range

    @property
    def walked(self) -> int:
        return self.operands + len(self.indices)

    @property
    def words(self) -> int:
        geometry = 0 if self.strides else self.rank * (self.walked + 1) + 2 * len(self.indices)
        return 2 + self.walked + geometry + self.reports

    def parameters(self) -> str:
        names = ["n", "row", *[f"o{i}" for i in range(self.walked)]]
        if not self.strides:
            names += [f"d{r}" for r in range(self.rank)]
            names += [f"t{i}_{r}" for i in range(self.walked) for r in range(self.rank)]
            names += [name for k in range(len(self.indices)) for name in (f"size{k}", f"step{k}")]
        if self.reports:
            names.append("site")
        return parameters(*names)

    def offsets(self, variable: str) -> str:
        """Statements that set a0, a1, … from the linear index."""
        return offsets(variable, range(self.walked), self.rank, self.shape, self.strides)

    def look_up(self, target: int, first_binding: int, otherwise: str) -> str:
        """Statements that add what the index tensors say to operand `target`'s offset, or `return` if out of range."""
        lines = []
        for k, name in enumerate(self.indices):
            size = f"{self.extents[k][0]}u" if self.strides else f"p.size{k}"
            step = f"{self.extents[k][1] % 2**32}u" if self.strides else f"p.step{k}"
            function = "index_at_64" if name == "int64" else "index_at_32"
            read = f"b{first_binding + k}[a{self.operands + k}]"
            lines.append(f"var j{k} = {function}({read});")
            if self.wrap:
                lines.append(f"if (j{k} < 0 && j{k} >= -i32({size})) {{ j{k} += i32({size}); }}")
            words = read if name == "int64" else f"vec2<u32>(bitcast<u32>({read}), bitcast<u32>({read} >> 31u))"
            report = f"report({k}u, {size}, {words}); " if self.reports else ""
            lines.append(f"if (u32(j{k}) >= {size}) {{ {report}return{otherwise}; }} a{target} += u32(j{k}) * {step};")
        return "\n  ".join(lines)


def _indices(walk: Walk, first_binding: int, bindings: int) -> str:
    elements = ["vec2<u32>" if name == "int64" else "i32" for name in walk.indices]
    parts = [buffers({f"b{first_binding + k}": each for k, each in enumerate(elements)}, first=first_binding)]
    if "int64" in walk.indices:
        # A value beyond 32 bits becomes one that is out of every range.
        parts.append(
            "fn index_at_64(w: vec2<u32>) -> i32 { let low = bitcast<i32>(w.x);\n"
            "  return select(bitcast<i32>(0x80000000u), low, bitcast<i32>(w.y) == (low >> 31u)); }\n"
        )
    if "int32" in walk.indices:
        parts.append("fn index_at_32(w: i32) -> i32 { return w; }\n")
    if walk.reports:
        parts.append(reporting(bindings))
    return "".join(parts)


def _element(nbytes: int) -> tuple[str, int, int]:
    """(WGSL type of one element's bits, elements per word, bits per element)"""
    storage, lanes = UNITS[nbytes]
    return storage, lanes, 32 // lanes


def _loaded(nbytes: int, binding: str, index: str) -> str:
    _, lanes, bits = _element(nbytes)
    if lanes == 1:
        return f"{binding}[{index}]"
    shift, mask = lanes.bit_length() - 1, lanes - 1
    return f"(({binding}[{index} >> {shift}u] >> (({index} & {mask}u) * {bits}u)) & {(1 << bits) - 1:#x}u)"


@dataclass(frozen=True)
class Gather:
    """result[i] = source[where the index tensors say]; the result is dense and starts on a word.

    Bindings: source, index tensors, result.
    """

    nbytes: int  # of an element
    walk: Walk  # its one operand is the source

    @property
    def per_thread(self) -> int:
        return UNITS[self.nbytes][1]

    @property
    def buffers(self) -> int:
        return 2 + len(self.walk.indices)

    @property
    def writable(self) -> int:
        return 1 << (self.buffers - 1)


def render_gather(kernel: Gather) -> str:
    walk = kernel.walk
    storage, lanes, _ = _element(kernel.nbytes)
    out = kernel.buffers - 1
    text = (
        f"{buffers({'b0': storage})}{_indices(walk, 1, out + 1)}{buffers({}, {'result': storage}, out)}{walk.parameters()}"
        f"fn fetch(i: u32) -> {storage} {{\n  {walk.offsets('i')}\n  {walk.look_up(0, 1, f' {storage}()')}\n"
        f"  return {_loaded(kernel.nbytes, 'b0', 'a0')};\n}}\n"
    )
    if lanes == 1:
        return f"{text}{MAIN}  if (thread < p.n) {{ result[thread] = fetch(thread); }}\n}}\n"
    return text + words_main(lanes, "fetch(first + k)", "result[thread]")


@dataclass(frozen=True)
class Scatter:
    """target[where the index tensors say] = source[i], or combined with what is there.

    Bindings: source, target, index tensors. `walk`'s operands are the source and the target.
    """

    nbytes: int
    walk: Walk
    mode: str = "set"  # or one of REDUCTIONS, on `dtype`
    dtype: str = ""  # "float32", "int32", or "int64" (sums only)
    float_atomics: bool = False

    @property
    def per_thread(self) -> int:
        return 1

    @property
    def buffers(self) -> int:
        return 2 + len(self.walk.indices)

    @property
    def writable(self) -> int:
        return 0b10


def render_scatter(kernel: Scatter) -> str:
    walk = kernel.walk
    storage, _, _ = _element(kernel.nbytes)
    element, put = _put(kernel)
    source = {"float32": "f32", "int32": "i32"}.get(kernel.dtype, storage)
    return (
        f"{buffers({'b0': source}, {'there': element})}{_indices(walk, 2, kernel.buffers)}{walk.parameters()}{put}"
        f"{MAIN}  if (thread >= p.n) {{ return; }}\n  {walk.offsets('thread')}\n  {walk.look_up(1, 2, '')}\n"
        f"  put(a1, {_loaded(kernel.nbytes, 'b0', 'a0')});\n}}\n"
    )


COMBINE = {
    "sum": "old + value",
    "prod": "old * value",
    "amin": "select(value, old, old < value)",
    "amax": "select(value, old, old > value)",
}


def _put(kernel: Scatter) -> tuple[str, str]:
    """The type of the target's elements, and the function that writes one."""
    storage, lanes, bits = _element(kernel.nbytes)
    if kernel.mode == "set":
        if lanes == 1:
            return storage, f"fn put(at: u32, value: {storage}) {{ there[at] = value; }}\n"
        shift, mask = lanes.bit_length() - 1, (1 << bits) - 1
        return "atomic<u32>", (
            f"fn put(at: u32, value: u32) {{\n  let word = at >> {shift}u; let place = (at & {lanes - 1}u) * {bits}u;\n"
            "  var old = atomicLoad(&there[word]);\n  loop {\n"
            f"    let changed = (old & ~({mask:#x}u << place)) | (value << place);\n"
            "    let tried = atomicCompareExchangeWeak(&there[word], old, changed);\n"
            "    if (tried.exchanged) { break; }\n    old = tried.old_value;\n  }\n}\n"
        )
    if kernel.dtype == "int64":
        assert kernel.mode == "sum", "64-bit atomics exist for sums only: two words and a carry"
        return "array<atomic<u32>, 2>", (
            "fn put(at: u32, value: vec2<u32>) {\n  let old = atomicAdd(&there[at][0], value.x);\n"
            "  atomicAdd(&there[at][1], value.y + select(0u, 1u, old + value.x < old));\n}\n"
        )
    if kernel.dtype == "int32" and kernel.mode != "prod":
        function = {"sum": "atomicAdd", "amin": "atomicMin", "amax": "atomicMax"}[kernel.mode]
        return "atomic<i32>", f"fn put(at: u32, value: i32) {{ {function}(&there[at], value); }}\n"
    if kernel.dtype == "float32" and kernel.mode == "sum" and kernel.float_atomics:
        return "atomic<f32>", "fn put(at: u32, value: f32) { atomicAdd(&there[at], value); }\n"
    kind = "f32" if kernel.dtype == "float32" else "i32"
    combined = COMBINE[kernel.mode]
    helpers = ""
    if kind == "f32" and kernel.mode in ("amin", "amax"):  # a NaN on either side stays
        helpers = HELPERS["is_nan"]
        combined = f"select(select({combined}, old, is_nan(old)), value, is_nan(value))"
    return "atomic<u32>", (
        f"{helpers}fn put(at: u32, value: {kind}) {{\n  var bits = atomicLoad(&there[at]);\n  loop {{\n"
        f"    let old = bitcast<{kind}>(bits);\n    let new_bits = bitcast<u32>({combined});\n"
        "    if (new_bits == bits) { break; }\n"
        "    let tried = atomicCompareExchangeWeak(&there[at], bits, new_bits);\n"
        "    if (tried.exchanged) { break; }\n    bits = tried.old_value;\n  }\n}\n"
    )


def widest(nbytes: int, length: int, numbers: Sequence[int]) -> int:
    """How many bytes can travel as one element: at most 16, a divisor of the run's length and of every offset and stride.

    `length` is that of the innermost dimension, which every operand walks step by step; `numbers` are all the other
    strides and the offsets, in elements.
    """
    for wide in (16, 8, 4, 2):
        factor = wide // nbytes
        if factor < 1:
            break
        if length % factor == 0 and all(number % factor == 0 for number in numbers):
            return wide
    return nbytes


@dataclass(frozen=True)
class Compact:
    """positions[count[i] - 1] = i for every element i of a mask that is set; `counts` is the mask's running sum (int32).

    With `shape`, a row of coordinates per element instead of the linear position; int64, as two words.
    Bindings: mask (bytes), counts, positions.
    """

    rank: int


def render_compact(kernel: Compact) -> str:
    rows = []
    for r in range(kernel.rank - 1, -1, -1):
        value = f"rest % p.d{r}" if r else "rest"
        rows.append(f"  positions[base + {r}u] = vec2<u32>({value}, 0u); " + (f"rest = rest / p.d{r};" if r else ""))
    body = "\n".join(rows)
    return (
        head(
            ("n", "row", "o_mask", "o_counts", *[f"d{r}" for r in range(kernel.rank)]),
            *({"mask": "u32", "counts": "i32"}, {"positions": "vec2<u32>"}),
        )
        + f"{MAIN}  if (thread >= p.n) {{ return; }}\n  let at = thread + p.o_mask;\n"
        "  if (((mask[at >> 2u] >> ((at & 3u) * 8u)) & 255u) == 0u) { return; }\n"
        f"  let base = (u32(counts[thread + p.o_counts]) - 1u) * {kernel.rank}u;\n  var rest = thread;\n{body}\n}}\n"
    )
