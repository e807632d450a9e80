"""Tokens into batches and vectors into rows: the compiled way and NumPy's give the same."""

from __future__ import annotations

import numpy as np
import pytest

from anytorch.models.encoders import moves


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(moves, "_library", lambda: None)
    elif moves._library() is None:
        pytest.skip("no C++ compiler here")
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
