"""The checkpoint that comes with anytorch: small, whole, and it has learnt what the generator puts into its candles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch.errors import ModelError, UsageError
from anytorch.forecast.candles.generate import sample_candles, sample_market
from anytorch.forecast.candles.rhythm import future_times
from anytorch.forecast.checkpoints import choose_checkpoint, load_predictor
from anytorch.forecast.model.pretrained import MAX_CONTEXT, tiny_folder
from anytorch.forecast.training.scores import compare
from anytorch.forecast.training.windows import as_series


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_it_is_small_and_in_the_published_layout(kind: str) -> None:
    files = {path.name: path.stat().st_size for path in tiny_folder(kind).iterdir() if path.is_file()}
    assert set(files) == {"config.json", "model.safetensors"} and sum(files.values()) < 2 * 2**20


def test_it_knows_the_shape_of_the_day() -> None:
    """From noon: volume is to rise towards the close, be highest around the opening, and fall again."""
    frame = sample_candles(78 * 5 + 36, seed=31)  # ends at 12:25
    predictor = load_predictor("tiny", device="cpu")
    hours = future_times(frame["timestamps"], 60)  # 80 bars alone have seen one night, which proves none
    ahead = predictor.predict(frame.tail(80), None, hours, 60, sample_count=30, seed=1, top_p=1.0, verbose=False)
    volume = ahead["volume"].to_numpy()
    clock = ahead.index.strftime("%H:%M")
    late, first, noon = (
        volume[(clock >= low) & (clock < high)]
        for low, high in (("15:30", "16:00"), ("09:30", "10:00"), ("12:30", "13:00"))
    )
    assert late.mean() > 1.15 * noon.mean() and first.mean() > 1.15 * noon.mean()


def test_it_beats_the_last_value_and_the_season_on_candles_it_has_not_seen() -> None:
    series = as_series(sample_market(4, 700, seed=777, freq="1h", session="always"))
    found = compare(
        load_predictor("tiny", device="cpu"),
        series,
        lookback=96,
        horizon=16,
        season=24,
        validation=0.3,
        test=0.5,
        samples=10,
        most_windows=40,
        top_p=1.0,
    )
    skill = {(score.column, score.baseline): score.skill for score in found.scores if score.measure == "CRPS"}
    assert all(skill[column, other] > 0.1 for column in ("close", "volume") for other in ("last value", "seasonal"))
    assert np.isfinite(list(found.coverage.values())).all()


def test_which_tokenizer_goes_with_which_model() -> None:
    assert choose_checkpoint().max_context == MAX_CONTEXT
    assert choose_checkpoint("kronos-mini").tokenizer == "NeoQuasar/Kronos-Tokenizer-2k"
    assert choose_checkpoint("NeoQuasar/Kronos-base").max_context == 512
    mine = choose_checkpoint("runs/model", "runs/tokenizer", 300)
    assert (mine.model, mine.tokenizer, mine.max_context) == ("runs/model", "runs/tokenizer", 300)
    with pytest.raises(ModelError, match="unknown which tokenizer"):
        choose_checkpoint("runs/model")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_context": "64"}, "max_context is '64', not a whole number"),
        ({"max_context": 1}, "max_context is 1; a window has at least 2 rows"),
        ({"model": 3}, "the name of a model must be a path or a str, not a int"),
        ({"model": None}, "the name of a model must be a path or a str, not a NoneType"),
        ({"tokenizer": 3}, "the name of a tokenizer must be a path or a str, not a int"),
    ],
)
def test_what_no_predictor_can_be_loaded_from(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_predictor(**given)


def test_folders_that_are_easily_named_instead_of_a_model(tmp_path: Path) -> None:
    shutil.copytree(tiny_folder("model"), tmp_path / "run" / "best_model")
    with pytest.raises(ModelError, match="is the folder of a run, not of a model") as told:
        choose_checkpoint(tmp_path / "run")
    assert str(tmp_path / "run" / "best_model") in told.value.hint
    with pytest.raises(ModelError, match="is a tokenizer, not a model"):
        choose_checkpoint(tiny_folder("tokenizer"))
