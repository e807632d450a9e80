"""MPNet's attention bias: buckets of distances, near ones apart and far ones together."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

SLACK = 64  # floats after the last distance: the C++ reads whole vectors


def bucket(distance: npt.NDArray[np.int64], buckets: int, greatest: int) -> npt.NDArray[np.int64]:
    """The bucket of each distance j - i. Half of them for either direction; of these half exact, half logarithmic."""
    half = buckets // 2
    n = -distance
    side = (n < 0).astype(np.int64) * half
    n = np.abs(n)
    exact = half // 2
    with np.errstate(divide="ignore"):
        # In float32, like the reference: at the edges of a bucket the rounding decides.
        ratio = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact)) / math.log(greatest / exact)
    far = exact + (ratio.astype(np.float32) * (half - exact)).astype(np.int64)
    return side + np.where(n < exact, n, np.minimum(far, half - 1))


def distance_biases(
    table: npt.NDArray[np.float32], positions: int, greatest: int
) -> tuple[npt.NDArray[np.float32], int]:
    """[heads, …] biases by distance from -(positions - 1) on, and the column of distance 0."""
    distances = np.arange(-(positions - 1), positions)
    rows = bucket(distances, table.shape[0], greatest)
    biases = np.zeros((table.shape[1], len(distances) + SLACK), np.float32)
    biases[:, : len(distances)] = table[rows].T
    return biases, positions - 1
