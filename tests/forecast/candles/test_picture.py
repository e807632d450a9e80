"""The picture shows what it was given: every bar, a band per pair of quantiles, volume where there is some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from anytorch.errors import UsageError
from anytorch.forecast.candles import picture
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.candles.picture import draw_forecast


@pytest.fixture
def parts() -> tuple[pd.DataFrame, pd.DataFrame, dict[float, pd.DataFrame], pd.DataFrame]:
    frame = sample_candles(120, seed=1)
    actual = frame.iloc[100:]
    mean = actual.set_index("timestamps") * 1.001
    quantiles = {level: mean * (0.99 + 0.02 * level) for level in (0.1, 0.25, 0.5, 0.75, 0.9)}
    return frame.iloc[:100], mean, quantiles, actual


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_files(parts: Any, suffix: str, tmp_path: Path) -> None:
    history, mean, quantiles, actual = parts
    path = draw_forecast(
        history, mean, tmp_path / f"out.{suffix}", quantiles=quantiles, actual=actual, title="A title & more"
    )
    body = path.read_bytes()
    assert body[:4] == b"\x89PNG" if suffix == "png" else b"<svg" in body
    with pytest.raises(UsageError, match=r"must end in .png or .svg"):
        draw_forecast(history, mean, tmp_path / "out.gif")


def test_what_is_drawn(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, mean, quantiles, actual = parts
    made: list[Any] = []
    build = picture.figure_for
    monkeypatch.setattr(picture, "figure_for", lambda *given: made.append(build(*given)) or made[-1])
    draw_forecast(history, mean, tmp_path / "a.png", quantiles=quantiles, actual=actual)
    prices, volumes = made[-1].axes
    labels = [text.get_text() for text in prices.get_legend().get_texts()]
    assert "10% to 90% of the paths" in labels and "25% to 75% of the paths" in labels and "50% quantile" in labels
    assert "actual" in labels
    assert len(prices.patches) == 100 + 20  # bodies of history and forecast
    assert len(volumes.patches) == 100 + 20
    low, high = prices.get_ylim()
    assert low < mean["close"].min() and high > mean["close"].max()
    draw_forecast(history.drop(columns=["volume", "amount"]), mean, tmp_path / "b.png")
    assert [text.get_text() for text in made[-1].axes[1].texts] == ["no volume"]
