"""Small graphs that between them use every op, with the sizes they are called with."""

from __future__ import annotations

from collections.abc import Callable

from anytorch.graph.ir import Builder, Graph
from anytorch.graph.sizes import Size

Case = tuple[Graph, dict[str, int]]


def _rms_linear(dtype: str = "float32") -> Case:
    b = Builder()
    x, w, weight = b.input(("b", 100), dtype), b.input((100, 45), dtype), b.input((100,), dtype)
    return b.graph([b.add("matmul", b.add("rms_norm", x, weight, rank=1, eps=1e-6), w)]), {"b": 5}


def _one_row(dtype: str = "float32") -> Case:
    b = Builder()
    x, weight, w = b.input((1, 100), dtype), b.input((100,), dtype), b.input((100, 45), dtype)
    return b.graph([b.add("matmul", b.add("rms_norm", x, weight, rank=1, eps=1e-6), w)]), {}


def _gated_mlp() -> Case:
    b = Builder()
    x, gate, up = b.input((3, 64), "float32"), b.input((64, 40), "float32"), b.input((64, 40), "float32")
    return b.graph([b.add("mul", b.add("silu", b.add("matmul", x, gate)), b.add("matmul", x, up))]), {}


def _lora() -> Case:
    b = Builder()
    x, w = b.input((3, 64), "float32"), b.input((64, 48), "float32")
    down, up = b.input((64, 8), "float32"), b.input((8, 48), "float32")
    low = b.add("matmul", b.add("matmul", x, down), up)
    return b.graph([b.add("add", b.add("matmul", x, w), low)]), {}


def _linear_transposed() -> Case:
    b = Builder()
    x, w, bias = b.input(("b", 70), "float32"), b.input((33, 70), "float32"), b.input((33,), "float32")
    return b.graph([b.add("gelu", b.add("add", b.add("matmul", x, b.add("permute", w, dims=(1, 0))), bias))]), {"b": 3}


def _attention(causal: str | None = "end", counted: bool = False) -> Case:
    b = Builder()
    q = b.input(("b", 4, "n", 16), "float32")
    k, v = b.input(("b", 2, "t", 16), "float32"), b.input(("b", 2, "t", 16), "float32")
    rest = [b.input(("b",), "int64")] if counted else []
    made = b.add("attention", q, k, v, *rest, causal=causal, counted=True if counted else None)
    return b.graph([made]), {"b": 2, "n": 3, "t": 50}


def _masked_attention() -> Case:
    b = Builder()
    q, k = b.input((2, 4, 3, 16), "float32"), b.input((2, 2, 20, 16), "float32")
    v, mask = b.input((2, 2, 20, 16), "float32"), b.input((2, 4, 3, 20), "float32")
    return b.graph([b.add("attention", q, k, v, mask, masked=True, scale=0.3)]), {}


def _rows(op: str, dtype: str = "float32") -> Case:
    b = Builder()
    x = b.input(("b", 100), dtype)
    if op == "softmax":
        return b.graph([b.add("softmax", x, dim=-1)]), {"b": 7}
    weight, bias = b.input((100,), dtype), b.input((100,), dtype)
    return b.graph([b.add("layer_norm", x, weight, bias, rank=1, eps=1e-5)]), {"b": 7}


def _rope(interleaved: bool) -> Case:
    b = Builder()
    x = b.input(("b", 4, "s", 16), "float32")
    cos, sin = b.input(("s", 8), "float32"), b.input(("s", 8), "float32")
    return b.graph([b.add("rope", x, cos, sin, interleaved=interleaved or None)]), {"b": 2, "s": 5}


def _turned_product(dtype: str = "float32") -> Case:
    """Heads of a product, turned by position as models write it: halves change places. The last head has none after it."""
    b = Builder()
    x, w = b.input(("b", 6, 24), dtype), b.input((32, 24), dtype)
    cos, sin = b.input((6, 16), dtype), b.input((6, 16), dtype)
    heads = b.add("reshape", b.add("matmul", x, b.add("permute", w, dims=(1, 0))), shape=(Size.named("b"), 6, 2, 16))
    heads = b.add("permute", heads, dims=(0, 2, 1, 3))
    left, right = (b.add("slice", heads, dim=3, start=at, stop=at + 8) for at in (0, 8))
    swapped = b.add("concat", b.add("neg", right), left, dim=3)
    return b.graph([b.add("add", b.add("mul", heads, cos), b.add("mul", swapped, sin))]), {"b": 2}


def _joined_products() -> Case:
    """Products of three widths beside one another, none a multiple of the one before."""
    b = Builder()
    x = b.input(("b", 20), "float32")
    return b.graph([b.add("concat", *(b.add("matmul", x, b.input((20, n), "float32")) for n in (5, 9, 4)), dim=1)]), {
        "b": 3
    }


def _joined_repeats() -> Case:
    """A concat along two axes that were one, of something that changes with one of them alone."""
    b = Builder()
    x, y = b.input((3, 1), "float32"), b.input((8, 4), "float32")
    wide = b.add("reshape", b.add("expand", x, shape=(3, 4)), shape=(12,))
    joined = b.add("concat", b.add("reshape", y, shape=(32,)), wide, dim=0)
    return b.graph([b.add("exp", b.add("reshape", joined, shape=(11, 4)))]), {}


def _functions() -> Case:
    b = Builder()
    x, y = b.input((6, 50), "float32"), b.input((50,), "float32")
    made = b.add("gelu_tanh", b.add("tanh", x))
    for op in ("sigmoid", "exp", "sin", "cos", "erf", "relu", "square", "abs", "neg", "expm1"):
        made = b.add("add", made, b.add(op, x))
    positive = b.add("add", b.add("square", y), b.constant(0.5, "float32"))
    for op in ("log", "sqrt", "rsqrt", "reciprocal", "log1p", "floor"):
        made = b.add("add", made, b.add(op, positive))
    made = b.add("maximum", b.add("minimum", made, b.constant(4.0, "float32")), b.constant(-4.0, "float32"))
    kept = b.add("and", b.add("gt", x, y), b.add("not", b.add("le", x, b.constant(-1.0, "float32"))))
    powered = b.add("pow", positive, b.constant(3.0, "float32"))
    return b.graph([b.add("where", kept, made, powered), b.add("div", x, positive)]), {}


def _views() -> Case:
    b = Builder()
    x, y = b.input(("b", 3, 8), "float32"), b.input(("b", 3, 4), "float32")
    both = b.add("concat", b.add("slice", x, dim=2, start=2, stop=7), y, dim=2)  # [b, 3, 9]
    turned = b.add("reshape", b.add("permute", both, dims=(1, 0, 2)), shape=(3, 9 * Size.named("b")))
    total = b.add("reduce", b.add("mul", turned, b.constant(2.0, "float32")), how="mean", dims=(0,))
    return b.graph([total, b.add("permute", x, dims=(2, 0, 1))]), {"b": 4}


def _named_rows() -> Case:
    """The first and the last row of a size with a name, and one from a multiple of it."""
    b = Builder()
    named = Size.named("b")
    x, y = b.input((named, 8), "float32"), b.input((2 * named, 8), "float32")
    first, last = b.add("slice", x, dim=0, start=0, stop=1), b.add("slice", x, dim=0, start=named - 1, stop=named)
    other = b.add("slice", y, dim=0, start=2 * named - 2, stop=2 * named - 1)
    joined = b.add("mul", b.add("exp", first), b.add("sub", last, other))
    return b.graph([b.add("add", b.add("reshape", joined, shape=(8,)), x)]), {"b": 4}


def _several() -> Case:
    """Outputs of two kinds of shape from one row, and one over columns."""
    b = Builder()
    x = b.input((6, 40), "float32")
    top = b.add("reduce", x, how="max", dims=(1,), keepdim=True)
    low = b.add("reduce", x, how="min", dims=(0,))
    return b.graph([b.add("sub", x, top), top, low]), {}


CASES: dict[str, Callable[[], Case]] = {
    "rms norm and product": _rms_linear,
    "the same in bfloat16": lambda: _rms_linear("bfloat16"),
    "one row times a matrix": _one_row,
    "one row in bfloat16": lambda: _one_row("bfloat16"),
    "gated mlp": _gated_mlp,
    "lora": _lora,
    "linear with a transposed weight": _linear_transposed,
    "attention": lambda: _attention(None),
    "attention with order": _attention,
    "attention with lengths": lambda: _attention("end", counted=True),
    "attention with a mask": _masked_attention,
    "softmax": lambda: _rows("softmax"),
    "softmax in float16": lambda: _rows("softmax", "float16"),
    "layer norm": lambda: _rows("layer_norm"),
    "rope": lambda: _rope(interleaved=False),
    "rope of pairs": lambda: _rope(interleaved=True),
    "product and rope": _turned_product,
    "product and rope in bfloat16": lambda: _turned_product("bfloat16"),
    "joined products": _joined_products,
    "joined repeats": _joined_repeats,
    "functions": _functions,
    "views": _views,
    "rows of a named size": _named_rows,
    "several outputs": _several,
}
