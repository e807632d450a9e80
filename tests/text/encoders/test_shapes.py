"""Cutting batches into shapes: nothing is lost, nothing is too large, and the shapes are few."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytorch.text.encoders.shapes import (
    PackedShape,
    RowShape,
    longest_class,
    most_rows,
    padded_length,
    plan_packed,
    plan_rows,
    step_up,
)

LENGTHS = st.lists(st.integers(1, 512), max_size=300)
MOST = 512


def test_the_ladder() -> None:
    assert [step_up(n, 16, 2) for n in (1, 16, 17, 25, 33, 100)] == [16, 16, 24, 32, 48, 128]
    assert [padded_length(n, MOST) for n in (1, 8, 9, 31, 33, 41, 65, 256, 257, 512)] == [
        8, 8, 16, 32, 40, 48, 80, 256, 320, 512,
    ]  # fmt: skip
    assert padded_length(30, 30) == 30, "never more positions than the model has"
    assert [longest_class(n, 1000) for n in (1, 33, 128, 129, 600)] == [32, 64, 128, 256, 1000]


@given(LENGTHS, st.sampled_from([64, 1000, 16384]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_packed_chunks_are_consecutive_and_hold_their_texts(lengths: list[int], budget: int, fixed: bool) -> None:
    chunks = plan_packed(lengths, budget, MOST, fixed=fixed)
    texts = [int(text) for chunk in chunks for text in chunk.texts]
    assert texts == list(range(len(lengths)))
    for chunk in chunks:
        assert isinstance(chunk.shape, PackedShape)
        own = [lengths[text] for text in chunk.texts]
        assert sum(own) <= chunk.shape.tokens and max(own) <= chunk.shape.longest and len(own) <= chunk.shape.rows
        assert sum(own) <= budget or len(own) == 1
        if fixed:
            assert chunk.shape.rows <= max(most_rows(budget) * 2, 16) and chunk.shape.rows <= max(16, 2 * len(own))
            assert chunk.shape.tokens <= max(128, 1.34 * sum(own)), "at most a quarter is filling"
        else:
            assert chunk.shape.tokens == sum(own)


@given(LENGTHS, st.sampled_from([64, 1000, 16384]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_hold_every_text_once(lengths: list[int], budget: int, fixed: bool) -> None:
    chunks = plan_rows(lengths, budget, MOST, fixed=fixed)
    assert sorted(int(text) for chunk in chunks for text in chunk.texts) == list(range(len(lengths)))
    for chunk in chunks:
        assert isinstance(chunk.shape, RowShape)
        own = [lengths[text] for text in chunk.texts]
        assert max(own) <= chunk.shape.length <= MOST and 0 < len(own) <= chunk.shape.rows
        assert chunk.shape.tokens <= max(budget, chunk.shape.length)
        if not fixed:
            assert len(own) == chunk.shape.rows and chunk.shape.length == max(own)
            assert sum(own) > 0.8 * chunk.shape.tokens or min(own) > chunk.shape.length - 9


@pytest.mark.parametrize("plan", [plan_packed, plan_rows])
def test_fixed_shapes_are_few(plan: object) -> None:
    """Whatever the batch: graphs and compiled kernels are kept per shape."""
    generator = np.random.default_rng(3)
    found = set()
    for _ in range(150):
        lengths = np.clip(generator.lognormal(3.5, 1.0, int(generator.integers(1, 900))), 1, MOST).astype(int)
        found |= {chunk.shape for chunk in plan(lengths, 16384, MOST, fixed=True)}  # type: ignore[operator]
    assert len(found) <= 160
