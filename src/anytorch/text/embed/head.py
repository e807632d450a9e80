"""Turn pooled vectors into the result: Dense, LayerNorm, normalising, Matryoshka dimensions, int8 and binary, in NumPy.

Every function treats each row by itself and gives it the same bits whatever rows stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from anytorch.errors import ModelError, UsageError
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.embed.exact import ExactProduct
from anytorch.text.embed.recipe import Recipe, Step

Vectors = npt.NDArray[np.float32]

Precision = Literal["float32", "float16", "int8", "binary", "ubinary"]
PRECISIONS = ("float32", "float16", "int8", "binary", "ubinary")
Output = Literal["numpy", "torch", "arrow", "list"]
OUTPUTS = ("numpy", "torch", "arrow", "list")


class Head:
    """The steps after pooling, ready to apply. `width` in, `out_width` out."""

    def __init__(
        self, recipe: Recipe, width: int, *, normalize: bool | None = None, normalized_already: bool = False
    ) -> None:
        self.width = width
        self._steps: list[Callable[[Vectors], Vectors]] = []
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
        self.kinds = tuple(kinds)
        # Cut to fewer dimensions, a unit vector is one no longer; normalising again is what makes it comparable.
        self.normalizes = bool(kinds) and kinds[-1] == "normalize"

    @property
    def does_nothing(self) -> bool:
        """True if pooled vectors are the result as they are."""
        return not self._steps

    def __call__(self, pooled: Vectors, dim: int | None = None) -> Vectors:
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
    return [*steps, Step("normalize")] if normalize and not recipe.normalizes else steps


def only_normalizes(recipe: Recipe, normalize: bool | None) -> bool:
    """True if normalising is the only step after pooling, so that the device may do it."""
    return [step.kind for step in chosen_steps(recipe, normalize)] == ["normalize"]


def normalized(vectors: Vectors) -> Vectors:
    """Rows of length 1; a row of zeros stays one (as torch's F.normalize has it)."""
    # Not einsum or matmul: their order of summing depends on the number of rows.
    lengths = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True, dtype=np.float32))
    result: Vectors = vectors / np.maximum(lengths, np.float32(1e-12))
    return result


def _layer_norm(step: Step, width: int) -> Callable[[Vectors], Vectors]:
    weights = _weights(step)
    scale, shift = weights["norm.weight"], weights["norm.bias"]
    if scale.shape != (width,) or shift.shape != (width,):
        raise ModelError(f"{step.folder}: a LayerNorm of {scale.shape[0]} features follows vectors of {width}")

    def apply(vectors: Vectors) -> Vectors:
        centred = vectors - vectors.mean(axis=1, keepdims=True)
        variance = np.square(centred).mean(axis=1, keepdims=True)
        result: Vectors = centred / np.sqrt(variance + np.float32(1e-5)) * scale + shift
        return result

    return apply


def _dense(step: Step, width: int) -> tuple[Callable[[Vectors], Vectors], int]:
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

    def apply(vectors: Vectors) -> Vectors:
        made = product(vectors)
        if bias is not None:
            made += bias
        made = activation(made)
        if residual:
            made = made + (vectors if product_across is None else product_across(vectors))
        return made

    return apply, int(weight.shape[0])


def _activation(name: str, step: Step) -> Callable[[Vectors], Vectors]:
    def sigmoid(x: Vectors) -> Vectors:
        made: Vectors = np.float32(1) / (np.float32(1) + np.exp(-x))
        return made

    known: dict[str, Callable[[Vectors], Vectors]] = {
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


def _gelu(x: Vectors) -> Vectors:
    from math import erf, sqrt

    made: Vectors = (0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / sqrt(2)))).astype(np.float32)
    return made


def _weights(step: Step) -> dict[str, Vectors]:
    assert step.folder is not None
    with Checkpoint(step.folder) as checkpoint:
        return {name: np.array(checkpoint.tensor(name), np.float32) for name in checkpoint.names()}


# --- what is handed out ----------------------------------------------------------------------------------------------


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise UsageError(f"precision={precision!r} is not one of {', '.join(PRECISIONS)}")


def out_shape(width: int, precision: str) -> tuple[int, str]:
    """Columns and NumPy dtype of the answer for vectors of `width` dimensions."""
    if precision in ("binary", "ubinary"):
        return (width + 7) // 8, "int8" if precision == "binary" else "uint8"
    return width, precision


def as_precision(vectors: Vectors, precision: str) -> npt.NDArray[Any]:
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


def check_output(output: str) -> None:
    if output not in OUTPUTS:
        raise UsageError(f"output={output!r} is not one of {', '.join(OUTPUTS)}")


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
