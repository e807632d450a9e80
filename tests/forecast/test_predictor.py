"""The published calls and what was added to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import anytorch
from anytorch.errors import DeviceFallbackWarning, InputError, ModelError, OutOfMemory, UsageError
from anytorch.forecast import Forecast, KronosPredictor
from anytorch.forecast.decoding.sampling import Noise, Sampler
from anytorch.forecast.generation.generate import good_threads, quiet_threads


def test_device_and_its_warning(golden: Any, cpu_wheel: None) -> None:
    model, tokenizer = golden.model("a"), golden.tokenizer("a")
    plain = KronosPredictor(model, tokenizer, device="cpu")
    assert plain.device == torch.device("cpu") and plain.device_warning == ""
    with pytest.warns(DeviceFallbackWarning):
        fallen = KronosPredictor(model, tokenizer, device="cuda:0")
    assert fallen.device == torch.device("cpu") and "cannot be used" in fallen.device_warning
    assert anytorch.KronosPredictor is KronosPredictor


def test_train_mode_is_left(golden: Any) -> None:
    """The published predictor never leaves it, which makes even greedy forecasts noise."""
    from anytorch.forecast.model import Kronos

    model = Kronos.from_pretrained(golden.folder("a", "model")).train()
    assert not KronosPredictor(model, golden.tokenizer("a"), device="cpu").model.training


def test_samples_and_quantiles(minutes: Any, predictor: Any) -> None:
    made = predictor("a")
    history = minutes.iloc[:30]
    mean = made.predict(history, pred_len=6, sample_count=4, seed=1, verbose=False)
    assert isinstance(mean, pd.DataFrame)
    found = made.forecast(history, pred_len=6, sample_count=4, seed=1, quantiles=(0.0, 0.5, 1.0))
    assert isinstance(found, Forecast)
    pd.testing.assert_frame_equal(found.mean, mean)
    assert found.samples.shape == (4, 6, 6) and found.samples.dtype == np.float32
    np.testing.assert_allclose(found.samples.mean(0), mean.to_numpy(), rtol=1e-4)
    np.testing.assert_allclose(found.quantiles[0.0].to_numpy(), found.samples.min(0))
    np.testing.assert_allclose(found.quantiles[1.0].to_numpy(), found.samples.max(0))
    np.testing.assert_allclose(found.quantiles[0.5].to_numpy(), np.median(found.samples, axis=0), rtol=1e-6)
    assert (found.quantiles[0.5].index == mean.index).all()
    for name in ("quantiles", "return_samples"):
        with pytest.raises(UsageError, match=f"does not take {name}="):
            made.predict(history, pred_len=2, **{name: (0.5,)})
        with pytest.raises(UsageError, match=f"does not take {name}="):
            made.predict_batch([history], pred_len=2, **{name: (0.5,)})
    with pytest.raises(InputError, match="quantile 90 is not between 0 and 1"):
        made.forecast(history, pred_len=2, quantiles=(90,))


def test_seeds(minutes: Any, predictor: Any) -> None:
    made, history = predictor("a"), minutes.iloc[:30]

    def forecast(seed: int | None) -> Any:
        return made.predict(history, pred_len=8, sample_count=2, seed=seed, verbose=False)

    pd.testing.assert_frame_equal(forecast(3), forecast(3))
    assert not forecast(3).equals(forecast(4))
    torch.manual_seed(3)  # the published way gives the same paths, and a seed leaves torch's own generator alone
    state = torch.get_rng_state()
    forecast(5)
    assert torch.equal(state, torch.get_rng_state())
    pd.testing.assert_frame_equal(forecast(None), forecast(3))
    assert not forecast(None).equals(forecast(None))
    with pytest.raises(InputError, match="use a whole number"):
        forecast(-1)


def test_more_than_the_memory_holds(predictor: Any, minutes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = predictor("a", max_context=64)

    def short(*given: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 40960000000 bytes")

    monkeypatch.setattr(made, "_generate", short)
    frame = minutes.iloc[:40]
    with pytest.raises(OutOfMemory, match="cpu has too little memory for 9 paths of 2 steps"):
        made.predict(frame.drop(columns="timestamps"), frame["timestamps"], pred_len=2, sample_count=9, verbose=False)


def test_torchs_generator_is_moved_once_at_the_end() -> None:
    """Other threads must not see it jump back; afterwards it stands where the published loop leaves it."""
    torch.manual_seed(8)
    noise = Noise.seeded(None, 3, (20, 10))
    before = torch.get_rng_state()
    for rows in (torch.arange(2), torch.arange(2, 3)):  # two chunks see the same numbers
        draws = noise.steps(rows)
        for _ in range(4):
            next(draws)
    assert torch.equal(torch.get_rng_state(), before)
    noise.finish()
    after = torch.get_rng_state()
    torch.manual_seed(8)
    for _ in range(4):
        torch.empty(3, 20).exponential_()
        torch.empty(3, 10).exponential_()
    assert torch.equal(torch.get_rng_state(), after)


def test_one_draw_is_that_of_multinomial() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(0.7, 0, 0.8)
    torch.manual_seed(8)
    wanted = [torch.multinomial(sampler.probabilities(logits), 1)[:, 0] for _ in range(2)]
    noise = Noise.seeded(8, 6, (50, 50))
    first, second = next(noise.steps(torch.arange(6)))
    assert torch.equal(sampler.draw(logits, first), wanted[0])
    assert torch.equal(sampler.draw(logits, second), wanted[1])
    some = torch.tensor([4, 1])
    part, _ = next(noise.steps(some))
    assert torch.equal(part, first[some])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"T": 0}, "T is 0 and must be above 0"),
        ({"T": float("nan")}, "T is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"sample_count": 0}, "sample_count is 0"),
        ({"rolling": "slide"}, "rolling is 'slide'"),
        ({"pred_len": 0}, "pred_len is 0; use a whole number from 1 to"),
        ({"pred_len": 2.5}, "pred_len is 2.5, not a whole number"),
        ({"pred_len": "3"}, "pred_len is '3', not a whole number"),
        ({"T": "1"}, "T is '1', not a number"),
        ({"top_k": 2.0}, "top_k is 2.0, not a whole number"),
        ({"top_p": "0.9"}, "top_p is '0.9', not a number"),
        ({"sample_count": 2.0}, "sample_count is 2.0, not a whole number"),
        ({"sample_count": True}, "sample_count is True, not a whole number"),
        ({"seed": 1.5}, "seed is 1.5, not a whole number"),
        ({"seed": -1}, "seed is -1; use a whole number from 0 to"),
        ({"quantiles": 0.5}, "quantiles is 0.5, not a list of levels"),
        ({"quantiles": "0.1,0.9"}, "quantiles is '0.1,0.9', not a list"),
        ({"quantiles": ("half",)}, "a quantile is 'half', not a number"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], words: str, minutes: Any, predictor: Any) -> None:
    with pytest.raises(InputError, match=words):
        predictor("a").forecast(minutes.iloc[:20], **{"pred_len": 2, **options})


def test_top_k_may_be_none(minutes: Any, predictor: Any) -> None:
    """The published code raises TypeError."""
    assert len(predictor("a").predict(minutes.iloc[:20], pred_len=2, top_k=None, seed=0)) == 2


def test_volume_that_is_not_negative(minutes: Any, predictor: Any) -> None:
    made, history = predictor("a"), minutes.iloc[:40].copy()
    history[["volume", "amount"]] = 0.0
    history.loc[7, ["volume", "amount"]] = 1e6  # one burst: zero is a fraction of a standard deviation below the mean
    options: Any = {"pred_len": 30, "sample_count": 3, "seed": 0}
    free = made.forecast(history, **options)
    cut = made.forecast(history, non_negative_volume=True, **options)
    assert (free.samples[..., 4:] < 0).any(), "or this shows nothing"
    assert (cut.samples[..., 4:] >= 0).all() and (cut.mean[["volume", "amount"]] >= 0).all().all()
    np.testing.assert_allclose(cut.samples[..., :4], free.samples[..., :4])


def test_batches(minutes: Any, inputs: Any, predictor: Any) -> None:
    made = predictor("a")
    frames = [minutes.iloc[:30], inputs("daily_prices_only").iloc[:44], minutes.iloc[20:50]]
    together = made.predict_batch(frames, pred_len=5, top_k=1, verbose=False)
    for frame, found in zip(frames, together, strict=True):
        alone = made.predict(frame, pred_len=5, top_k=1, verbose=False)
        pd.testing.assert_frame_equal(found, alone, rtol=1e-4)
    assert made.predict_batch([], pred_len=5) == []
    with pytest.raises(InputError, match="df_list is a DataFrame, not a list"):
        made.predict_batch(frames[0], pred_len=5)
    with pytest.raises(InputError, match="x_timestamp_list has 1 entries for 3 series"):
        made.predict_batch(frames, [frames[0]["timestamps"]], pred_len=5)
    with pytest.raises(InputError, match="x_timestamp_list is a Series, not a list"):
        made.predict_batch(frames, frames[0]["timestamps"], pred_len=5)
    broken = frames[1].copy()
    broken.iloc[3, 1] = np.nan
    with pytest.raises(InputError, match=r"series 1, row 3 .*column 'open'"):
        made.predict_batch([frames[0], broken], pred_len=5)
    times = [pd.date_range("2030-01-01", periods=n) for n in (3, 4)]
    with pytest.raises(InputError, match="series 1 has 4 times to forecast, series 0 has 3"):
        made.predict_batch(frames[:2], None, times)


@pytest.mark.long
def test_rounded_and_quantized_models(minutes: Any, golden: Any) -> None:
    """They forecast, their ids are mostly the exact ones, and the model handed in stays as it was."""
    model, history = golden.model("b"), minutes.iloc[:40]
    exact = KronosPredictor(model, golden.tokenizer("b"), device="cpu").predict(history, pred_len=6, seed=1)
    for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        made = KronosPredictor(model, golden.tokenizer("b"), device="cpu", **options)
        found = made.predict(history, pred_len=6, seed=1)
        assert np.isfinite(found.to_numpy()).all()
        np.testing.assert_allclose(found["close"], exact["close"], rtol=0.05)
    assert model.norm.weight.dtype == torch.float32
    with pytest.raises(UsageError, match="dtype is 'int8'; use one of: float32, bfloat16"):
        KronosPredictor(model, golden.tokenizer("b"), device="cpu", dtype="int8")
    with pytest.raises(UsageError, match="int9"):
        KronosPredictor(model, golden.tokenizer("b"), device="cpu", quantization="int9")


def test_parts_that_do_not_belong_together(golden: Any) -> None:
    with pytest.raises(ModelError, match=r"the model uses 4\+4 bits, the tokenizer 6\+6"):
        KronosPredictor(golden.model("a"), golden.tokenizer("b"), device="cpu")
    with pytest.raises(UsageError, match="max_context is 1"):
        KronosPredictor(golden.model("a"), golden.tokenizer("a"), device="cpu", max_context=1)
    with pytest.raises(UsageError, match="clip is 0"):
        KronosPredictor(golden.model("a"), golden.tokenizer("a"), device="cpu", clip=0)
    for threads in ("two", np.array([1, 2]), True):
        with pytest.raises(UsageError, match=r"threads is .*, not a whole number"):
            KronosPredictor(golden.model("a"), golden.tokenizer("a"), device="cpu", threads=threads)
    assert KronosPredictor(golden.model("a"), golden.tokenizer("a"), device="cpu", threads=np.int64(2)).threads == 2


def test_threads_leave_busy_cores_alone() -> None:
    assert good_threads(None, 16, 0.2, 16) == 16
    assert good_threads(None, 16, 12.4, 16) == 4
    assert good_threads(None, 2, 9.0, 2) == 1
    assert good_threads(None, 2, None, 2) == 2
    assert good_threads(None, 16, 0.0, 4) == 4  # OMP_NUM_THREADS or torch.set_num_threads said so
    assert good_threads(3, 2, 9.0, 2) == 3  # measured here, or set by hand
    before = torch.get_num_threads()
    with quiet_threads(1):
        assert torch.get_num_threads() == 1
    with quiet_threads(None):
        assert torch.get_num_threads() == before
    with anytorch.use(threads=1), quiet_threads("auto"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(UsageError, match="threads is 0"), quiet_threads(0):
        pass


def test_a_bar_at_a_terminal(minutes: Any, predictor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    predictor("a").predict(minutes.iloc[:20], pred_len=3, seed=0, verbose=True)
    assert "forecasting" in shown.getvalue()
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    predictor("a").predict(minutes.iloc[:20], pred_len=3, seed=0, verbose=True)
    assert quiet.getvalue() == ""


def test_numbers_of_numpy(minutes: Any, predictor: Any) -> None:
    made, history = predictor("a"), minutes.iloc[:30]
    plain = made.predict(history, pred_len=3, sample_count=2, T=0.9, top_k=4, seed=5, verbose=False)
    found = made.forecast(
        history,
        pred_len=np.int64(3),
        sample_count=np.int32(2),
        T=np.float64(0.9),
        top_k=np.int64(4),
        seed=np.int64(5),
        quantiles=np.array([0.1, 0.9]),
        verbose=False,
    )
    pd.testing.assert_frame_equal(found.mean, plain)
    assert set(found.quantiles) == {0.1, 0.9}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_context": 64.0}, "max_context is 64.0, not a whole number"),
        ({"max_context": 1}, "max_context is 1; a window has at least 2 rows"),
        ({"clip": None}, "clip is None, not a number"),
        ({"clip": 0}, "clip is 0 and must be above 0"),
        ({"threads": 2.5}, "threads is 2.5, not a whole number"),
        ({"threads": 0}, "threads is 0; use at least one, or 'auto'"),
        ({"quantization": 8}, "quantization is 8, not a name"),
    ],
)
def test_a_predictor_that_cannot_be(options: dict[str, Any], words: str, predictor: Any) -> None:
    with pytest.raises(UsageError, match=words):
        predictor("a", **options)


def test_model_and_tokenizer_have_their_places(golden: Any) -> None:
    model, tokenizer = golden.model("a"), golden.tokenizer("a")
    with pytest.raises(ModelError, match="in the wrong order\nhint: KronosPredictor"):
        KronosPredictor(tokenizer, model)
    with pytest.raises(ModelError, match="the tokenizer is a Kronos, not a KronosTokenizer"):
        KronosPredictor(model, model)
    with pytest.raises(ModelError, match="the model is a str, not a Kronos\nhint: load it with"):
        KronosPredictor("kronos-small", tokenizer)


def test_a_used_predictor_travels(minutes: Any, predictor: Any) -> None:
    """To another process, or as a copy: what was made ready for the device stays behind."""
    import copy
    import pickle

    made, history = predictor("a"), minutes.iloc[:30]
    wanted = made.predict(history, pred_len=3, top_k=1, verbose=False)
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        pd.testing.assert_frame_equal(other.predict(history, pred_len=3, top_k=1, verbose=False), wanted)
    assert made.predict(history, pred_len=3, top_k=1, verbose=False).equals(wanted)


def test_published_attributes(predictor: Any) -> None:
    made = predictor("a")
    assert made.price_cols == ["open", "high", "low", "close"] and (made.vol_col, made.amt_vol) == ("volume", "amount")
    assert made.time_cols == ["minute", "hour", "weekday", "day", "month"]
