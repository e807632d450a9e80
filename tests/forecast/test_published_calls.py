"""The published module's functions, against the published numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from anytorch_compat.kronos import (
    auto_regressive_inference,
    calc_time_stamps,
    sample_from_logits,
    top_k_top_p_filtering,
)

from anytorch.errors import InputError


@pytest.mark.parametrize("variant", range(8))
def test_the_filter_table(variant: int, golden: Any) -> None:
    info, case = golden.info("filter")["variants"][variant], golden.case("filter")
    logits = torch.from_numpy(case["logits"]) / info["T"]
    found = top_k_top_p_filtering(logits, top_k=info["top_k"], top_p=info["top_p"])
    assert found.data_ptr() == logits.data_ptr()  # in place, as published
    np.testing.assert_allclose(torch.softmax(found, -1).numpy(), case[info["key"]], atol=1e-6)
    # … and one draw is that of torch.multinomial from the same probabilities.
    torch.manual_seed(7)
    wanted = torch.multinomial(torch.from_numpy(case[info["key"]]), 1)
    torch.manual_seed(7)
    drawn = sample_from_logits(torch.from_numpy(case["logits"]), info["T"], info["top_k"], info["top_p"])
    assert torch.equal(drawn, wanted)


def test_what_else_the_filter_takes() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    assert torch.isfinite(top_k_top_p_filtering(logits.clone(), top_k=1, min_tokens_to_keep=3)).sum() == 3
    assert torch.isfinite(top_k_top_p_filtering(logits.clone(), top_p=0.01)).sum() == 1
    assert (
        torch.isfinite(top_k_top_p_filtering(logits.clone(), top_p=0.01, min_tokens_to_keep=2)).sum() == 3
    )  # as published
    assert top_k_top_p_filtering(logits.clone(), top_k=2, filter_value=-9.0).tolist() == [[5.0, 4.0, -9.0, -9.0, -9.0]]
    assert torch.equal(top_k_top_p_filtering(logits.clone()), logits)
    assert sample_from_logits(logits, sample_logits=False).tolist() == [[0]]


def test_inference_gives_the_published_window(golden: Any) -> None:
    """History as the tokenizer gives it back, then the forecast: the mean over samples of the decoder's output."""
    names = [*golden.names("predict"), *golden.names("predict_seeded")]
    assert any("roll" in name for name in names)
    for name in names:
        info, case = golden.info(name), golden.case(name)
        config, samples = name[0], info["sample_count"]
        x = torch.from_numpy(case["x_norm"][::samples].copy())
        stamps = (torch.from_numpy(case[key])[None].float() for key in ("x_stamp", "y_stamp"))
        torch.manual_seed(1234)
        found = auto_regressive_inference(
            golden.tokenizer(config),
            golden.model(config),
            x,
            *stamps,
            max_context=info["max_context"],
            pred_len=info["pred_len"],
            T=info["T"],
            top_k=info["top_k"],
            top_p=info["top_p"],
            sample_count=samples,
        )
        decoded = case["dec_out"]
        wanted = decoded.reshape(-1, samples, *decoded.shape[1:]).mean(axis=1)
        assert found.dtype == np.float32 and found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=name)


def test_generate_is_what_predict_stands_on(minutes: Any, predictor: Any) -> None:
    made, history, ahead = predictor("a"), minutes.iloc[:30], minutes["timestamps"].iloc[30:36]
    wanted = made.predict(history, None, ahead, 6, sample_count=3, seed=4, verbose=False)
    x = history[[*made.price_cols, made.vol_col, made.amt_vol]].to_numpy(np.float32)
    mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-5
    before, after = (calc_time_stamps(times)[made.time_cols].to_numpy() for times in (history["timestamps"], ahead))
    found = made.generate(((x - mean) / scale)[None], before[None], after[None], 6, 1.0, 0, 0.9, 3, False, seed=4)
    assert found.shape == (1, 6, 6)
    np.testing.assert_allclose(found[0] * scale + mean, wanted.to_numpy(), rtol=1e-6)


def test_arrays_of_another_shape(predictor: Any) -> None:
    made, x = predictor("a"), np.zeros((2, 30, 6))
    with pytest.raises(InputError, match=r"x has the shape \[30, 6\], not \[series, rows, 6\]"):
        made.generate(x[0], np.zeros((30, 5)), np.zeros((4, 5)), 4)
    with pytest.raises(InputError, match=r"y_stamp has the shape \[2, 3, 5\], not \[2, 4, 5\]"):
        made.generate(x, np.zeros((2, 30, 5)), np.zeros((2, 3, 5)), 4)


def test_stamps_of_every_kind_of_timestamp() -> None:
    times = pd.Series(pd.to_datetime(["2024-02-29 23:59", "2024-03-01 00:05"]), index=[7, 8])
    found = calc_time_stamps(times)
    assert list(found.columns) == ["minute", "hour", "weekday", "day", "month"] and list(found.index) == [7, 8]
    assert found.to_numpy().tolist() == [[59, 23, 3, 29, 2], [5, 0, 4, 1, 3]]
    for other in (pd.DatetimeIndex(times), times.astype(str), times.to_numpy(), times.astype("int64").tolist()):
        assert calc_time_stamps(other).to_numpy().tolist() == found.to_numpy().tolist()
