"""Nothing of the future reaches what a model is given, and no window lies in two splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.inputs import stamps as stamps_of
from anytorch.forecast.training.windows import SPLITS, as_series, as_values, split_windows


def test_every_window_lies_in_one_split_and_splits_follow_each_other(market: dict[str, Any]) -> None:
    splits = split_windows(as_series(market), lookback=12, horizon=4, validation=0.2, test=0.2)
    length = splits["train"].length
    times = np.concatenate([frame["timestamps"].to_numpy() for frame in market.values()])
    spans = {
        name: (times[windows.starts].min(), times[windows.starts + length - 1].max())
        for name, windows in splits.items()
    }
    assert spans["train"][1] < spans["validation"][0] < spans["validation"][1] < spans["test"][0]
    rows = {n: {r for s in w.starts for r in range(s, s + length)} for n, w in splits.items()}
    assert not rows["train"] & rows["validation"] and not rows["validation"] & rows["test"]
    for windows in splits.values():  # and none goes from one instrument into the next
        assert ((windows.starts < 400) == (windows.starts + length - 1 < 400)).all()
    assert all(len(splits[name]) for name in SPLITS)


def test_instruments_that_start_later_are_cut_at_the_same_moment() -> None:
    early, late = sample_candles(600, freq="1D"), sample_candles(300, freq="1D", start="2025-02-24")
    splits = split_windows(as_series({"a": early, "b": late}), lookback=12, horizon=4, validation=0.2, test=0.2)
    for _name, windows in splits.items():
        first = windows.starts[windows.starts < 600]
        second = windows.starts[windows.starts >= 600] - 600
        if len(second):
            low, high = (pd.Timestamp(text) for text in windows.period)
            assert late["timestamps"][second.min()] >= low and early["timestamps"][first.min()] >= low
            assert late["timestamps"][second.max() + windows.length - 1] <= high


def test_what_comes_after_does_not_change_what_the_model_is_given(market: dict[str, Any]) -> None:
    windows = split_windows(as_series(market), lookback=12, horizon=4)["train"]
    rng = np.random.default_rng(0)
    before, stamps = windows.batch([3])
    changed = windows.values.copy()
    start = windows.starts[3]
    changed[start + 12 :] = rng.permutation(changed[start + 12 :]) * 7.0  # all that comes after, shuffled and scaled
    shuffled = replace(windows, values=changed)
    after, _ = shuffled.batch([3])
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert not np.array_equal(before[:, 12:], after[:, 12:])
    past = before[0, :12].astype(np.float64)
    np.testing.assert_allclose(past.mean(axis=0), 0.0, atol=1e-5)
    assert np.abs(before).max() <= 5.0 and stamps.shape == (1, 17, 5)


def test_the_models_tokens_do_not_change_either(market: dict[str, Any], tokenizer_config: dict[str, Any]) -> None:
    import torch

    from anytorch.forecast.model import KronosTokenizer

    torch.manual_seed(0)
    tokenizer = KronosTokenizer(**tokenizer_config).eval()
    values = torch.from_numpy(split_windows(as_series(market), lookback=12, horizon=4)["train"].batch([0, 5])[0])
    other = values.clone()
    other[:, 12:] = values[:, 12:].flip(1) * 3
    s1, s2 = tokenizer.encode(values, half=True)
    t1, t2 = tokenizer.encode(other, half=True)
    assert torch.equal(s1[:, :12], t1[:, :12]) and torch.equal(s2[:, :12], t2[:, :12])


def test_columns_that_are_missing() -> None:
    frame = sample_candles(20)
    assert (as_values(frame.drop(columns=["volume", "amount"]))[:, 4:] == 0).all()
    assert (as_values(frame.drop(columns=["volume"]))[:, 4:] == 0).all()
    made = as_values(frame.drop(columns=["amount"]))
    mean = frame[["open", "high", "low", "close"]].mean(axis=1)
    np.testing.assert_allclose(made[:, 5], frame["volume"] * mean, rtol=1e-6)


def test_stamps() -> None:
    stamps = stamps_of(pd.to_datetime(["2024-02-29 09:35", "2024-03-03 00:00"]))
    assert stamps.tolist() == [[35, 9, 3, 29, 2], [0, 0, 6, 3, 3]]


def test_thinned(market: dict[str, Any]) -> None:
    windows = split_windows(as_series(market), lookback=12, horizon=4)["train"]
    few = windows.thinned(10)
    assert len(few) == 10 and few.starts[0] == windows.starts[0] and few.starts[-1] == windows.starts[-1]
    assert windows.thinned(10**6) is windows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"lookback": 500},
            "the train period .* holds no window of 505 rows; the longest of 2 series, SYM000, has 400",
        ),
        ({"lookback": 90}, "the validation period .* holds no window"),
        ({"validation": 0.6, "test": 0.5}, "together below 1"),
        ({"horizon": 0}, "use at least"),
    ],
)
def test_what_cannot_be_cut(market: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        split_windows(as_series(market), **{"lookback": 12, "horizon": 4, "validation": 0.1, "test": 0.1, **options})


def test_no_data() -> None:
    with pytest.raises(InputError, match="no data"):
        split_windows([], lookback=12, horizon=4)


def test_times_with_and_without_a_zone_are_not_mixed(market: dict[str, Any]) -> None:
    first, second = market.values()
    zoned = second.assign(timestamps=second["timestamps"].dt.tz_localize("Asia/Shanghai"))
    with pytest.raises(InputError, match="zoned has timestamps with a time zone, plain without one"):
        split_windows(as_series({"plain": first, "zoned": zoned}), lookback=12, horizon=4)


def test_tables_by_name_are_refused_by_that_name() -> None:
    good, bad = sample_candles(60), sample_candles(60)
    bad.loc[30, "timestamps"] = pd.NaT
    with pytest.raises(InputError, match=r"^B, row 30, column 'timestamps': the timestamp is missing") as caught:
        as_series({"A": good, "B": bad})
    bad = sample_candles(60)
    bad.loc[30, "close"] = np.nan
    with pytest.raises(InputError, match=r"^B, row 30, column 'close': nan is not a number") as caught:
        as_series({"A": good, "B": bad})
    assert "repair=True" in caught.value.hint and "--repair" not in caught.value.hint
    assert [one.name for one in as_series({"A": good, "B": bad}, repair=True)] == ["A", "B"]
