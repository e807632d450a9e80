"""Tokens into batches and vectors into rows: the compiled way and NumPy's give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from anytorch.recorded import moves

Missing = Callable[[str, str], NoReturn]


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, missing: Missing) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(moves, "_library", lambda: None)
    elif moves._library() is None:
        missing("compiler", "the native library could not be built")
    return str(request.param)


def test_texts_are_gathered_in_any_order(way: str) -> None:
    lengths = np.array([3, 1, 4, 1, 5])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.arange(starts[-1], dtype=np.int32) * 10
    places = np.array([4, 0, 2, 0])
    found, begins = moves.gather_texts(ids, starts, places)
    wanted = [ids[starts[i] : starts[i + 1]] for i in places]
    np.testing.assert_array_equal(found, np.concatenate(wanted))
    np.testing.assert_array_equal(begins, [0, 5, 8, 12, 15])
    assert found.dtype == begins.dtype == np.int32


def test_no_texts_are_gathered_from_any(way: str) -> None:
    found, begins = moves.gather_texts(np.arange(3, dtype=np.int32), np.array([0, 3], np.int32), np.array([], np.intp))
    assert found.shape == (0,) and begins.tolist() == [0]


def test_rows_are_scattered(way: str) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    out = np.zeros((5, 8), np.float32)
    moves.scatter_rows(rows, np.array([4, 0, 3]), out)
    np.testing.assert_array_equal(out[[4, 0, 3]], rows)
    assert not out[[1, 2]].any()
    part = np.zeros((5, 16), np.float32)[:, ::2]  # rows that do not lie one after the other
    moves.scatter_rows(rows, np.array([4, 0, 3]), part)
    np.testing.assert_array_equal(part, out)


@pytest.mark.parametrize("place", [5, -6])
def test_a_row_outside_is_refused(way: str, place: int) -> None:
    with pytest.raises(IndexError):
        moves.scatter_rows(np.ones((1, 8), np.float32), np.array([place]), np.zeros((5, 8), np.float32))


def test_places_of_other_kinds_are_read_as_what_they_are(way: str) -> None:
    """32-bit places, read as 64-bit ones, would be rows 1, 3, 5 and 7, the last two from beyond the array."""
    places = np.array([1, 0, 3, 2, 5, 0, 7, 0], np.int32)[:4]
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    out = np.full((8, 2), -1, np.float32)
    moves.scatter_rows(rows, places, out)
    np.testing.assert_array_equal(out[places], rows)
    assert (out[4:] == -1).all()
    starts = np.array([0, 3, 4, 8, 9], np.int32)
    ids = np.arange(9, dtype=np.int32)
    want = [4, 5, 6, 7, 0, 1, 2]
    for one, where, which in [
        (ids, starts, np.array([2, 0], np.int32)),
        (ids, starts.astype(np.int64), np.array([2, 0])),
        (ids.astype(np.int64), starts, np.array([2, 0])),
    ]:
        found, begins = moves.gather_texts(one, where, which)
        assert found.tolist() == want and begins.tolist() == [0, 4, 7]


def test_rows_that_cannot_be_written_to_stay(way: str) -> None:
    out = np.zeros((5, 2), np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        moves.scatter_rows(np.ones((2, 2), np.float32), np.arange(2), out)
    assert not out.any()


@pytest.mark.parametrize("place", [2, -1])
def test_a_text_that_is_not_there_is_refused(way: str, place: int) -> None:
    with pytest.raises(IndexError, match=f"texts {place} to {place} are out of range: there are 2"):
        moves.gather_texts(np.arange(5, dtype=np.int32), np.array([0, 3, 5], np.int32), np.array([place]))


@pytest.mark.parametrize("starts", [[0, 3, 6], [-3, 3, 5], [0, 6, 5]])
def test_texts_outside_of_the_ids_are_refused(starts: list[int], missing: Missing) -> None:
    if moves._library() is None:
        missing("compiler", "the native library could not be built")
    with pytest.raises(IndexError, match="outside of the 5 ids"):
        moves.gather_texts(np.arange(5, dtype=np.int32), np.array(starts, np.int32), np.array([0, 1]))
