"""Comparing vectors: similarity matrices and the k nearest, in blocks of bounded memory. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytorch.errors import InputError, UsageError
from anytorch.text.embed.head import normalized, out_shape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BLOCK_SCORES = 4_000_000  # scores held at once


@dataclass(frozen=True)
class Hit:
    """One of the nearest: its number in the corpus, its score (higher is nearer), and its text if texts were given."""

    index: int
    score: float
    text: str | None = None


def as_matrix(vectors: Any, what: str = "vectors") -> npt.NDArray[Any]:
    """Any array-like of one or more vectors (NumPy, torch, Arrow, lists) as a matrix."""
    import numpy as np

    if hasattr(vectors, "detach"):  # a torch tensor, on any device
        vectors = vectors.detach().cpu().float().numpy()
    elif hasattr(vectors, "flatten") and hasattr(vectors, "type") and hasattr(vectors, "to_pylist"):  # an Arrow array
        rows = len(vectors)
        flat = np.asarray(vectors.flatten())
        vectors = flat.reshape(rows, -1) if rows else np.zeros((0, vectors.type.list_size), flat.dtype)
    try:
        matrix = np.asarray(vectors)
    except ValueError as exc:
        raise InputError(f"the {what} are not all of the same length: {exc}") from exc
    if matrix.ndim == 1:
        matrix = matrix[None]
    if matrix.ndim != 2 or matrix.dtype.kind not in "fiu":
        raise InputError(
            f"the {what} must be rows of numbers; found {matrix.dtype} of shape {list(matrix.shape)}",
            hint="give what `encode` returned",
        )
    return matrix


def vectors_of(
    given: Any, precision: str, encode: Callable[[Any, str], npt.NDArray[Any]], width: int
) -> npt.NDArray[Any]:
    """Texts encoded so that they can be compared with vectors of this precision; vectors as they are.

    `encode(texts, precision)` makes vectors of texts, `width` dimensions each.
    """
    import numpy as np

    given = [given] if isinstance(given, str) else listed(given)
    if isinstance(given, (list, tuple)):
        # Bits can be compared with bits only; all else is compared as float32.
        kept = precision if precision in ("binary", "ubinary") else "float32"
        if not given:
            return np.zeros((0, out_shape(width, kept)[0]), np.float32)
        if isinstance(given[0], str):
            return encode(given, kept)
    return as_matrix(given)


def listed(given: Any) -> Any:
    """A column of texts (NumPy, pandas, Arrow, …) as a list; anything else as it is."""
    if isinstance(given, (str, list, tuple)) or not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        return given
    if hasattr(given, "to_pylist"):  # Arrow; its items are scalars, which are no str
        return given.to_pylist() if str(getattr(given, "type", "")).endswith(("string", "string_view")) else given
    first = next(iter(given), None) if getattr(given, "ndim", 1) == 1 else None
    return list(given) if isinstance(first, str) else given


def prepared(matrix: npt.NDArray[Any], kind: str, precision: str = "float32") -> npt.NDArray[np.float32]:
    """Rows ready for a product: normalised for cosine, bits as ±1 for binary vectors."""
    import numpy as np

    if precision in ("binary", "ubinary"):
        packed = (matrix.astype(np.int16) + 128).astype(np.uint8) if precision == "binary" else matrix.astype(np.uint8)
        floats = np.unpackbits(packed, axis=-1).astype(np.float32) * 2 - 1
    else:
        floats = matrix.astype(np.float32, copy=False)
    return normalized(floats) if kind == "cosine" else floats


def scores(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], kind: str) -> npt.NDArray[np.float32]:
    """Similarities, higher is nearer: cosine and dot products, or distances with a minus."""
    import numpy as np

    if a.shape[1] != b.shape[1]:
        raise InputError(f"vectors of {a.shape[1]} and of {b.shape[1]} dimensions cannot be compared")
    if kind in ("cosine", "dot"):
        found: npt.NDArray[np.float32] = a @ b.T
        return np.clip(found, -1.0, 1.0, out=found) if kind == "cosine" else found
    if kind == "euclidean":
        squared = np.square(a).sum(1)[:, None] + np.square(b).sum(1)[None] - 2 * (a @ b.T)
        distances: npt.NDArray[np.float32] = -np.sqrt(np.maximum(squared, 0))
        return distances
    if kind == "manhattan":
        return np.stack([-np.abs(row - b).sum(1) for row in a]) if len(a) else np.zeros((0, len(b)), np.float32)
    raise UsageError(f"similarity {kind!r} is not one of cosine, dot, euclidean, manhattan")


def nearest(
    queries: npt.NDArray[np.float32], corpus: npt.NDArray[np.float32], k: int, kind: str
) -> Iterator[list[tuple[int, float]]]:
    """For each query the k nearest rows of the corpus, best first; of equal ones the lower number.

    The corpus is gone through in blocks, so that memory does not grow with queries × corpus.
    """
    import numpy as np

    k = min(k, len(corpus))
    rows = max(1, min(len(queries), 1024))
    columns = max(k, BLOCK_SCORES // rows, 1)
    for begin in range(0, len(queries), rows):
        some = queries[begin : begin + rows]
        best = np.zeros((len(some), 0), np.float32)
        which = np.zeros((len(some), 0), np.int64)
        for first in range(0, len(corpus), columns):
            block = scores(some, corpus[first : first + columns], kind)
            numbers = np.broadcast_to(np.arange(first, first + block.shape[1]), block.shape)
            best = np.concatenate((best, block), axis=1)
            which = np.concatenate((which, numbers), axis=1)
            if best.shape[1] > k:
                keep = _largest(best, k)
                best, which = np.take_along_axis(best, keep, 1), np.take_along_axis(which, keep, 1)
        order = np.lexsort((which, -best), axis=1)
        best, which = np.take_along_axis(best, order, 1), np.take_along_axis(which, order, 1)
        for scores_of, numbers_of in zip(best, which, strict=True):
            yield [(int(number), float(score)) for number, score in zip(numbers_of, scores_of, strict=True)]


def _largest(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """The columns of each row's k largest scores, [rows, k]; where equal ones compete for a place, the first of them."""
    import numpy as np

    keep = np.empty((len(scores), k), np.intp)
    for row, negative in enumerate(-scores):
        # Partitioning alone keeps any of the equal ones. Not "<=", so that NaN, which is last, is not lost.
        places = np.flatnonzero(~(negative > np.partition(negative, k - 1)[k - 1]))
        keep[row] = places[np.argsort(negative[places], kind="stable")[:k]]
    return keep
