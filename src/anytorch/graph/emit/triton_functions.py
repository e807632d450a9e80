"""The functions, constants and casts of kernel graphs in Triton, and how values with different dimensions meet."""

from __future__ import annotations

from math import inf

from anytorch.graph import ops
from anytorch.graph.loops import Expr
from anytorch.graph.sizes import SizeLike

TYPES = {"bool": "tl.int1", **{name: f"tl.{name}" for name in ops.DTYPES if name != "bool"}}
Order = tuple[str, ...]  # the tiled axes of a value, in the order of its dimensions
UNARY = {
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "square": "({0} * {0})",
    "reciprocal": "(1.0 / {0})",
    "neg": "(-{0})",
    "abs": "tl.abs({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "sigmoid": "tl.sigmoid({0})",
    "silu": "({0} * tl.sigmoid({0}))",
    "gelu": "({0} * 0.5 * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    "gelu_tanh": "({0} * tl.sigmoid(1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0})))",
    "relu": "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    "tanh": "_tanh({0})",
    "floor": "tl.floor({0})",
    "not": "({0} == 0)",
    "log1p": "_log1p({0})",
    "expm1": "_expm1({0})",
}
BINARY = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "pow": "_pow({0}, {1})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
}
# Functions that Triton has not: near zero by their series, elsewhere by exponentials; the relative error stays small.
ALL = "propagate_nan=tl.PropagateNan.ALL"
HELPERS = {
    **{
        name: f"""
@triton.jit
def {name}(x, y):
    return tl.{function}(x, y, {ALL})
"""
        for name, function in (("_larger", "maximum"), ("_smaller", "minimum"))
    },
    "_tanh": """
@triton.jit
def _tanh(x):
    s = x * x
    near = x * (1.0 + s * (-0.3333333333 + s * (0.1333333333 + s * (-0.0539682540 + s * 0.0218694885))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))
""",
    "_expm1": """
@triton.jit
def _expm1(x):
    near = x * (1.0 + x * (0.5 + x * (0.1666666667 + x * (0.0416666667 + x * (0.0083333333 + x * 0.0013888889)))))
    return tl.where(tl.abs(x) < 0.2, near, tl.exp(x) - 1.0)
""",
    "_log1p": """
@triton.jit
def _log1p(x):
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * x / tl.where(u == 1.0, 1.0, u - 1.0))
""",
    "_pow": """
@triton.jit
def _pow(x, y):
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    whole = tl.floor(y) == y
    odd = tl.floor(y * 0.5) * 2.0 != y
    negative = tl.where(whole, tl.where(odd, -size, size), float("nan"))
    return tl.where(y == 0.0, 1.0, tl.where(x < 0, negative, size))
""",
}


def unwidened(left: Expr, right: Expr) -> tuple[Expr, Expr]:
    """The arguments of a product before they were widened from half precision, which changes nothing in it."""
    inner = [one.args[0] if one.op == "cast" and one.dtype == "float32" else one for one in (left, right)]
    same = inner[0].dtype == inner[1].dtype and inner[0].dtype in ops.HALVES
    return (inner[0], inner[1]) if same else (left, right)


def spread(text: str, own: Order, order: Order) -> str:
    """A value with dimensions `own` for use beside one with `order`: new dimensions of length 1 where it has none."""
    if not own or own == order:
        return text
    return f"{text}[{', '.join(':' if axis in own else 'None' for axis in order)}]"


def fold(how: str, body: str, axis: int) -> str:
    return f"tl.{'sum' if how in ('sum', 'dot') else how}({body}, {axis})"


def neutral(how: str) -> str:
    return {"max": 'float("-inf")', "min": 'float("inf")'}.get(how, "0.0")


def literal(expr: Expr) -> str:
    value = expr.value
    if expr.dtype not in ops.FLOATS:
        return str(int(value))
    if value != value or value in (inf, -inf):
        return f'float("{value}")'
    return repr(float(value))


def cast(text: str, old: str, new: str) -> str:
    if new in ops.FLOATS and new != "float64":
        return text if old in ops.FLOATS and old != "float64" else f"({text}).to(tl.float32)"
    return f"({text}).to({TYPES[new]})"


def blocks_in(extent: SizeLike, block: int) -> str:
    if isinstance(extent, int):
        return str(-(-extent // block))
    return f"({extent})" if block == 1 else f"tl.cdiv({extent}, {block})"
