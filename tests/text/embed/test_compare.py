"""Similarities and searches over an engine's vectors and texts. No compiler needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch.errors import InputError, UsageError
from anytorch.text.embed.engine import ArrowEngine

TEXTS = [f"sentence {n} " + "and more words " * (n % 11) for n in range(300)]


def test_similarity(engine: ArrowEngine) -> None:
    vectors = engine.encode(TEXTS[:20])
    matrix = engine.similarity(TEXTS[:20])
    assert matrix.shape == (20, 20) and np.allclose(np.diag(matrix), 1, atol=1e-6) and np.allclose(matrix, matrix.T)
    assert np.allclose(matrix, vectors @ vectors.T, atol=1e-6)
    assert np.allclose(engine.similarity(vectors * 7, TEXTS[:3]), matrix[:, :3], atol=1e-6)
    assert engine.similarity("one", "two").shape == (1, 1) and engine.similarity([], TEXTS[:3]).shape == (0, 3)
    eight = engine.encode(TEXTS[:20], precision="int8")
    assert np.abs(engine.similarity(eight) - matrix).max() < 0.02
    bits = engine.encode(TEXTS[:20], precision="binary")
    same = engine.similarity(bits, precision="binary")
    signs = np.where(vectors > 0, 1, -1)
    assert np.allclose(same, signs @ signs.T / 16, atol=1e-6)
    unsigned = engine.encode(TEXTS[:20], precision="ubinary")
    assert np.array_equal(engine.similarity(unsigned, precision="ubinary"), same)
    with pytest.raises(InputError, match="16 and of 3 dimensions"):
        engine.similarity(vectors, np.zeros((2, 3)))
    with pytest.raises(InputError, match="rows of numbers"):
        engine.similarity(np.array([["a"]]))


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "manhattan"])
def test_search_finds_what_sorting_finds(kind: str, copied_model: Path, fake_engine: Callable[..., Any]) -> None:
    (copied_model / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": kind}))
    engine = fake_engine(model_path=copied_model)
    rng = np.random.default_rng(0)
    corpus, queries = rng.standard_normal((500, 16)).astype("f"), rng.standard_normal((9, 16)).astype("f")
    scores = engine.similarity(queries, corpus)
    for row, hits in zip(scores, engine.search(queries, corpus, 7), strict=True):
        assert [hit.index for hit in hits] == np.argsort(-row, kind="stable")[:7].tolist()
        assert np.allclose([hit.score for hit in hits], np.sort(row)[::-1][:7], atol=1e-5) and hits[0].text is None


def test_search_among_texts(engine: ArrowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = engine.search(TEXTS[42], TEXTS, 3)
    assert hits[0].index == 42 and hits[0].text == TEXTS[42] and hits[0].score == pytest.approx(1, abs=1e-5)
    assert len(engine.search("x", TEXTS[:2], 10)) == 2 and engine.search("x", [], 3) == []
    assert [len(found) for found in engine.search(["a", "b"], iter(TEXTS), 4)] == [4, 4]
    from anytorch.text.embed import compare

    whole = engine.search(TEXTS[:5], TEXTS, 4)
    monkeypatch.setattr(compare, "BLOCK_SCORES", 100)
    assert engine.search(TEXTS[:5], TEXTS, 4) == whole, "in blocks, the same"
    arrow = engine.encode(TEXTS, output="arrow")
    assert [hit.index for hit in engine.search(TEXTS[7], arrow, 2)] == [
        h.index for h in engine.search(TEXTS[7], TEXTS, 2)
    ]
    for k in (0, -1, True, 2.5):
        with pytest.raises(UsageError, match="k="):
            engine.search("x", TEXTS, k)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_texts_are_compared_as_bits_where_bits_are_asked_for(engine: ArrowEngine, precision: str) -> None:
    bits = engine.encode(TEXTS[:20], precision=precision)
    expected = engine.similarity(bits, precision=precision)
    assert np.array_equal(engine.similarity(TEXTS[:20], precision=precision), expected)
    assert np.array_equal(engine.similarity(TEXTS[:20], bits, precision=precision), expected)
    assert engine.similarity([], bits, precision=precision).shape == (0, 20)
    assert engine.search(TEXTS[4], bits, 1, precision=precision)[0].index == 4
    for compare in (engine.similarity, engine.search):
        with pytest.raises(UsageError, match="precision='int3'"):
            compare(TEXTS[:2], TEXTS[:2], precision="int3")


def test_columns_of_texts(engine: ArrowEngine) -> None:
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    expected, vectors = engine.search(TEXTS[3], TEXTS[:9], 2), engine.encode(TEXTS[:9])
    several = pyarrow.chunked_array([TEXTS[:4], TEXTS[4:9]])
    for column in (
        np.array(TEXTS[:9]),
        pandas.Series(TEXTS[:9], index=range(5, 14)),
        pyarrow.array(TEXTS[:9]),
        several,
    ):
        assert engine.search(TEXTS[3], column, 2) == expected
        assert np.array_equal(engine.encode(column), vectors)
        assert np.array_equal(np.stack(list(engine.encode_iter(column))), vectors)
        assert engine.similarity(column).shape == (9, 9)
    with pytest.raises(InputError, match="text 1 is NoneType"):
        engine.encode(pyarrow.array(["a", None]))


def test_of_equal_scores_the_first_are_found(engine: ArrowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.text.embed import compare

    rng = np.random.default_rng(0)
    query = np.ones((1, 1), np.float32)
    for block in (compare.BLOCK_SCORES, 50):
        monkeypatch.setattr(compare, "BLOCK_SCORES", block)
        for count, k in ((5, 2), (50, 7), (1000, 7), (1000, 1)):
            corpus = rng.integers(0, 3, (count, 1)).astype(np.float32)
            found = [number for number, _ in next(compare.nearest(query, corpus, k, "dot"))]
            assert found == np.argsort(-corpus[:, 0], kind="stable")[:k].tolist()
