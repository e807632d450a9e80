"""Forecasts on the device draw the CPU's ids, step by step, in every way that a step can be computed; and fine-tuning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytorch.forecast import KronosPredictor
from anytorch.forecast.decoding.sampling import Sampler
from anytorch.forecast.inputs import Series
from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer

pytestmark = pytest.mark.device

HORIZON = 6
BITS = {"s1_bits": 6, "s2_bits": 6}
SAMPLERS = {"greedy": Sampler(1.0, 1, 1.0), "top p": Sampler(1.0, 0, 0.9), "top k": Sampler(0.8, 5, 0.9)}


def series(length: int, seed: int, horizon: int = HORIZON) -> Series:
    """A made-up series that needs no table: normalised values and the parts of its times."""
    walk = np.random.default_rng(seed).standard_normal((length, 6)).cumsum(0)
    normal = ((walk - walk.mean(0)) / walk.std(0)).astype(np.float32)
    minutes = 570 + 5 * np.arange(length + horizon)
    stamp = np.stack((minutes % 60, minutes // 60 % 24, minutes // 1440, 4 + minutes // 1440, minutes * 0 + 3), axis=1)
    one = np.ones(6, np.float32)
    return Series("made up", normal, 0 * one, one, stamp[:length], stamp[length:], None)


def pair() -> tuple[Kronos, KronosTokenizer]:
    """Kronos-mini's shape in two layers with random weights; less of it where Triton's interpreter has to compute it."""
    torch.manual_seed(0)
    shape = dict(PUBLISHED["kronos-mini"].config, n_layers=2)
    config = dict(PUBLISHED["kronos-mini"].tokenizer_config)
    if os.environ.get("ANYTORCH_TEST_DEVICE") == "cpu":
        shape |= {**BITS, "d_model": 64, "ff_dim": 96}
        config |= {**BITS, "group_size": 4, "d_model": 32, "n_heads": 2, "ff_dim": 48}
    model = Kronos(**shape).eval()
    tokenizer = KronosTokenizer(**config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for head in (model.head.proj_s1, model.head.proj_s2):
            head.weight.mul_(3)  # no two ids are as likely as each other: rounding does not change a draw
    return model, tokenizer


@pytest.fixture(scope="module")
def predictors(accelerator: torch.device) -> tuple[KronosPredictor, KronosPredictor]:
    """The device's and the CPU's, with the same weights and a window of 40."""
    return KronosPredictor(*pair(), accelerator, 40), KronosPredictor(*pair(), "cpu", 40)


def ids(paths: Any) -> list[Any]:
    return [[path.s1.tolist(), path.s2.tolist()] for path in paths]


def forecast(predictor: KronosPredictor, sampler: Sampler, rolling: str, lengths: list[int], samples: int) -> Any:
    given = [series(length, number) for number, length in enumerate(lengths)]
    return predictor.paths(given, sampler, samples, rolling=rolling, seed=3)


@pytest.mark.parametrize("way", ["", "plain", "recorded"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("rolling", "lengths"), [("exact", [20, 13]), ("exact", [37]), ("evict", [40, 33])])
def test_a_forecast_draws_the_ids_of_the_cpu(
    predictors: tuple[KronosPredictor, KronosPredictor], way: Any, sampler: str, rolling: str, lengths: list[int]
) -> None:
    """Steps of growing shapes, of fixed ones, and recorded ones; short of the window, rolling past it, and evicting."""
    there, host = predictors
    if way == "recorded" and there.static != "recorded" and there.device.type == "cpu":
        pytest.skip("a CPU records no graphs")
    before, kernels = there.static, there.kernels
    there.static, there.kernels = way, False
    try:
        wanted = forecast(host, SAMPLERS[sampler], rolling, lengths, 2)
        for _ in range(3):  # the second time with the memory of the first; a recording is replayed from then on
            found = forecast(there, SAMPLERS[sampler], rolling, lengths, 2)
            assert ids(found) == ids(wanted)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one.normal, other.normal, atol=1e-3)
    finally:
        there.static, there.kernels = before, kernels


# Of the interpreter: small, so that every loop turns more than once. A device has those that are built in for its rows.
SMALL_TILES: dict[int, dict[str, Any]] = {
    1: {"dot": False, "block_n": 32, "block_k": 32, "block": 8, "splits": 3, "group": 2},
    6: {"dot": True, "block_n": 32, "block_k": 64, "block": 16, "splits": 2, "group": 2, "narrow": (32, 2, 4)},
    20: {"dot": True, "block_n": 32, "block_k": 32, "block": 16, "splits": 2, "group": 0, "parts": 2},
}


@pytest.mark.parametrize(
    ("sampler", "rolling", "lengths", "samples"),
    [("greedy", "exact", [20], 1), ("top k", "exact", [20, 13], 3), ("top p", "evict", [40, 30], 10)],
    ids=["one row", "few rows", "matrix units"],
)
def test_our_kernels_draw_the_ids_of_the_cpu(
    triton: torch.device, sampler: str, rolling: str, lengths: list[int], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention over prompts and own rows, the context's scores and mix, both choices of an id: each kernel of a step."""
    import anytorch
    from anytorch.forecast.generation import generate
    from anytorch.forecast.kernels import row_step

    monkeypatch.setattr(generate, "FEWEST_STEPS", 2)
    if triton.type == "cpu":
        monkeypatch.setattr(row_step.Tiles, "of", classmethod(lambda cls, rows: cls(**SMALL_TILES[rows])))
    wanted = ids(forecast(KronosPredictor(*pair(), "cpu", 40), SAMPLERS[sampler], rolling, lengths, samples))
    predictor = KronosPredictor(*pair(), triton, 40)
    decoder = predictor.decoder()
    if triton.type == "cpu":  # what a device that compiles Triton has from the start
        decoder.tables = decoder._fusion_tables()
        predictor.static = "plain"
    predictor.kernels = True
    with anytorch.use(measure_kernels=False):
        for _ in range(
            3 if triton.type == "cpu" else 4
        ):  # the second of a shape compiles the kernels, the next uses them
            found = ids(forecast(predictor, SAMPLERS[sampler], rolling, lengths, samples))
            for steps in (decoder.kept, decoder.kept_rolled):
                if steps is not None and steps.chooser is not None:
                    steps.chooser.compiling.wait()
    assert decoder.kept.kernel_step is not None and not decoder.kept.no_kernels, decoder.kept.no_kernels
    assert found == wanted


def test_windows_that_are_full_go_through_our_kernel(triton: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured as users have it: whichever way is fastest here, the ids are the CPU's, and no candidate was wrong."""
    from anytorch.forecast.generation import generate
    from anytorch.forecast.kernels import products

    if triton.type == "cpu":
        pytest.skip(
            "the interpreter's times would choose; tests/forecast/kernels runs this with a stopwatch of its own"
        )
    monkeypatch.setattr(generate, "FEWEST_STEPS", 2)
    monkeypatch.setattr(products, "FEWEST_LAUNCHES", 1)
    # Three growing steps and more full windows than three: a recording runs its step three times before it counts.
    given = [series(37, 0, HORIZON + 4)]

    def drawn(by: KronosPredictor) -> Any:
        return ids(by.paths(given, SAMPLERS["top p"], 2, rolling="exact", seed=3))

    wanted = drawn(KronosPredictor(*pair(), "cpu", 40))
    predictor = KronosPredictor(*pair(), triton, 40)
    for _ in range(4):
        assert drawn(predictor) == wanted
        for steps in (predictor.decoder().kept, predictor.decoder().kept_rolled):
            if steps is not None and steps.chooser is not None:
                steps.chooser.compiling.wait()
    for steps in (predictor.decoder().kept, predictor.decoder().kept_rolled):
        assert steps is not None and steps.choices
        tried = [one for part in steps.choices.values() for one in part.trials]
        assert not [one for one in tried if one.wrong], "a candidate computes something else"


def test_fine_tuning(accelerator: torch.device, tmp_path: Path) -> None:
    """Eight steps from the same weights over the same windows end with the CPU's losses."""
    pytest.importorskip("pandas")
    from tests.forecast.training.conftest import MODEL, SHAPE, TOKENIZER

    from anytorch.forecast.candles.generate import sample_market
    from anytorch.forecast.training import finetune_predictor, finetune_tokenizer

    market = sample_market(2, 400, seed=4)
    found = {}
    for device in ("cpu", str(accelerator)):
        folder = tmp_path / device.replace(":", "-")
        options = {**SHAPE, "device": device}
        first = finetune_tokenizer(market, output=folder / "tok", tokenizer=dict(TOKENIZER), **options)
        second = finetune_predictor(
            market, output=folder / "model", model=dict(MODEL), tokenizer=first.folder, **options
        )
        found[device] = [first.first_loss, first.best_loss, second.first_loss, second.best_loss]
    assert found[str(accelerator)] == pytest.approx(found["cpu"], rel=2e-2)
