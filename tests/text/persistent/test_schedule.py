"""The plan of one launch, without a device: every number once, none read before it is written, nobody waits for ever."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from anytorch.text.decoders.spec import DecoderSpec, read_spec
from anytorch.text.persistent import cuda
from anytorch.text.persistent.schedule import SLOT, SPLIT, Span, plan, played, rows_at_once, share

SMALL: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 1003,
    "hidden_size": 264,
    "intermediate_size": 520,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def spec_of(**more: Any) -> DecoderSpec:
    return read_spec({**SMALL, **more}, "a config.json")


@pytest.mark.parametrize("blocks", [7, 132])
@pytest.mark.parametrize("place", [0, 3000])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("window", [None, 200])
def test_every_number_is_computed_once_and_nobody_waits_for_ever(
    blocks: int, place: int, bits: int, window: int | None
) -> None:
    spec = spec_of(sliding_window=window)
    written = played(plan(spec, blocks, place, bits), [Span("word", 0, 0, spec.width)])
    sizes = {"qkv": 6 * 64 + 2 * 3 * 64, "mixed": 6 * 64, "middle": 264, "inner": 520, "end": 264}
    for layer in range(3):
        for what, size in sizes.items():
            assert written[what, layer] == [1] * size, (what, layer)
        assert set(written["parts", layer]) <= {0, 1} and sum(written["parts", layer]) >= 3
    assert written["logits", 0] == [1] * 1003


def test_a_model_as_large_as_a_real_one() -> None:
    """Qwen3-0.6B's shape with four layers, on as many blocks as an H200 has, with splits of the context."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    spec = spec_of(**shape, head_dim=128, vocab_size=5000, num_hidden_layers=4)
    written = played(plan(spec, 132, 1000), [Span("word", 0, 0, 1024)])
    assert sum(written["parts", 2]) == 8 * 8 and written["mixed", 3] == [1] * 2048


def test_blocks_that_wait_for_one_another_are_noticed() -> None:
    tasks = plan(spec_of(), 4, 10)
    swapped = tasks[1][1]
    tasks[1][1:3] = [tasks[1][2], swapped]  # one block wants to go on before its part of the attention
    with pytest.raises(RuntimeError, match="wait for ever"):
        played(tasks, [Span("word", 0, 0, 264)])
    tasks = plan(spec_of(), 4, 10)
    twice = tasks[2][0]
    tasks[3][0] = replace(twice)
    with pytest.raises(RuntimeError, match="wait for ever"):  # and rows of another block are computed by nobody
        played(tasks, [Span("word", 0, 0, 264)])


def test_shares_are_whole_and_even() -> None:
    for units in (1, 131, 132, 1000):
        ranges = [share(units, block, 132) for block in range(132)]
        assert ranges[0][0] == 0 and ranges[-1][1] == units
        assert all(one[1] == other[0] for one, other in pairwise(ranges))
        assert max(end - begin for begin, end in ranges) - min(end - begin for begin, end in ranges) <= 1


def test_the_source_has_the_same_plan() -> None:
    """What the plan repeats of it."""
    source = cuda.SOURCE.read_text()
    assert f"CHUNK = {SLOT}" in source and f"#define SPLIT {SPLIT}" in source
    assert "(int)(units * block / BLOCKS)" in source
    assert "QKV_UNIT = Rows<WIDTH>::AT_ONCE, PAIR_UNIT = larger(2, Rows<WIDTH>::AT_ONCE)" in source
    assert "BACK_UNIT = larger(Rows<Q>::AT_ONCE, Rows<INNER>::AT_ONCE)" in source
    assert len(re.findall(r"AT_ONCE = 4 \* BYTES <= CHUNK \? 4 : 2 \* BYTES <= CHUNK \? 2 : 1", source)) == 2
    assert "kv = blockIdx.x / MOST_SPLITS, split = blockIdx.x % MOST_SPLITS" in source
    assert [rows_at_once(1024), rows_at_once(512), rows_at_once(4096), rows_at_once(1024, 4)] == [2, 4, 1, 4]
