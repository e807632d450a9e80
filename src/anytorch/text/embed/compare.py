"""Comparing vectors: similarity matrices, the k nearest in blocks of bounded memory, and a plane to see them on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anytorch.errors import InputError, UsageError
from anytorch.text.checkpoints.checkpoint import Floats
from anytorch.text.embed.head import distances, dot_scores, normalized

BLOCK_SCORES = 4_000_000  # scores held at once


@dataclass(frozen=True)
class Hit:
    """One of the nearest: its number in the corpus, its score (higher is nearer), and its text if texts were given."""

    index: int
    score: float
    text: str | None = None


def as_matrix(vectors: Any) -> npt.NDArray[Any]:
    """Any array-like of one or more vectors (NumPy, torch, Arrow, lists) as a matrix."""
    if hasattr(vectors, "detach"):  # a torch tensor, on any device
        vectors = vectors.detach().cpu().float().numpy()
    elif hasattr(vectors, "flatten") and hasattr(vectors, "type") and hasattr(vectors, "to_pylist"):  # an Arrow array
        rows = len(vectors)
        flat = np.asarray(vectors.flatten())
        vectors = flat.reshape(rows, -1) if rows else np.zeros((0, vectors.type.list_size), flat.dtype)
    try:
        matrix = np.asarray(vectors)
    except ValueError as exc:
        raise InputError(f"the vectors are not all of the same length: {exc}") from exc
    if matrix.ndim == 1:
        matrix = matrix[None]
    if matrix.ndim != 2 or matrix.dtype.kind not in "fiu":
        raise InputError(
            f"the vectors must be rows of numbers; found {matrix.dtype} of shape {list(matrix.shape)}",
            hint="pass what `encode` returned",
        )
    return matrix


def listed(given: Any) -> Any:
    """A column of texts (NumPy, pandas, Arrow, …) as a list; anything else as it is."""
    if isinstance(given, (str, list, tuple)) or not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        return given
    if hasattr(given, "to_pylist"):  # Arrow; its items are scalars, which are no str
        return given.to_pylist() if str(getattr(given, "type", "")).endswith(("string", "string_view")) else given
    first = next(iter(given), None) if getattr(given, "ndim", 1) == 1 else None
    return list(given) if isinstance(first, str) else given


def prepared(matrix: npt.NDArray[Any], kind: str, precision: str = "float32") -> Floats:
    """Rows ready for a product: normalised for cosine, bits as ±1 for binary vectors."""
    if precision in ("binary", "ubinary"):
        packed = (matrix.astype(np.int16) + 128).astype(np.uint8) if precision == "binary" else matrix.astype(np.uint8)
        floats = np.unpackbits(packed, axis=-1).astype(np.float32) * 2 - 1
    else:
        floats = matrix.astype(np.float32, copy=False)
    return normalized(floats) if kind == "cosine" else floats


def scores(a: Floats, b: Floats, kind: str) -> Floats:
    """Similarities, higher is nearer: cosine and dot products, or distances with a minus."""
    if a.shape[1] != b.shape[1]:
        raise InputError(f"vectors of {a.shape[1]} and of {b.shape[1]} dimensions cannot be compared")
    if kind in ("cosine", "dot"):
        found: Floats = a @ b.T
        return np.clip(found, -1.0, 1.0, out=found) if kind == "cosine" else found
    if kind == "euclidean":
        squared = np.square(a).sum(1)[:, None] + np.square(b).sum(1)[None] - 2 * (a @ b.T)
        nearness: Floats = -np.sqrt(np.maximum(squared, 0))
        return nearness
    if kind == "manhattan":
        return np.stack([-np.abs(row - b).sum(1) for row in a]) if len(a) else np.zeros((0, len(b)), np.float32)
    raise UsageError(f"similarity {kind!r} is not one of cosine, dot, euclidean, manhattan")


def nearest(queries: Floats, corpus: Floats, k: int, kind: str) -> Iterator[list[tuple[int, float]]]:
    """For each query the k nearest rows of the corpus, best first; of equal ones the lower number.

    The corpus is gone through in blocks, so that memory does not grow with queries × corpus. A quick product says which
    rows of a block may be among the k nearest; these are scored again, each by itself, so that neither scores nor ranks
    depend on blocks, on other queries or on the CPU.
    """

    k = min(k, len(corpus))
    rows = max(1, min(len(queries), 1024))
    columns = max(k, BLOCK_SCORES // rows, 1)
    for begin in range(0, len(queries), rows):
        some = queries[begin : begin + rows]
        found = [_Found(k) for _ in some]
        for first in range(0, len(corpus), columns):
            block = corpus[first : first + columns]
            rough, error = _rough_scores(some, block, kind)
            for query, mine, estimates, off_by in zip(some, found, rough, error, strict=True):
                if len(which := mine.worth_scoring(estimates, off_by, kind)):
                    mine.add(first + which, _row_scores(query, block, which, kind))
        for mine in found:
            yield list(zip(mine.numbers.tolist(), mine.scores.tolist(), strict=True))


class _Found:
    """The k nearest rows so far, best first."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.numbers = np.zeros(0, np.int64)
        self.scores = np.zeros(0, np.float32)

    def worth_scoring(self, estimates: Floats, error: float, kind: str) -> npt.NDArray[np.intp]:
        """The indices that may be among the k nearest if no estimate is off by more than `error`."""
        # Everywhere "not below" instead of "at least": NaN, which is last, is not lost.
        which = np.arange(len(estimates))
        if len(self.scores) == self.k:
            last = float(self.scores[-1])
            which = np.flatnonzero(~(estimates < (-last * last if kind == "euclidean" else last) - 2 * error))
        if len(which) > self.k:
            negative = -estimates[which]
            which = which[~(negative > np.partition(negative, self.k - 1)[self.k - 1] + 2 * error)]
        return which

    def add(self, numbers: npt.NDArray[np.int64], scores: Floats) -> None:
        numbers, scores = np.concatenate((self.numbers, numbers)), np.concatenate((self.scores, scores))
        best = np.lexsort((numbers, -scores))[: self.k]
        self.numbers, self.scores = numbers[best], scores[best]


def _rough_scores(queries: Floats, block: Floats, kind: str) -> tuple[Floats, npt.NDArray[np.float64]]:
    """Estimates in the order of the scores (of Euclidean distances the squares, with a minus), and by how much the
    estimates of each query may be off at most: the classical bound of a sum of products, twice."""
    if kind == "manhattan":
        return scores(queries, block, kind), np.zeros(len(queries))
    rough = scores(queries, block, "cosine" if kind == "cosine" else "dot")
    unit = (queries.shape[1] + 8) * float(np.finfo(np.float32).eps)
    if kind == "cosine":
        return rough, np.full(len(queries), unit)
    with np.errstate(over="ignore", invalid="ignore"):
        squares, squares_of_block = np.square(queries).sum(1), np.square(block).sum(1)
        lengths = np.sqrt(squares.astype(np.float64))
        longest = np.sqrt(float(np.fmax.reduce(squares_of_block, initial=0.0)))  # without those that are NaN
        underflow = queries.shape[1] * float(np.finfo(np.float32).tiny)
        if kind == "dot":
            return rough, unit * lengths * longest + underflow
        estimates: Floats = 2 * rough - squares[:, None] - squares_of_block
        return estimates, unit * np.square(lengths + longest) + underflow


def _row_scores(query: Floats, block: Floats, which: npt.NDArray[np.intp], kind: str) -> Floats:
    """Scores of single rows, each with the same bits whatever is scored beside it."""
    if kind == "manhattan":
        alone: Floats = scores(query[None], block[which], kind)[0]
        return alone
    at_once = max(1, BLOCK_SCORES // max(1, len(query)))
    made = []
    for begin in range(0, len(which), at_once):
        rows = block[which[begin : begin + at_once]]
        made.append(-distances(query, rows) if kind == "euclidean" else dot_scores(query, rows))
    found: Floats = np.concatenate(made)
    return np.clip(found, -1.0, 1.0, out=found) if kind == "cosine" else found


def project_to_plane(vectors: npt.NDArray[Any]) -> Floats:
    """[n, dim] → [n, 2], the two directions in which the vectors differ most (PCA), the largest distance from the middle
    being 1. Fewer than three points lie on a line.

    The signs are fixed by the data (the largest part of each direction is positive), so that the same vectors give the same
    picture.
    """
    points = np.asarray(vectors, np.float64)
    out = np.zeros((len(points), 2), np.float32)
    if len(points) < 2:
        return out
    centred = points - points.mean(axis=0)
    # Of the smaller of the two products: n texts of 384 dimensions have either n or 384 directions.
    if len(points) <= points.shape[1]:
        values, u = np.linalg.eigh(centred @ centred.T)
        scale = np.sqrt(np.maximum(values, 0))
        directions = u * scale
    else:
        _, w = np.linalg.eigh(centred.T @ centred)
        directions = centred @ w
    best = directions[:, ::-1][:, :2]
    for axis in range(best.shape[1]):
        column = best[:, axis]
        out[:, axis] = column * np.sign(column[np.argmax(np.abs(column))] or 1)
    longest = float(np.sqrt((out.astype(np.float64) ** 2).sum(axis=1)).max())
    return out / np.float32(longest) if longest > 1e-12 else np.zeros_like(out)
