"""Project vectors onto a plane for display: the two directions in which they differ most (PCA)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def project_to_plane(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """[n, dim] → [n, 2], the largest distance from the middle being 1. Fewer than three points lie on a line.

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
