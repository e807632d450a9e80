"""`new_kernel_graph`: a graph that is built op by op, searched for its fastest kernels, and called on tensors.

    g = anytorch.new_kernel_graph()
    x = g.new_input(("b", 4096))
    w = g.new_input((4096, 6144))
    g.mark_output(g.matmul(g.rms_norm(x), w))
    g.superoptimize()
    y, = g(x_tensor, w_tensor)

The names are Mirage's. A graph that was not searched runs op by op through torch, with the same results.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Union

from anytorch.devices.choose import resolve
from anytorch.devices.registry import registry
from anytorch.errors import GraphError, UnknownDevice
from anytorch.files import parse_json
from anytorch.graph import ops
from anytorch.graph.ir import Builder, Graph, Node
from anytorch.graph.sizes import Shape, Size, SizeLike, divided, product, read_size, row_major, words

if TYPE_CHECKING:
    import torch

    from anytorch.graph.program import Program
    from anytorch.graph.search import Found

Operand = Union["DTensor", int, float]
TIME_LIMIT_S = 60.0
HAND_WRITTEN = (
    "hand-written thread-block graphs are not supported: write what they compute with the graph's own ops "
    "(matmul, exp, reduction, …); superoptimize() finds the tiles and loops"
)


class DTensor:
    """A value in a graph under construction. It knows its shape and dtype, and takes part in arithmetic."""

    __slots__ = ("graph", "number")

    def __init__(self, graph: KernelGraph, number: int) -> None:
        self.graph, self.number = graph, number

    @property
    def node(self) -> Node:
        return self.graph._builder.nodes[self.number]

    @property
    def shape(self) -> Shape:
        return self.node.shape

    dims = shape  # Mirage's name

    @property
    def dtype(self) -> str:
        return self.node.dtype

    def __repr__(self) -> str:
        return f"DTensor({self.dtype}{words(self.shape)})"

    def __add__(self, other: Operand) -> DTensor:
        return self.graph.add(self, other)

    def __sub__(self, other: Operand) -> DTensor:
        return self.graph.sub(self, other)

    def __mul__(self, other: Operand) -> DTensor:
        return self.graph.mul(self, other)

    def __truediv__(self, other: Operand) -> DTensor:
        return self.graph.div(self, other)

    def __pow__(self, other: Operand) -> DTensor:
        return self.graph.pow(self, other)

    def __radd__(self, other: float) -> DTensor:
        return self.graph.add(other, self)

    def __rsub__(self, other: float) -> DTensor:
        return self.graph.sub(other, self)

    def __rmul__(self, other: float) -> DTensor:
        return self.graph.mul(other, self)

    def __rtruediv__(self, other: float) -> DTensor:
        return self.graph.div(other, self)

    def __neg__(self) -> DTensor:
        return self.graph.mul(self, -1)

    def __matmul__(self, other: DTensor) -> DTensor:
        return self.graph.matmul(self, other)


class KernelGraph:
    """A graph of ops on tensors. `backend` is where it will run: a back end's name, or "auto" for where its inputs are."""

    def __init__(self, backend: str = "auto") -> None:
        known = registry()
        names = ["auto", *known.backends]
        if backend not in names and backend not in {alias for b in known.backends.values() for alias in b.aliases}:
            raise UnknownDevice(f"unknown back end {backend!r}; known: {', '.join(names)}")
        self.backend = backend
        self._builder = Builder()
        self._outputs: list[int] = []
        self._found: dict[tuple[Any, ...], Found] = {}
        self._ready: dict[tuple[Any, ...], Program] = {}  # by what was looked at of the inputs
        self._plain: Program | None = None
        self._device: torch.device | None = None

    # --- building ------------------------------------------------------------------------------------------------------

    def new_input(
        self,
        dims: Sequence[SizeLike | str],
        strides: Sequence[int] | None = None,
        dtype: Any = "float16",
        name: str | None = None,
    ) -> DTensor:
        """An input of this shape. A size may be a name ("b"): it is then known when the graph is called.

        With `strides` a tensor must have exactly these when the graph is called; without, any tensor of the shape will do.
        """
        if isinstance(dims, str) or not isinstance(dims, Sequence):
            raise GraphError(f"new_input: dims={dims!r} is invalid: pass a list or tuple of sizes")
        shape = tuple(self._size(size) for size in dims)
        try:
            given = None if strides is None else tuple(operator.index(step) for step in strides)
        except TypeError as exc:
            raise GraphError(f"new_input: strides={strides!r} is invalid: pass whole numbers") from exc
        return self._made(self._builder.input(shape, _dtype(dtype), strides=given, name=name))

    def mark_output(self, tensor: DTensor, strides: Sequence[int] | None = None) -> None:
        """Make a value an output. Outputs are returned in the order in which they were marked."""
        self._own(tensor, "mark_output")
        if strides is not None and tuple(strides) != row_major(tensor.shape):
            raise GraphError(
                f"mark_output: strides {tuple(strides)} are invalid: outputs are row-major, {row_major(tensor.shape)}",
                hint="permute the value first",
            )
        self._outputs.append(tensor.number)
        self._plain = None
        self._found.clear()
        self._ready.clear()

    def matmul(self, a: DTensor, b: DTensor) -> DTensor:
        """[..., m, k] and [..., k, n] give [..., m, n]; leading sizes stretch."""
        return self._op("matmul", a, b)

    def add(self, a: Operand, b: Operand) -> DTensor:
        return self._op("add", a, b)

    def sub(self, a: Operand, b: Operand) -> DTensor:
        return self._op("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> DTensor:
        return self._op("mul", a, b)

    def div(self, a: Operand, b: Operand) -> DTensor:
        return self._op("div", a, b)

    def pow(self, a: Operand, b: Operand) -> DTensor:
        return self._op("pow", a, b)

    def maximum(self, a: Operand, b: Operand) -> DTensor:
        return self._op("maximum", a, b)

    def minimum(self, a: Operand, b: Operand) -> DTensor:
        return self._op("minimum", a, b)

    def mul_scalar(self, a: DTensor, scalar: float) -> DTensor:
        return self.mul(a, scalar)

    def exp(self, x: DTensor) -> DTensor:
        return self._op("exp", x)

    def log(self, x: DTensor) -> DTensor:
        return self._op("log", x)

    def sqrt(self, x: DTensor) -> DTensor:
        return self._op("sqrt", x)

    def rsqrt(self, x: DTensor) -> DTensor:
        return self._op("rsqrt", x)

    def square(self, x: DTensor) -> DTensor:
        return self._op("square", x)

    def silu(self, x: DTensor) -> DTensor:
        return self._op("silu", x)

    def gelu(self, x: DTensor, approximate: str = "none") -> DTensor:
        """The GELU by the error function, or with `approximate="tanh"` by the hyperbolic tangent."""
        if approximate not in ("none", "tanh"):
            raise GraphError(f"gelu: approximate={approximate!r} is invalid; known: 'none', 'tanh'")
        return self._op("gelu_tanh" if approximate == "tanh" else "gelu", x)

    def relu(self, x: DTensor) -> DTensor:
        return self._op("relu", x)

    def sigmoid(self, x: DTensor) -> DTensor:
        return self._op("sigmoid", x)

    def tanh(self, x: DTensor) -> DTensor:
        return self._op("tanh", x)

    def clamp(self, x: DTensor, min_val: float | None = None, max_val: float | None = None) -> DTensor:
        """Numbers below `min_val` become it, numbers above `max_val` become that."""
        if min_val is None and max_val is None:
            raise GraphError("clamp needs min_val, max_val or both")
        for bound in (min_val, max_val):
            if bound is not None and not isinstance(bound, (int, float, DTensor)):
                raise GraphError(f"clamp: {bound!r} is invalid: use a number")
        if min_val is not None:
            x = self.maximum(x, min_val)
        return x if max_val is None else self.minimum(x, max_val)

    def cast(self, x: DTensor, dtype: Any) -> DTensor:
        return self._op("cast", x, dtype=_dtype(dtype))

    def where(self, condition: DTensor, a: Operand, b: Operand) -> DTensor:
        return self._op("where", condition, a, b)

    def reduction(self, x: DTensor, dim: int | Sequence[int], kind: str = "sum", keepdim: bool = True) -> DTensor:
        """The sum, max, min or mean over dimensions, which stay with size 1 unless `keepdim=False`."""
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        return self._op("reduce", x, how=kind, dims=dims, keepdim=keepdim)

    def softmax(self, x: DTensor, dim: int = -1) -> DTensor:
        return self._op("softmax", x, dim=dim)

    def rms_norm(
        self,
        x: DTensor,
        normalized_shape: int | Sequence[int] | DTensor | None = None,
        weight: DTensor | None = None,
        eps: float = 1e-6,
    ) -> DTensor:
        """x / sqrt(mean(x²) + eps), times `weight`, over the last dimension or the given ones. (x, weight) will do."""
        return self._norm("rms_norm", x, normalized_shape, [weight], eps)

    def layer_norm(
        self,
        x: DTensor,
        normalized_shape: int | Sequence[int] | DTensor | None = None,
        weight: DTensor | None = None,
        bias: DTensor | None = None,
        eps: float = 1e-5,
    ) -> DTensor:
        """(x - mean(x)) / sqrt(var(x) + eps) over the last sizes, times `weight`, plus `bias`; (x, weight, bias) will do"""
        return self._norm("layer_norm", x, normalized_shape, [weight, bias], eps)

    def concat(self, tensors: Sequence[DTensor] | DTensor, *more: Any, dim: int | None = None) -> DTensor:
        """Tensors one after another along `dim`: concat([a, b], dim) or, as in Mirage, concat(a, b, dim)."""
        parts = [tensors, *more] if isinstance(tensors, DTensor) else [*tensors, *more]
        if dim is None and parts and isinstance(parts[-1], int):
            dim = parts.pop()
        if dim is None:
            raise GraphError("concat needs a dim")
        return self._op("concat", *parts, dim=dim)

    def split(self, x: DTensor, sizes: int | Sequence[int], dim: int = 0) -> list[DTensor]:
        """Pieces along `dim`: of these sizes, or all of one size."""
        place = ops.axis("split", dim, len(x.shape))
        length = x.shape[place]
        if isinstance(sizes, int):
            if not isinstance(length, int) or sizes < 1 or length % sizes:
                raise GraphError(f"split of {words(x.shape)} into pieces of {sizes} along dim {dim} is invalid")
            sizes = [sizes] * (length // sizes)
        if sum(sizes) != length:
            raise GraphError(
                f"split of {words(x.shape)} into {list(sizes)} along dim {dim} is invalid: they sum to {sum(sizes)}"
            )
        made, start = [], 0
        for size in sizes:
            made.append(self._op("slice", x, dim=place, start=start, stop=start + size))
            start += size
        return made

    def transpose(self, x: DTensor, dim0: int, dim1: int) -> DTensor:
        rank = len(x.shape)
        order = list(range(rank))
        a, b = ops.axis("transpose", dim0, rank), ops.axis("transpose", dim1, rank)
        order[a], order[b] = order[b], order[a]
        return self._op("permute", x, dims=tuple(order))

    def permute(self, x: DTensor, dims: Sequence[int]) -> DTensor:
        return self._op("permute", x, dims=tuple(dims))

    def reshape(self, x: DTensor, shape: Sequence[SizeLike | str]) -> DTensor:
        """Another shape for the same elements; one size may be -1 for what is left."""
        if isinstance(shape, str) or not isinstance(shape, Sequence):
            raise GraphError(f"reshape of {words(x.shape)} to {shape!r} is invalid: pass a list or tuple of sizes")
        sizes = [self._size(size) for size in shape]
        if sizes.count(-1) == 1:
            rest = product(size for size in sizes if size != -1)
            total = product(x.shape)
            try:
                sizes[sizes.index(-1)] = divided(total, rest)
            except ValueError as exc:
                raise GraphError(f"reshape of {words(x.shape)} to {words(sizes)} is invalid: {exc}") from exc
        return self._op("reshape", x, shape=tuple(sizes))

    def expand(self, x: DTensor, shape: Sequence[SizeLike | str]) -> DTensor:
        return self._op("expand", x, shape=tuple(self._size(size) for size in shape))

    def embedding(self, table: DTensor, ids: DTensor) -> DTensor:
        """The rows of `table` [rows, width] that `ids` name."""
        return self._op("embedding", table, ids)

    def rope(self, x: DTensor, cos: DTensor, sin: DTensor, interleaved: bool = False) -> DTensor:
        """Rotary positions: x [..., n, d] turned by angles whose cos and sin stretch to [..., n, d/2].

        Pairs are (i, i + d/2), as in Llama and Qwen; `interleaved`: (2i, 2i + 1), as in GPT-J.
        """
        return self._op("rope", x, cos, sin, interleaved=True if interleaved else None)

    def attention(
        self,
        q: DTensor,
        k: DTensor,
        v: DTensor,
        *,
        mask: DTensor | None = None,
        lengths: DTensor | None = None,
        causal: bool | str = False,
        scale: float | None = None,
    ) -> DTensor:
        """softmax(q kᵀ · scale + mask) v for q [b, heads, n, d] and k, v [b, kv_heads, t, d].

        `mask` stretches to [b, heads, n, t]; bools keep, numbers are added. `lengths` [b] says how many of the t keys
        count (a cache that is not full). `causal=True` lets the last query see all keys that count and each one before it
        one less, as in decoding with a cache; `causal="start"` aligns the first query with the first key, as torch does.
        """
        rest = [one for one in (mask, lengths) if one is not None]
        if scale is not None and not isinstance(scale, (int, float)):
            raise GraphError(f"attention: scale={scale!r} is invalid: use a number")
        attrs = {
            "masked": True if mask is not None else None,
            "counted": True if lengths is not None else None,
            "causal": "end" if causal is True else causal or None,
            "scale": scale,
        }
        return self._op("attention", q, k, v, *rest, **attrs)

    def customized(self, inputs: Sequence[DTensor], graph: Any) -> NoReturn:
        """Mirage's op for a thread-block graph that was written by hand; there are none here. Raises NotImplementedError."""
        raise NotImplementedError(HAND_WRITTEN)

    # --- running -------------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph as it is now. Raises GraphError if no output is marked."""
        if not self._outputs:
            raise GraphError("the graph has no outputs", hint="call mark_output(tensor) first")
        return self._builder.graph(self._outputs)

    @property
    def plain(self) -> Program:
        """The graph as it is now, op by op through torch."""
        from anytorch.graph.program import all_by_torch

        if self._plain is None:
            self._plain = all_by_torch(self.graph)
        return self._plain

    def __call__(
        self, *tensors: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None, stream: Any = None
    ) -> list[Any]:
        """The outputs for these inputs, as a list: g(a, b) or, as in Mirage, g(inputs=[a, b])."""
        from anytorch.graph import calling

        if inputs is not None and tensors:
            raise GraphError("pass the tensors, or inputs=[...], not both")
        return calling.call(self, list(tensors if inputs is None else inputs))

    def superoptimize(
        self,
        *examples: torch.Tensor,
        sizes: dict[str, int] | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        verbose: bool | None = None,
        **options: Any,
    ) -> KernelGraph:
        """Search for the fastest kernels and keep them; returns the graph itself.

        `sizes` gives a number to each named size ({"b": 8}); `examples` are tensors that have them. The search takes at most
        about `time_limit_s`; Ctrl-C ends it with the best found so far. What was found is remembered on disk.
        """
        from anytorch.graph import calling

        calling.superoptimize(self, list(examples), sizes or {}, time_limit_s, verbose, options)
        return self

    def explain(self) -> str:
        """What was found: candidates, times, bytes, and why each was refused."""
        from anytorch.graph import calling

        return calling.explain(self)

    def visualize(self, path: str | Path) -> Path:
        """Draw the graph, and the kernels that were chosen, as SVG; returns the path."""
        from anytorch.graph.picture import draw

        found = next(iter(self._found.values()), None)
        target = Path(path)
        target.write_text(draw(self.graph, found.program if found else None), encoding="utf-8")
        return target

    def to_json(self, path: str | Path | None = None) -> str:
        """The graph as JSON text, also written to `path`."""
        text = json.dumps({"backend": self.backend, **self.graph.to_json()}, indent=1)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> KernelGraph:
        """The graph that `to_json` gave: its text, or the path of a file with it. Raises GraphError, UnknownDevice."""
        text = str(source)
        if not text.lstrip().startswith("{"):
            try:
                text = Path(source).read_text(encoding="utf-8")
            except OSError as exc:
                raise GraphError(f"{source} cannot be read: {exc.strerror}") from exc
            except UnicodeDecodeError as exc:
                raise GraphError(f"damaged kernel graph: {source} is not UTF-8 text: {exc.reason}") from exc
        try:
            body = parse_json(text)
        except ValueError as exc:
            raise GraphError(f"damaged kernel graph: {exc}") from exc
        graph = Graph.from_json(body)
        made = cls(str(body.get("backend", "auto")))
        made._builder = Builder.of(graph)
        made._outputs = list(graph.outputs)
        return made

    def device(self, inputs: Sequence[torch.Tensor]) -> torch.device:
        """Where it runs: on its back end, or where its inputs are."""
        import torch

        if self.backend == "auto":
            return next((one.device for one in inputs if isinstance(one, torch.Tensor)), torch.device("cpu"))
        if self._device is None:
            self._device = resolve(self.backend).device
        return self._device

    # --- inside --------------------------------------------------------------------------------------------------------

    def _made(self, number: int) -> DTensor:
        return DTensor(self, number)

    def _own(self, tensor: Any, op: str) -> int:
        if not isinstance(tensor, DTensor):
            raise GraphError(
                f"{op}: {type(tensor).__name__} is not a tensor of a graph", hint="use what new_input returned"
            )
        if tensor.graph is not self:
            raise GraphError(f"{op}: {tensor!r} belongs to another graph")
        return tensor.number

    def _op(self, op: str, *operands: Any, **attrs: Any) -> DTensor:
        tensors = [one for one in operands if isinstance(one, DTensor)]
        numbers = []
        for one in operands:
            if isinstance(one, (int, float)) and not isinstance(one, bool) and tensors:
                dtypes = [other.dtype for other in tensors if other.dtype != "bool"] or ["float32"]
                whole = isinstance(one, int) and dtypes[0] not in ops.FLOATS
                numbers.append(
                    self._builder.constant(
                        one if whole else float(one), dtypes[0] if whole or dtypes[0] in ops.FLOATS else "float32"
                    )
                )
            else:
                numbers.append(self._own(one, op))
        return self._made(self._builder.add(op, *numbers, **attrs))

    def _norm(self, op: str, x: DTensor, shape: Any, given: list[DTensor | None], eps: float) -> DTensor:
        """`given`: the weight, and the bias. One in place of the shape says what it normalizes, as its own does."""
        if isinstance(shape, DTensor):
            if given[-1] is not None and given[0] is not None:
                raise GraphError(f"{op} has two weights", hint=f"{op}(x, weight, …), or {op}(x, shape, weight, …)")
            given, shape = [shape, *(one for one in given if one is not None), *given][: len(given)], None
        if (weight := given[0]) is None and any(given):
            raise GraphError(f"{op} with a bias needs a weight")
        shape = (shape,) if isinstance(shape, int) else shape
        rank = len(shape) if shape is not None else len(weight.shape) if weight is not None else 1
        if shape is not None and tuple(shape) != x.shape[len(x.shape) - rank :]:
            raise GraphError(f"{op} of {words(x.shape)} over {words(shape)} is invalid: these are not its last sizes")
        try:
            least = float(eps)
        except (TypeError, ValueError) as exc:
            raise GraphError(f"{op}: eps={eps!r} is invalid: use a number that is not negative") from exc
        return self._op(op, x, *(one for one in given if one is not None), rank=rank, eps=least)

    def _size(self, size: Any) -> SizeLike:
        if isinstance(size, str):
            try:
                return read_size(size)
            except ValueError as exc:
                raise GraphError(str(exc)) from exc
        if isinstance(size, (int, Size)):
            return size
        if hasattr(size, "__index__"):  # NumPy's
            return operator.index(size)
        raise GraphError(f"size {size!r} is invalid: use a whole number or a name")


def _dtype(dtype: Any) -> str:
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    ops.check_dtype("dtype", name)
    return name


def new_kernel_graph(backend: Any = "auto") -> KernelGraph:
    """An empty kernel graph. `backend`: "auto" (where the inputs are), or a back end such as "cpu", "cuda" or "mps".

    If this machine lacks the back end, a warning says so when the graph is first used, and the CPU is used.
    """
    return KernelGraph(str(getattr(backend, "value", backend)))
