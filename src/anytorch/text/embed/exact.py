"""Products and scores whose bits depend only on the two vectors, not on the batch, the CPU or its threads.

The library behind `@` chooses its order of summing by shape, place in the block, instruction set and number of threads, and
float sums depend on their order. Here they cannot: either every partial sum is exact, or NumPy sums each row by itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

EXACT_BITS = 53  # float64 holds every whole number up to 2**53


class ExactProduct:
    """vectors @ weight.T in float32: the same bits for a row alone, in any batch, on any machine.

    Each row becomes whole numbers times a power of two, in two parts with so few bits that a sum of products stays below
    2**53: float64 then adds them without rounding, so that their order cannot matter. The answer is nearer to the true
    one than a product in float32; it takes five to eight times as long.
    """

    def __init__(self, weight: Vectors) -> None:
        terms = max(weight.shape[1], 1)
        self._bits = (EXACT_BITS - (terms - 1).bit_length()) // 2
        large, small, exponents = _whole_numbers(weight, self._bits)
        self._large, self._small, self._exponents = large.T, small.T, exponents.T

    def __call__(self, vectors: Vectors) -> Vectors:
        # An infinity or NaN makes the whole row NaN, without a warning for each.
        with np.errstate(invalid="ignore", over="ignore"):
            large, small, exponents = _whole_numbers(vectors, self._bits)
            sums = large @ self._large + np.ldexp(large @ self._small + small @ self._large, -self._bits)
            made: Vectors = np.ldexp(sums, exponents + self._exponents).astype(np.float32)
            return made


def dot_scores(vector: Vectors, rows: Vectors) -> Vectors:
    """The dot product of a vector with each row."""
    made: Vectors = (_doubles(rows) * _doubles(vector)).sum(axis=1).astype(np.float32)
    return made


def distances(vector: Vectors, rows: Vectors) -> Vectors:
    """The Euclidean distance of a vector from each row."""
    made: Vectors = np.sqrt(np.square(_doubles(rows) - _doubles(vector)).sum(axis=1)).astype(np.float32)
    return made


def _whole_numbers(rows: Vectors, bits: int) -> tuple[Doubles, Doubles, npt.NDArray[np.int32]]:
    """(large + small / 2**bits) * 2**exponent: two matrices of whole numbers of at most `bits` bits, one exponent a row."""
    values = _doubles(rows)
    exponents: npt.NDArray[np.int32] = np.frexp(np.abs(values).max(axis=1, keepdims=True, initial=0.0))[1] - bits
    scaled = np.ldexp(values, -exponents)
    large = np.rint(scaled)
    return large, np.rint(np.ldexp(scaled - large, bits)), exponents


def _doubles(values: Vectors) -> Doubles:
    return np.ascontiguousarray(values, np.float64)
