"""The first gate: are two graphs the same function? Both are computed exactly, in whole numbers modulo a prime.

A rewrite that is right for all real numbers is right modulo a prime as well, and one that is wrong gives another number for
random inputs, but for a chance of about the degree of the expression over p. Nothing is rounded: one element that differs
is proof.

* p = 1048343 and q = 524171 with p = 2q + 1. Products of numbers below p are exact in float64, and so are sums of 8192 of
  them: a matrix product is a call of BLAS.
* `exp` maps x mod q to g^x mod p, where g has order q, so that exp(a + b) = exp(a) exp(b). Both residues are carried for
  that reason; what was under an exp is known modulo p alone, and an exp of it cannot be judged (`Unfit`).
* `sqrt` is x^((p+1)/4), a root of x or of -x; it is multiplicative, which is what rewrites use.
* Functions with no algebra of their own (sigmoid, erf, tanh, …) are keyed random functions: of equals they are equal.
* A maximum picks the argument that comes last in a keyed random order: associative, commutative, idempotent, nothing more.
* Minus infinity is a mark beside the number: its exp is 0, and a maximum passes it over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from anytorch.errors import WrongAnswer
from anytorch.graph import ops
from anytorch.graph.ir import Graph, Node
from anytorch.graph.lower import lowered
from anytorch.graph.sizes import at, shape_at

P, Q = 1048343, 524171
GENERATOR = 4  # a square, so of order q modulo p
MOST_TERMS = 8192  # in a sum of products that float64 holds exactly
Array = Any  # of NumPy


class Unfit(Exception):
    """The graph has an op that means nothing modulo a prime: this gate cannot judge it."""


@dataclass(frozen=True)
class Residues:
    """Numbers modulo p and, where that is known, modulo q (int64 arrays); `low` marks those that are minus infinity."""

    p: Array
    q: Array | None
    low: Array | None = None
    number: Fraction | None = None  # of a constant

    def map(self, change: Callable[[Array], Array]) -> Residues:
        rest = [None if one is None else change(one) for one in (self.q, self.low)]
        return Residues(change(self.p), *rest)


def check_same(one: Graph, other: Graph, *, seed: int = 0, tests: int = 2) -> None:
    """Raise WrongAnswer if two graphs of the same inputs differ as functions; Unfit where that cannot be said."""
    graphs = [lowered(one), lowered(other)]
    takes = [[(graph.nodes[n].shape, graph.nodes[n].dtype) for n in graph.inputs] for graph in graphs]
    if takes[0] != takes[1] or len(one.outputs) != len(other.outputs):
        raise WrongAnswer("the graphs take or give different tensors")
    known = {name: 3 + place for place, name in enumerate(sorted(graphs[0].sizes))}
    for test in range(tests):
        wanted, found = (evaluate(graph, known, seed + test) for graph in graphs)
        for place, (right, answer) in enumerate(zip(wanted, found, strict=True)):
            if right.shape != answer.shape:
                raise WrongAnswer(f"output {place} has shape {answer.shape}, not {right.shape}")
            differs = int(np.count_nonzero(right != answer))
            if differs:
                raise WrongAnswer(f"output {place} is another function: {differs} of {right.size} residues differ")


def evaluate(graph: Graph, known: dict[str, int], seed: int) -> list[Array]:
    """The outputs of a graph of primitive ops, modulo p; inputs are random by their place and the seed."""
    values: list[Any] = []
    for _, node in graph:
        values.append(_value(node, [values[arg] for arg in node.args], known, seed))
    return [_reported(values[one]) for one in graph.outputs]


def _reported(value: Any) -> Array:
    if isinstance(value, Residues):
        return value.p if value.low is None else np.where(value.low, P, value.p)
    return value


def _value(node: Node, args: list[Any], known: dict[str, int], seed: int) -> Any:
    if node.op == "input":
        rng, shape = np.random.default_rng([seed, node["index"]]), shape_at(node.shape, known)
        if node.dtype in ops.FLOATS:
            return Residues(rng.integers(0, P, shape), rng.integers(0, Q, shape))
        return rng.integers(1, 4, shape) > 1 if node.dtype == "bool" else rng.integers(1, 4, shape)
    if node.op == "constant":
        value = at(node["value"], known)
        return _constant(float(value)) if node.dtype in ops.FLOATS else np.asarray(value)
    if node.op == "iota":
        shape, dim = shape_at(node["shape"], known), node["dim"]
        steps = np.arange(shape[dim]).reshape([-1 if place == dim else 1 for place in range(len(shape))])
        return np.broadcast_to(steps, shape)
    if node.kind == "view":
        return _viewed(node, args, known)
    if node.op == "store":
        return args[0]
    if node.op == "where":
        return _where(*args)
    if node.op == "embedding":
        table, ids = args
        return table.map(lambda one: one[np.asarray(ids) % one.shape[0]])
    if any(isinstance(arg, Residues) for arg in args) or node.dtype in ops.FLOATS:
        return _of_residues(node, [_residues(arg) for arg in args])
    return _of_whole_numbers(node, args)


# --- whole numbers and bools: computed as they are ---------------------------------------------------------------------

WHOLE: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "neg": np.negative,
    "abs": np.abs,
    "square": np.square,
    "relu": lambda x: np.maximum(x, 0),
    "floor": lambda x: x,
}


def _of_whole_numbers(node: Node, args: list[Array]) -> Array:
    if node.op == "cast":
        return args[0].astype(bool) if node.dtype == "bool" else args[0].astype(np.int64)
    if node.op == "reduce":
        return getattr(np, node["how"])(args[0], axis=node["dims"], keepdims=bool(node["keepdim"]))
    if node.op not in WHOLE:
        raise Unfit(f"{node.op} of {node.dtype}")
    return WHOLE[node.op](*args)


# --- residues ----------------------------------------------------------------------------------------------------------


def _constant(value: float) -> Residues:
    if value == float("-inf"):
        return Residues(np.asarray(0), np.asarray(0), np.asarray(True))
    if value - value != 0:
        raise Unfit(f"the constant {value}")
    exact = Fraction(value)
    by_field = [exact.numerator * pow(exact.denominator, -1, prime) % prime for prime in (P, Q)]
    return Residues(np.asarray(by_field[0]), np.asarray(by_field[1]), number=exact)


def _residues(value: Any) -> Residues:
    if isinstance(value, Residues):
        return value
    whole = np.asarray(value).astype(np.int64)
    return Residues(whole % P, whole % Q)


def _power(base: Array, exponent: int, prime: int) -> Array:
    found, square = np.ones_like(base), base % prime
    while exponent:
        if exponent & 1:
            found = found * square % prime
        square, exponent = square * square % prime, exponent >> 1
    return found


def _in_both(x: Residues, change: Callable[[Array, int], Array]) -> Residues:
    return Residues(change(x.p, P), None if x.q is None else change(x.q, Q), x.low)


def _join(x: Residues, y: Residues, how: Callable[[Array, Array], Array]) -> Residues:
    """Combine two by a sum or product. Minus infinity stays what it is beside anything finite."""
    q = None if x.q is None or y.q is None else how(x.q, y.q) % Q
    low = None if x.low is None and y.low is None else np.logical_or(_low(x), _low(y))
    return Residues(how(x.p, y.p) % P, q, low)


def _low(x: Residues) -> Array:
    return np.zeros_like(x.p, dtype=bool) if x.low is None else x.low


def _keyed(name: str, *values: Array) -> Array:
    """A random number below p for every tuple of values, the same for the same name."""
    state = np.uint64(sum(ord(letter) * 131**place for place, letter in enumerate(name)) % 2**64)
    mixed: Array = np.asarray([state])  # an array: numbers alone would warn that they wrap around
    for value in values:
        mixed = mixed + value.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        for shift, times in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(times)
    return mixed if any(value.ndim for value in values) else mixed[0]


def _random_function(name: str, x: Residues) -> Residues:
    mixed = _keyed(name, x.p)
    return Residues((mixed % np.uint64(P)).astype(np.int64), ((mixed >> np.uint64(24)) % np.uint64(Q)).astype(np.int64))


def _later(x: Residues, y: Residues) -> Residues:
    """The maximum: of each pair the one that comes later in the random order."""
    first = np.logical_or(_keyed("order", x.p) >= _keyed("order", y.p), _low(y))
    first = np.logical_and(first, np.logical_or(~_low(x), _low(y)))
    q = None if x.q is None or y.q is None else np.where(first, x.q, y.q)
    low = None if x.low is None and y.low is None else np.logical_and(_low(x), _low(y))
    return Residues(np.where(first, x.p, y.p), q, low)


def _exp(x: Residues) -> Residues:
    if x.q is None:
        raise Unfit("an exp of an exp")
    found, base, exponent = np.ones_like(x.q), GENERATOR, x.q.copy()
    while np.any(exponent):
        found = np.where(exponent & 1, found * base % P, found)
        base, exponent = base * base % P, exponent >> 1
    return Residues(found if x.low is None else np.where(x.low, 0, found), None)


def _finite(x: Residues, op: str) -> Residues:
    if x.low is not None and np.any(x.low):
        raise Unfit(f"{op} of minus infinity")
    return replace(x, low=None)


def _neg(x: Residues) -> Residues:
    return _in_both(_finite(x, "neg"), lambda one, prime: -one % prime)


def _inverse(x: Residues) -> Residues:
    return _in_both(_finite(x, "a quotient"), lambda one, prime: _power(one, prime - 2, prime))


def _root(x: Residues) -> Residues:
    return _in_both(_finite(x, "sqrt"), lambda one, prime: _power(one, (prime + 1) // 4, prime))


def _times_itself(x: Residues, factor: Residues) -> Residues:
    return _join(x, factor, np.multiply)


def _raised(x: Residues, exponent: Residues) -> Residues:
    power = exponent.number
    if power is not None and power.denominator == 1 and abs(power) < 64:
        made = _in_both(_finite(x, "pow"), lambda one, prime: _power(one, abs(int(power)), prime))
        return made if power >= 0 else _inverse(made)
    if power is not None and abs(power) == Fraction(1, 2):
        return _root(x) if power > 0 else _inverse(_root(x))
    return _random_function("pow", Residues(_keyed("pow", x.p, exponent.p) % np.uint64(P), None))


UNARY: dict[str, Callable[[Residues], Residues]] = {
    "exp": _exp,
    "neg": _neg,
    "square": lambda x: _times_itself(x, x),
    "reciprocal": _inverse,
    "sqrt": _root,
    "rsqrt": lambda x: _inverse(_root(x)),
    "silu": lambda x: _times_itself(x, _random_function("sigmoid", x)),
    "gelu": lambda x: _times_itself(x, _random_function("gelu", x)),
    "gelu_tanh": lambda x: _times_itself(x, _random_function("gelu_tanh", x)),
    "relu": lambda x: _later(x, _constant(0.0)),
    "cast": lambda x: x,
}
BINARY: dict[str, Callable[[Residues, Residues], Residues]] = {
    "add": lambda x, y: _join(x, y, np.add),
    "sub": lambda x, y: _join(x, _neg(y), np.add),
    "mul": lambda x, y: _join(x, y, np.multiply),
    "div": lambda x, y: _join(x, _inverse(y), np.multiply),
    "pow": _raised,
    "maximum": _later,
    "minimum": lambda x, y: _neg(_later(_neg(x), _neg(y))),
}


def _of_residues(node: Node, args: list[Residues]) -> Any:
    op = node.op
    if op == "cast" and node.dtype not in ops.FLOATS:
        raise Unfit(f"a cast to {node.dtype}")
    if op in UNARY:
        return UNARY[op](args[0])
    if op in BINARY:
        return BINARY[op](*args)
    if op in ops.UNARY:
        return _random_function(op, _finite(args[0], op))
    if op in ops.COMPARISONS:
        return _keyed(op, *(_finite(arg, op).p for arg in args)) % np.uint64(2) == 1
    if op == "reduce":
        return _reduced(node, args[0])
    if op == "matmul":
        return _product(*args)
    raise Unfit(op)


def _reduced(node: Node, x: Residues) -> Residues:
    dims = tuple(dim % x.p.ndim for dim in node["dims"])
    keep, how = bool(node["keepdim"]), node["how"]
    if how in ("max", "min"):
        made = x if how == "max" else _neg(x)
        for dim in dims:
            while made.p.shape[dim] > 1:  # in halves, as the order does not matter
                size = made.p.shape[dim]
                half = -(-size // 2)
                front = made.map(partial(np.take, indices=range(half), axis=dim))
                back = made.map(partial(np.take, indices=range(size - half, size), axis=dim))
                made = _later(front, back)
        # Where all is masked, real numbers give NaN; here any number will do, and the row counts as one more test.
        made = replace(made, low=None) if how == "max" else _neg(made)
        return made if keep else made.map(lambda one: np.squeeze(one, dims))
    x = _finite(x, "a sum")
    made = _in_both(x, lambda one, prime: one.sum(axis=dims, keepdims=keep) % prime)
    if how == "mean":
        count = 1
        for dim in dims:
            count *= x.p.shape[dim]
        return _join(made, _inverse(_residues(count)), np.multiply)
    return made


def _product(a: Residues, b: Residues) -> Residues:
    a, b = _finite(a, "matmul"), _finite(b, "matmul")
    if a.p.shape[-1] > MOST_TERMS:
        raise Unfit(f"a sum of {a.p.shape[-1]} products")

    def times(x: Array, y: Array, prime: int) -> Array:
        return np.matmul(x.astype(np.float64), y.astype(np.float64)).astype(np.int64) % prime

    q = None if a.q is None or b.q is None else times(a.q, b.q, Q)
    return Residues(times(a.p, b.p, P), q)


def _where(condition: Array, x: Any, y: Any) -> Any:
    if not isinstance(x, Residues) and not isinstance(y, Residues):
        return np.where(condition, x, y)
    x, y = _residues(x), _residues(y)
    q = None if x.q is None or y.q is None else np.where(condition, x.q, y.q)
    low = None if x.low is None and y.low is None else np.where(condition, _low(x), _low(y))
    return Residues(np.where(condition, x.p, y.p), q, low)


# --- views -------------------------------------------------------------------------------------------------------------


def _viewed(node: Node, args: Sequence[Any], known: dict[str, int]) -> Any:
    if node.op == "concat":
        if not any(isinstance(arg, Residues) for arg in args):
            return np.concatenate(args, axis=node["dim"])
        parts = [_residues(arg) for arg in args]
        q = None if any(part.q is None for part in parts) else np.concatenate([p.q for p in parts], axis=node["dim"])
        low = None
        if any(part.low is not None for part in parts):
            low = np.concatenate([np.broadcast_to(_low(p), p.p.shape) for p in parts], axis=node["dim"])
        return Residues(np.concatenate([part.p for part in parts], axis=node["dim"]), q, low)
    (x,) = args

    def view(one: Array) -> Array:
        if isinstance(x, Residues):
            one = np.broadcast_to(one, x.p.shape)
        if node.op == "permute":
            return one.transpose(node["dims"])
        if node.op == "slice":
            cut = [slice(None)] * one.ndim
            cut[node["dim"]] = slice(at(node["start"], known), at(node["stop"], known))
            return one[tuple(cut)]
        shape = shape_at(node["shape"], known)
        return one.reshape(shape) if node.op == "reshape" else np.broadcast_to(one, shape)

    return x.map(view) if isinstance(x, Residues) else view(x)
