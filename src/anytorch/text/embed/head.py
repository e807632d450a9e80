"""Turn pooled vectors into the result: Dense, LayerNorm, normalising, Matryoshka dimensions, int8 and binary, in NumPy.

Every function treats each row by itself and gives it the same bits whatever rows stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from anytorch.errors import ModelError, UsageError
from anytorch.text.checkpoints.checkpoint import Checkpoint, Floats, Ints
from anytorch.text.embed.recipe import Recipe, Step

PRECISIONS = ("float32", "float16", "int8", "binary", "ubinary")
Doubles = npt.NDArray[np.float64]
Output = Literal["numpy", "torch", "arrow", "list"]
OUTPUTS = ("numpy", "torch", "arrow", "list")
EXACT_BITS = 53  # float64 holds every whole number up to 2**53


class Head:
    """The steps after pooling, ready to apply. `width` in, `out_width` out."""

    def __init__(
        self, recipe: Recipe, width: int, *, normalize: bool | None = None, normalized_already: bool = False
    ) -> None:
        self.width = width
        self._steps: list[Callable[[Floats], Floats]] = []
        kinds = []
        for number, step in enumerate(chosen_steps(recipe, normalize)):
            if step.kind == "normalize":
                if number or not normalized_already:
                    self._steps.append(normalized)
            elif step.kind == "layer_norm":
                self._steps.append(_layer_norm(step, width))
            else:
                dense, width = _dense(step, width)
                self._steps.append(dense)
            kinds.append(step.kind)
        self.out_width = width
        self.does_nothing = not self._steps  # pooled vectors are the result as they are
        self.kinds = tuple(kinds)
        # Cut to fewer dimensions, a unit vector is one no longer; normalising again is what makes it comparable.
        self.normalizes = bool(kinds) and kinds[-1] == "normalize"

    def __call__(self, pooled: Floats, dim: int | None = None) -> Floats:
        for step in self._steps:
            pooled = step(pooled)
        if dim is not None and dim < self.out_width:
            pooled = pooled[:, :dim]
            if self.normalizes:
                pooled = normalized(pooled)
        return pooled

    def check_dim(self, dim: int | None) -> int:
        """The width of the answer. Raises UsageError for a number of dimensions the model does not have."""
        if dim is None:
            return self.out_width
        if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= self.out_width:
            raise UsageError(
                f"dim={dim!r}: the model's vectors have {self.out_width} dimensions",
                hint=f"use a whole number from 1 to {self.out_width}",
            )
        return dim


def chosen_steps(recipe: Recipe, normalize: bool | None) -> list[Step]:
    """The model's steps, with normalising added or left out where the caller says so."""
    steps = [step for step in recipe.steps if normalize is not False or step.kind != "normalize"]
    already = any(step.kind == "normalize" for step in steps)
    return [*steps, Step("normalize")] if normalize and not already else steps


def only_normalizes(recipe: Recipe, normalize: bool | None) -> bool:
    """True if normalising is the only step after pooling, so that the device may do it."""
    return [step.kind for step in chosen_steps(recipe, normalize)] == ["normalize"]


def normalized(vectors: Floats) -> Floats:
    """Rows of length 1; a row of zeros stays one (as torch's F.normalize has it)."""
    # Not einsum or matmul: their order of summing depends on the number of rows.
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True, dtype=np.float32))
    result: Floats = vectors / np.maximum(lengths, np.float32(1e-12))
    return result


def _layer_norm(step: Step, width: int) -> Callable[[Floats], Floats]:
    weights = _weights(step)
    scale, shift = weights["norm.weight"], weights["norm.bias"]
    if scale.shape != (width,) or shift.shape != (width,):
        raise ModelError(f"{step.folder}: a LayerNorm of {scale.shape[0]} features follows vectors of {width}")

    def apply(vectors: Floats) -> Floats:
        centred = vectors - vectors.mean(axis=1, keepdims=True)
        variance = np.square(centred).mean(axis=1, keepdims=True)
        result: Floats = centred / np.sqrt(variance + np.float32(1e-5)) * scale + shift
        return result

    return apply


def _dense(step: Step, width: int) -> tuple[Callable[[Floats], Floats], int]:
    weights = _weights(step)
    weight, bias = weights.get("linear.weight"), weights.get("linear.bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != width:
        found = None if weight is None else list(weight.shape)
        raise ModelError(f"{step.folder}: a Dense layer with weights {found} follows vectors of {width} features")
    for name in ("module_input_name", "module_output_name"):
        if step.config.get(name) not in (None, "sentence_embedding"):
            raise ModelError(f"{step.folder}: a Dense layer on {step.config[name]!r} is not supported")
    activation = _activation(str(step.config.get("activation_function") or "torch.nn.Tanh"), step)
    residual = bool(step.config.get("use_residual"))
    across = weights.get("residual.weight")
    product = ExactProduct(weight)
    product_across = None if across is None else ExactProduct(across)

    def apply(vectors: Floats) -> Floats:
        made = product(vectors)
        if bias is not None:
            made += bias
        made = activation(made)
        if residual:
            made = made + (vectors if product_across is None else product_across(vectors))
        return made

    return apply, int(weight.shape[0])


def _activation(name: str, step: Step) -> Callable[[Floats], Floats]:
    def sigmoid(x: Floats) -> Floats:
        made: Floats = np.float32(1) / (np.float32(1) + np.exp(-x))
        return made

    known: dict[str, Callable[[Floats], Floats]] = {
        "Identity": lambda x: x,
        "Tanh": np.tanh,
        "ReLU": lambda x: np.maximum(x, np.float32(0)),
        "Sigmoid": sigmoid,
        "SiLU": lambda x: x * sigmoid(x),
        "GELU": _gelu,
    }
    short = name.rpartition(".")[2]
    if not name.startswith("torch.nn.") or short not in known:
        raise ModelError(
            f"{step.folder}: a Dense layer with the activation {name!r} is not supported; supported: {', '.join(known)}"
        )
    return known[short]


def _gelu(x: Floats) -> Floats:
    from math import erf, sqrt

    made: Floats = (0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / sqrt(2)))).astype(np.float32)
    return made


def _weights(step: Step) -> dict[str, Floats]:
    assert step.folder is not None
    with Checkpoint(step.folder) as checkpoint:
        return {name: np.array(checkpoint.tensor(name), np.float32) for name in checkpoint.names()}


# --- what is handed out ----------------------------------------------------------------------------------------------


def check_choices(precision: str, output: str = "numpy") -> None:
    for name, value, known in (("output", output, OUTPUTS), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise UsageError(f"{name}={value!r} is not one of {', '.join(known)}")


def out_shape(width: int, precision: str) -> tuple[int, str]:
    """Columns and NumPy dtype of the answer for vectors of `width` dimensions."""
    if precision in ("binary", "ubinary"):
        return (width + 7) // 8, "int8" if precision == "binary" else "uint8"
    return width, precision


def as_precision(vectors: Floats, precision: str) -> npt.NDArray[Any]:
    """The vectors, smaller.

    int8: each row scaled by its own largest value to ±127, so that cosine similarities stay (to about 0.9999) and lengths
    do not; no calibration texts are needed and no row depends on another. binary, ubinary: one bit per dimension, set
    where it is positive, eight to a byte, laid out as sentence-transformers has it (binary: int8, that minus 128).
    """
    if precision == "float32":
        return vectors
    if precision == "float16":
        return vectors.astype(np.float16)
    if precision == "int8":
        largest = np.abs(vectors).max(axis=1, keepdims=True)
        scaled: npt.NDArray[Any] = np.rint(vectors * (np.float32(127) / np.maximum(largest, np.float32(1e-30))))
        return scaled.astype(np.int8)
    bits = np.packbits(vectors > 0, axis=-1)
    packed: npt.NDArray[Any] = bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    return packed


def as_output(vectors: npt.NDArray[Any], output: str) -> Any:
    """A NumPy matrix as another kind; these need their own packages."""
    if output == "numpy":
        return vectors
    if output == "list":
        return vectors.tolist()
    if output == "torch":
        import torch

        return torch.from_numpy(vectors)
    import pyarrow  # type: ignore[import-untyped]

    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), vectors.shape[1])


# --- exact sums ---------------------------------------------------------------------------------------------------------
#
# The library behind `@` chooses its order of summing by shape, place in the block, instruction set and number of threads,
# and float sums depend on their order. Here they cannot: either every partial sum is exact, or NumPy sums each row by
# itself. So bits depend only on the two vectors, not on the batch, the CPU or its threads.


class ExactProduct:
    """vectors @ weight.T in float32: the same bits for a row alone, in any batch, on any machine.

    Each row becomes whole numbers times a power of two, in two parts with so few bits that a sum of products stays below
    2**53: float64 then adds them without rounding, so that their order cannot matter. The answer is nearer to the true
    one than a product in float32; it takes five to eight times as long.
    """

    def __init__(self, weight: Floats) -> None:
        terms = max(weight.shape[1], 1)
        self._bits = (EXACT_BITS - (terms - 1).bit_length()) // 2
        large, small, exponents = _whole_numbers(weight, self._bits)
        self._large, self._small, self._exponents = large.T, small.T, exponents.T

    def __call__(self, vectors: Floats) -> Floats:
        # An infinity or NaN makes the whole row NaN, without a warning for each.
        with np.errstate(invalid="ignore", over="ignore"):
            large, small, exponents = _whole_numbers(vectors, self._bits)
            sums = large @ self._large + np.ldexp(large @ self._small + small @ self._large, -self._bits)
            made: Floats = np.ldexp(sums, exponents + self._exponents).astype(np.float32)
            return made


def dot_scores(vector: Floats, rows: Floats) -> Floats:
    """The dot product of a vector with each row."""
    made: Floats = (_doubles(rows) * _doubles(vector)).sum(axis=1).astype(np.float32)
    return made


def distances(vector: Floats, rows: Floats) -> Floats:
    """The Euclidean distance of a vector from each row."""
    made: Floats = np.sqrt(np.square(_doubles(rows) - _doubles(vector)).sum(axis=1)).astype(np.float32)
    return made


def _whole_numbers(rows: Floats, bits: int) -> tuple[Doubles, Doubles, Ints]:
    """(large + small / 2**bits) * 2**exponent: two matrices of whole numbers of at most `bits` bits, one exponent a row."""
    values = _doubles(rows)
    exponents: Ints = np.frexp(np.abs(values).max(axis=1, keepdims=True, initial=0.0))[1] - bits
    scaled = np.ldexp(values, -exponents)
    large = np.rint(scaled)
    return large, np.rint(np.ldexp(scaled - large, bits)), exponents


def _doubles(values: Floats) -> Doubles:
    return np.ascontiguousarray(values, np.float64)
