"""Products whose order of summing cannot matter: against exact arithmetic, and with the terms in any order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from anytorch.text.embed.compare import nearest, scores
from anytorch.text.embed.head import ExactProduct, distances, dot_scores


def numbers(rows: int, width: int, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    scale = np.exp(generator.standard_normal((rows, width)) * spread)
    return (generator.standard_normal((rows, width)) * scale).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 24, 384, 1000, 4097])
@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_the_order_of_the_terms_does_not_matter(width: int, spread: float) -> None:
    x, weight = numbers(9, width, 0, spread), numbers(13, width, 1, spread)
    expected = ExactProduct(weight)(x)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(width)
        assert np.array_equal(ExactProduct(weight[:, order])(x[:, order]), expected)


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_it_is_at_least_as_near_to_the_truth_as_float32(spread: float) -> None:
    x, weight = numbers(20, 384, 0, spread), numbers(10, 384, 1, spread)
    found, plain = ExactProduct(weight)(x), x @ weight.T
    off, plain_off = [], []
    for i in range(20):
        for j in range(10):
            true = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x[i], weight[j], strict=True))
            size = float(np.abs(x[i].astype(float) * weight[j]).sum())
            off.append(abs(float(Fraction(float(found[i, j])) - true)) / size)
            plain_off.append(abs(float(Fraction(float(plain[i, j])) - true)) / size)
    assert max(off) < 2e-7
    assert np.mean(off) <= np.mean(plain_off)


def test_odd_values() -> None:
    weight = np.array([[2, 2, 2], [0, 0, 0]], np.float32)
    x = np.array([[np.nan, 0, 0], [np.inf, 1, 0], [0, 0, 0], [1e-40, 0, 1e-45], [3e38, 3e38, 0]], np.float32)
    found = ExactProduct(weight)(x)
    assert np.isnan(found[:2]).all()
    assert np.array_equal(found[2], [0, 0])
    assert found[3, 0] == np.float32(2) * (x[3, 0] + x[3, 2])
    assert np.array_equal(found[4], [np.inf, 0])
    assert ExactProduct(weight)(x[:0]).shape == (0, 2)


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "manhattan"])
@pytest.mark.parametrize("copies", [1, 7])
def test_the_nearest_do_not_depend_on_blocks_or_other_queries(
    kind: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anytorch.text.embed import compare

    corpus = np.concatenate([numbers(150, 40, 1)] * copies)  # equal rows: the lower number is the nearer one
    queries = numbers(5, 40, 2)
    if kind == "cosine":
        corpus, queries = (m / np.linalg.norm(m, axis=1, keepdims=True) for m in (corpus, queries))
    whole = list(nearest(queries, corpus, 9, kind))
    for found, row in zip(whole, scores(queries.astype(float), corpus.astype(float), kind), strict=True):
        assert [number for number, _ in found] == np.lexsort((np.arange(len(row)), -row.astype(np.float32)))[
            :9
        ].tolist()
        np.testing.assert_allclose([score for _, score in found], [row[n] for n, _ in found], rtol=2e-6, atol=2e-6)
    for held in (1, 100, 333):
        monkeypatch.setattr(compare, "BLOCK_SCORES", held)
        assert list(nearest(queries, corpus, 9, kind)) == whole
        assert [next(nearest(queries[i : i + 1], corpus, 9, kind)) for i in range(5)] == whole


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean"])
def test_rows_that_are_not_numbers_come_last_and_are_not_lost(kind: str) -> None:
    corpus, query = numbers(30, 8, 1), numbers(1, 8, 2)
    corpus[4] = np.nan
    found = next(nearest(query, corpus, 30, kind))
    assert found[-1][0] == 4 and np.isnan(found[-1][1])
    assert sorted(number for number, _ in found) == list(range(30))
    assert [n for n, _ in next(nearest(query, corpus, 3, kind))] == [n for n, _ in found[:3]]


def test_scores_of_huge_and_tiny_vectors() -> None:
    corpus = np.array([[1e30, 1e30], [1e-30, 2e-30], [-1, 0], [3e-30, 1e-30]], np.float32)
    tiny = np.array([[1e-30, 0]], np.float32)
    assert [n for n, _ in next(nearest(tiny, corpus, 4, "dot"))] == [0, 1, 3, 2]
    assert [n for n, _ in next(nearest(tiny * 0, corpus, 4, "euclidean"))] == [1, 3, 2, 0]


def test_single_rows_and_many_have_the_same_bits() -> None:
    rows, query = numbers(50, 384), numbers(1, 384, 3)[0]
    for score in (dot_scores, distances):
        whole = score(query, rows)
        assert all(score(query, rows[i : i + 1])[0] == whole[i] for i in range(50))
        assert np.array_equal(score(query, np.asfortranarray(rows)), whole)
