"""Sums, means, extremes, variances, norms: anything that folds some dimensions of a tensor away."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, Buffer
from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, device_memory, open_runtime
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, collapse
from anytorch.gpu.wgsl.reduce import QUADS, REDUCERS, SLOTS, THREADS, Reduce, Reducer, render, shufflable
from anytorch.gpu.wgsl.types import KINDS, supported
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import to_meta
from anytorch.webgpu.pieces import TooLarge, attempt
from anytorch.webgpu.pointwise import MOST_GROUPS, name_of
from anytorch.webgpu.tensors import NAME, aten, new_contiguous

# --- shared with the other families of row kernels --------------------------------------------------------------------


SHORT = 1024  # up to this length a subgroup takes a row


def grid(groups: int) -> tuple[int, int]:
    """Workgroups folded into two dimensions; kernels rebuild the number from num_workgroups."""
    x = min(groups, MOST_GROUPS)
    return x, -(-groups // x)


def usable(runtime: Runtime, *dtypes: torch.dtype) -> bool:
    """Do our row kernels know these dtypes on this adapter? float64 is left to the CPU: few GPUs have it."""
    return all(dtype is not torch.float64 and supported(name_of(dtype), runtime.features) for dtype in dtypes)


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a kernel whose threads do not own whole words writes instead of a narrow dtype; a copy narrows it after."""
    if KINDS[name_of(dtype)].lanes == 1:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32


def narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype is dtype:
        return tensor
    made = new_contiguous(tensor.shape, dtype)
    return on_device(tensor, made) if tensor.numel() else made


def element_offset(tensor: torch.Tensor) -> int:
    return (tensor.data_ptr() & OFFSET_MASK) // tensor.dtype.itemsize


def buffers(runtime: Runtime, tensors: Sequence[torch.Tensor]) -> list[Buffer]:
    """The tensors' buffers, to be bound whole."""
    found = [runtime.buffers[tensor.data_ptr() >> SHIFT] for tensor in tensors]
    return bindable(runtime, found)


def bindable(runtime: Runtime, found: list[Buffer]) -> list[Buffer]:
    for buffer in found:
        if buffer.nbytes > runtime.binding_limit:
            raise TooLarge
    return found


def guarded(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, on halves of tensors beyond the adapter's binding limit, and on the CPU where that is no help."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except TooLarge:
            made = attempt(op, kernel, args, kwargs)
            return fallback(op, *args, **kwargs) if made is None else made

    return call


def on_webgpu(op: Any, *tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type != NAME:
            raise RuntimeError(
                f"{op}: expected all tensors to be on {NAME}, but one is on {tensor.device}; move it with .to('{NAME}')"
            )


_inferred: dict[Any, Any] = {}


def infer(op: Any, *args: Any, **kwargs: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Sizes and dtypes of an op's results by torch's own meta kernels, which also raise torch's own errors."""
    key = (op, tuple(_mark(v) for v in args), tuple((name, _mark(v)) for name, v in kwargs.items()))
    known = _inferred.get(key)
    if known is None:
        made = op(*[to_meta(v) for v in args], **{name: to_meta(v) for name, v in kwargs.items()})
        known = [(t.size(), t.dtype) for t in (made if isinstance(made, (tuple, list)) else (made,))]
        _inferred[key] = known
    return known


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.size(), value.stride())
    return tuple(value) if isinstance(value, list) else (type(value), value)


def register_with_out(library: torch.library.Library, op: Any, kernel: Callable[..., Any]) -> None:
    """Register a functional kernel, and for every `out=` overload with the same arguments one that copies its results."""
    kernel = guarded(op, kernel)
    library.impl(op, kernel, "PrivateUse1")
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = getattr(aten, op._schema.name.split("::")[1])
    for name in packet.overloads():
        candidate = getattr(packet, name)
        outs = [a for a in candidate._schema.arguments if a.kwarg_only and a.alias_info is not None]
        rest = [(a.name, str(a.type)) for a in candidate._schema.arguments if a not in outs]
        if outs and rest == wanted:
            library.impl(candidate, _into_outs(candidate, kernel, [a.name for a in outs]), "PrivateUse1")


def _into_outs(op: Any, kernel: Callable[..., Any], outs: list[str]) -> Callable[..., Any]:
    def into(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in outs]
        made = kernel(*args, **kwargs)
        made = made if isinstance(made, (tuple, list)) else (made,)
        for target, value in zip(targets, made, strict=True):
            if not torch.can_cast(value.dtype, target.dtype):
                raise RuntimeError(
                    f"{op}: result type {value.dtype} can't be cast to the desired output type {target.dtype}"
                )
            if target.shape != value.shape:
                torch._prims_common.wrappers._maybe_resize_out(target, value.shape)
            if value.numel():
                on_device(value, target)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return into


# --- the general reduction --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    program: Program
    x: int
    y: int
    head: tuple[int, ...]  # rows, length, parts, chunk, total
    geometry: tuple[Any, ...]  # per input: its strides, after the sizes
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    first: Launch
    second: Launch | None
    partial_words: int
    outputs: tuple[torch.dtype, ...]
    pack: struct.Struct
    pack_second: struct.Struct | None


_plans: dict[Any, Plan | None] = device_memory()

# What a fold of nothing is, per reducer: its results' values.
_OF_NOTHING: dict[str, tuple[float, ...]] = {
    "mean": (math.nan,),
    "prod": (1,),
    "all": (1,),
    "var": (math.nan, math.nan),
    "std": (math.nan, math.nan),
    "logsumexp": (-math.inf,),
}


def reduce_dims(
    name: str,
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    outputs: Sequence[torch.dtype],
    size: Sequence[int],
    scalars: tuple[float, ...] = (),
    compute: str | None = None,
    reducer: Reducer | None = None,
) -> list[torch.Tensor]:
    """Fold `dims` of the inputs (all of one shape, any strides) away; the results are contiguous and of shape `size`.

    `compute` is the WGSL type elements are converted to; the first input's own where it is not given. The dtypes must be
    usable(). `reducer` is given where `name` is not one of REDUCERS.
    """
    runtime = open_runtime()
    first = inputs[0]
    if first.numel() == 0:
        values = _OF_NOTHING.get(name, (0,) * len(outputs))
        return [new_contiguous(size, dtype).fill_(value) for dtype, value in zip(outputs, values, strict=False)]
    plan = find_plan(runtime, name, inputs, dims, outputs, len(scalars), compute, reducer)
    if plan is None:  # more dimensions than the parameters hold: bring the folded ones together
        kept = [d for d in range(first.dim()) if d not in dims]
        order = [*kept, *dims]
        inputs = [t.permute(order).contiguous() for t in inputs]
        dims = range(len(kept), first.dim())
        return reduce_dims(name, inputs, dims, outputs, size, scalars, compute, reducer)
    results = [new_contiguous(size, dtype) for dtype in plan.outputs]
    _run(runtime, plan, inputs, results, scalars)
    return [narrowed(t, dtype) for t, dtype in zip(results, outputs, strict=True)]


def find_plan(
    runtime: Runtime,
    name: str,
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    outputs: Sequence[torch.dtype],
    scalars: int,
    compute: str | None,
    reducer: Reducer | None,
) -> Plan | None:
    misaligned = inputs[0].data_ptr() & 15
    geometry = [(t.dtype, t.size(), t.stride()) for t in inputs]
    key = (name, tuple(dims), tuple(outputs), compute, scalars, misaligned == 0, *geometry)
    plan = _plans.get(key, False)
    if plan is False:
        made = _make_plan(runtime, reducer or REDUCERS[name], inputs, dims, outputs, scalars, compute)
        plan = _plans[key] = made
    assert plan is None or isinstance(plan, Plan)
    return plan


def _run(
    runtime: Runtime,
    plan: Plan,
    inputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    scalars: tuple[float, ...],
) -> None:
    first, second = plan.first, plan.second
    words = [*first.head, *first.sizes]
    for tensor, strides in zip(inputs, first.geometry, strict=True):
        words.append(element_offset(tensor))
        words += strides
    offsets = (0,) * len(results)  # results are fresh: they start their buffers
    bound = buffers(runtime, inputs)
    if second is None:
        immediates = plan.pack.pack(*words, *offsets, *scalars)
        runtime.dispatch(first.program, [*bound, *buffers(runtime, results)], immediates, first.x, first.y)
        return
    assert plan.pack_second is not None
    partial = new_contiguous((plan.partial_words,), torch.int32)
    between = buffers(runtime, [partial])
    runtime.dispatch(first.program, [*bound, *between], plan.pack.pack(*words, *offsets, *scalars), first.x, first.y)
    runtime.dispatch(
        second.program,
        [*between, *buffers(runtime, results)],
        plan.pack_second.pack(*second.head, *offsets, *scalars),
        second.x,
        second.y,
    )


def _make_plan(
    runtime: Runtime,
    reducer: Reducer,
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    outputs: Sequence[torch.dtype],
    scalars: int,
    compute: str | None,
) -> Plan | None:
    shape = inputs[0].shape
    strides = [t.stride() for t in inputs]
    kept = [d for d in range(len(shape)) if d not in dims]
    kept_sizes, kept_steps = collapse([shape[d] for d in kept], [[s[d] for d in kept] for s in strides])
    row_sizes, row_steps = collapse([shape[d] for d in dims], [[s[d] for d in dims] for s in strides])
    rows, length = math.prod(kept_sizes), math.prod(row_sizes)
    written = tuple(word_dtype(dtype) for dtype in outputs)
    kernel = Reduce(
        reducer,
        tuple(name_of(t.dtype) for t in inputs),
        tuple(name_of(dtype) for dtype in written),
        compute or KINDS[name_of(inputs[0].dtype)].compute,
        len(kept_sizes),
        len(row_sizes),
        scalars=scalars,
    )
    if kernel.words > MOST_WORDS:
        return None
    # Neighbouring threads should read neighbouring elements: along the row, or across rows, whichever steps less.
    across = bool(kept_steps[0]) and (not row_steps[0] or kept_steps[0][-1] < row_steps[0][-1])
    group, threads, parts = share_work(rows, length, across, runtime.adapter.software)
    chunk = -(-length // parts)
    quads = group and len(inputs) == 1 and _in_quads(inputs[0], length, kept_steps[0], row_steps[0])
    if quads:
        chunk = -(-chunk // 4) * 4
        parts = -(-length // chunk)
    subgroups = group and has_subgroups(runtime)
    slots = subgroups and parts == 1 and length <= SHORT and shufflable(reducer, kernel.compute)
    chosen = {"group": group, "threads": threads, "subgroups": subgroups, "quads": quads, "slots": slots}
    fields = {**kernel.__dict__, **chosen}
    geometry = tuple((*kept, *row) for kept, row in zip(kept_steps, row_steps, strict=True))
    sizes = (*kept_sizes, *row_sizes)
    head = (rows, length, parts, chunk, length)
    code = f"<{5 + len(sizes) + sum(1 + len(g) for g in geometry) + len(outputs)}I{scalars}f"
    workers = rows * parts
    x, y = grid(-(-rows // SLOTS) if slots else workers if group else -(-workers // threads))
    if parts == 1:
        first = Launch(_program(runtime, Reduce(**fields)), x, y, head, geometry, sizes)
        return Plan(first, None, 0, written, struct.Struct(code), None)
    first = Launch(_program(runtime, Reduce(**{**fields, "stage": "first"})), x, y, head, geometry, sizes)
    small = runtime.adapter.software or parts <= 32 or rows >= 256
    folded: dict[str, Any] = {"stage": "second", "group": not small, "threads": 64, "quads": False}
    last = Reduce(**{**fields, **folded, "subgroups": not small and has_subgroups(runtime)})
    x, y = grid(rows if last.group else -(-rows // 64))
    second = Launch(_program(runtime, last), x, y, (rows, parts, 1, parts, length), (), ())
    return Plan(
        first,
        second,
        workers * state_words(reducer, kernel.compute),
        written,
        struct.Struct(code),
        struct.Struct(f"<{5 + len(outputs)}I{scalars}f"),
    )


def _in_quads(x: torch.Tensor, length: int, kept_steps: Sequence[int], row_steps: Sequence[int]) -> bool:
    dense = list(row_steps) == [1] and length % 4 == 0 and all(step % 4 == 0 for step in kept_steps)
    return dense and name_of(x.dtype) in QUADS and x.data_ptr() & 15 == 0


def part_states(
    reducer: Reducer, x: torch.Tensor, dims: Sequence[int], parts: int, chunk: int, compute: str
) -> torch.Tensor:
    """The states of each row's parts, `chunk` elements each, as raw words in the order (part, row)."""
    runtime = open_runtime()
    shape, stride = x.shape, x.stride()
    kept = [d for d in range(len(shape)) if d not in dims]
    kept_sizes, (kept_steps,) = collapse([shape[d] for d in kept], [[stride[d] for d in kept]])
    row_sizes, (row_steps,) = collapse([shape[d] for d in dims], [[stride[d] for d in dims]])
    rows, length = math.prod(kept_sizes), math.prod(row_sizes)
    kernel = Reduce(
        reducer,
        (name_of(x.dtype),),
        (),
        compute,
        len(kept_sizes),
        len(row_sizes),
        stage="first",
        threads=256,
        group=True,
        subgroups=has_subgroups(runtime),
    )
    states = new_contiguous((rows * parts * state_words(reducer, compute),), torch.int32)
    words = (rows, length, parts, chunk, length, *kept_sizes, *row_sizes, element_offset(x), *kept_steps, *row_steps)
    runtime.dispatch(
        _program(runtime, kernel),
        buffers(runtime, [x, states]),
        struct.pack(f"<{len(words)}I", *words),
        *grid(rows * parts),
    )
    return states


def share_work(rows: int, length: int, across: bool, software: bool) -> tuple[bool, int, int]:
    """Whether a workgroup takes a row, its threads, and the parts a row is cut into."""
    if software:
        return False, THREADS, 1 if rows >= 32 or length <= 1024 else min(-(-length // 512), 256)
    if across or length <= 16:
        wanted = 1 << 16  # threads that keep a large GPU busy
        return False, THREADS, max(1, min(wanted // rows, -(-length // 32)))
    if length <= 512:
        return True, 64, 1
    return True, 256, 1 if rows >= 512 or length <= 8192 else max(1, min(1024 // rows, -(-length // 4096)))


def has_subgroups(runtime: Runtime) -> bool:
    return "subgroup" in runtime.features and not runtime.adapter.software


def state_words(reducer: Reducer, compute: str) -> int:
    """32-bit words of a state in a buffer, with WGSL's alignment."""
    at, widest = 0, 1
    for _, kind, _ in reducer.fields:
        words = 2 if kind.replace("{T}", compute) == "i64" else 1
        widest = max(widest, words)
        at = -(-at // words) * words + words
    return -(-at // widest) * widest


def _program(runtime: Runtime, kernel: Reduce) -> Program:
    return runtime.programs.make(
        kernel, lambda: render(kernel), buffers=kernel.buffers, writable=kernel.writable, immediates=4 * kernel.words
    )


# --- the ops ----------------------------------------------------------------------------------------------------------

Chosen = tuple[str, tuple[float, ...], "str | None"]  # reducer, scalars, type to compute in


@dataclass(frozen=True)
class Reduction:
    """How an op's arguments (by name) become a fold. `choose` returns None for what the CPU must do.

    `results`: which of the reducer's results the op returns, in its order.
    """

    choose: Callable[[dict[str, Any], list[torch.dtype]], Chosen | None]
    results: tuple[int, ...] = (0,)


def _plain(name: str) -> Reduction:
    return Reduction(lambda values, dtypes: (name, (), None))


def _in_result(name: str) -> Reduction:
    """Elements are converted to the result's type first, as torch does for sums."""
    return Reduction(lambda values, dtypes: (name, (), KINDS[name_of(dtypes[0])].compute))


def _spread(name: str, results: tuple[int, ...]) -> Reduction:
    def choose(values: dict[str, Any], dtypes: list[torch.dtype]) -> Chosen:
        correction = values.get("correction")
        if correction is None:
            correction = 0.0 if values.get("unbiased") is False else 1.0
        return name, (float(correction),), "f32"

    return Reduction(choose, results)


def _norm(values: dict[str, Any], dtypes: list[torch.dtype]) -> Chosen | None:
    order = values["ord"] if "ord" in values else values["p"]
    order = 2.0 if order is None else float(order)
    known = {0.0: "norm0", 1.0: "norm1", 2.0: "norm2"}
    if order in known:
        return known[order], (), "f32"
    if math.isinf(order):
        return ("normmax" if order > 0 else "normmin"), (), "f32"
    return "normp", (order,), "f32"


OPS: dict[str, Reduction] = {
    **dict.fromkeys(("sum", "sum.dim_IntList"), _in_result("sum")),
    **dict.fromkeys(("mean", "mean.dim"), _in_result("mean")),
    **dict.fromkeys(("prod", "prod.dim_int"), _in_result("prod")),
    "nansum": _in_result("nansum"),
    **dict.fromkeys(("any", "any.dim", "any.dims"), _plain("any")),
    **dict.fromkeys(("all", "all.dim", "all.dims"), _plain("all")),
    **dict.fromkeys(("count_nonzero", "count_nonzero.dim_IntList"), _plain("count_nonzero")),
    **dict.fromkeys(("amax", "max"), _plain("amax")),
    **dict.fromkeys(("amin", "min"), _plain("amin")),
    "max.dim": Reduction(lambda values, dtypes: ("amax", (), None), (0, 1)),
    "min.dim": Reduction(lambda values, dtypes: ("amin", (), None), (0, 1)),
    "argmax": Reduction(lambda values, dtypes: ("amax", (), None), (1,)),
    "argmin": Reduction(lambda values, dtypes: ("amin", (), None), (1,)),
    "var.correction": _spread("var", (0,)),
    "std.correction": _spread("std", (0,)),
    "var_mean.correction": _spread("var", (0, 1)),
    "std_mean.correction": _spread("std", (0, 1)),
    **dict.fromkeys(("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype"), Reduction(_norm)),
    "logsumexp": Reduction(lambda values, dtypes: ("logsumexp", (), "f32")),
}


def _kernel(op: Any, reduction: Reduction) -> Callable[..., Any]:
    arguments = op._schema.arguments
    names = [a.name for a in arguments]
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in arguments}
    indices = reduction.results

    known: dict[Any, Ready | None] = device_memory()

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready | None:
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        x: torch.Tensor = values["self"]
        inferred = infer(op, *args, **kwargs)
        dtypes = [dtype for _, dtype in inferred]
        chosen = reduction.choose(values, dtypes) if usable(open_runtime(), x.dtype, *dtypes) else None
        if chosen is None:
            return None
        name, scalars, compute = chosen
        if name in ("amax", "amin") and not x.numel() and inferred[0][0].numel():
            raise RuntimeError(
                f"{op.overloadpacket}(): Expected reduction dim to be specified for input.numel() == 0. "
                "Specify the reduction dim with the 'dim' argument."
            )
        wanted = tuple(dtypes)
        if max(indices) + 1 > len(
            indices
        ):  # an index is asked for without its value: the value is written all the same
            wanted = (x.dtype, dtypes[0])
        return Ready(name, _dims(op, values.get("dim"), x.dim()), wanted, inferred[0][0], scalars, compute)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        key: Any = (x.dtype, x.size(), x.stride(), x.data_ptr() & 15 == 0)
        for value in args[1:]:
            key += (tuple(value),) if isinstance(value, list) else (value,)
        for item in kwargs.items():
            key += item
        ready = known.get(key)
        if ready is None:
            if key not in known:
                known[key] = prepare(args, kwargs)
            ready = known[key]
            if ready is None:
                return fallback(op, *args, **kwargs)
        made = ready.run(x)
        return made[indices[0]] if len(indices) == 1 else tuple(made)

    return kernel


def _dims(op: Any, dim: Any, rank: int) -> Sequence[int]:
    """The dimensions an op's argument means, in order."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        # An empty list means no dimension to any and all, and every one to the rest.
        return () if dim is not None and op._overloadname == "dims" else range(rank)
    if isinstance(dim, int):
        return (dim % rank,) if rank else ()
    return sorted(d % rank for d in dim) if rank else ()


class Ready:
    """A reduction of one tensor with everything decided that its geometry decides."""

    __slots__ = ("compute", "dims", "head", "name", "outputs", "plan", "scalars", "shift", "size", "tail")

    def __init__(
        self,
        name: str,
        dims: Sequence[int],
        outputs: tuple[torch.dtype, ...],
        size: Sequence[int],
        scalars: tuple[float, ...],
        compute: str | None,
    ) -> None:
        self.name, self.dims, self.outputs, self.size = name, dims, outputs, size
        self.scalars, self.compute = scalars, compute
        self.plan: Plan | None = None
        self.shift = 0
        self.head = self.tail = b""

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        plan = self.plan
        if plan is None:
            self._settle(x)
            return reduce_dims(self.name, (x,), self.dims, self.outputs, self.size, self.scalars, self.compute)
        runtime = open_runtime()
        address = x.data_ptr()
        first = plan.first
        made = [new_contiguous(self.size, dtype) for dtype in self.outputs]
        bound = [runtime.buffers[address >> SHIFT], *[runtime.buffers[t.data_ptr() >> SHIFT] for t in made]]
        offset = _U32((address & OFFSET_MASK) >> self.shift)
        runtime.dispatch(first.program, bindable(runtime, bound), self.head + offset + self.tail, first.x, first.y)
        return made

    def _settle(self, x: torch.Tensor) -> None:
        """Keep the plan for the next call, if it is one launch into results of their own dtypes."""
        if not x.numel():
            return
        plan = find_plan(
            open_runtime(), self.name, (x,), self.dims, self.outputs, len(self.scalars), self.compute, None
        )
        if plan is None or plan.second is not None or plan.outputs != self.outputs:
            return
        first = plan.first
        self.head = struct.pack(f"<{5 + len(first.sizes)}I", *first.head, *first.sizes)
        steps = first.geometry[0]
        blank = (0,) * len(self.outputs)
        self.tail = struct.pack(f"<{len(steps) + len(blank)}I{len(self.scalars)}f", *steps, *blank, *self.scalars)
        self.shift = x.dtype.itemsize.bit_length() - 1
        self.plan = plan


_U32 = struct.Struct("<I").pack


def _aminmax(self: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    (size, dtype), _ = infer(aten.aminmax.default, self, dim=dim, keepdim=keepdim)
    if not usable(open_runtime(), dtype):
        return fallback(aten.aminmax.default, self, dim=dim, keepdim=keepdim)
    dims = range(self.dim()) if dim is None else ((dim % self.dim(),) if self.dim() else ())
    low, high = (reduce_dims(name, (self,), dims, [dtype], size)[0] for name in ("amin", "amax"))
    return low, high


def register(library: torch.library.Library) -> None:
    for name, reduction in OPS.items():
        base, _, overload = name.partition(".")
        packet = getattr(aten, base)
        op = getattr(packet, overload or "default")
        register_with_out(library, op, _kernel(op, reduction))
    register_with_out(library, aten.aminmax.default, _aminmax)
