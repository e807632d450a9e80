"""Converters, vectors of texts and forecasts, with engines that are kept until their model changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comfy.prompts import CONV, PHOTO, node, photo, show

from anytorch import lite


def test_there_and_back(comfy: Any) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("AnytorchImageToTensor", image=["1", 0], layout="channels first"),
        "3": node("AnytorchTensorToLatent", tensor=["2", 0]),
        "4": node("AnytorchLatentToTensor", latent=["3", 0]),
        "5": node(
            "AnytorchTensorToImage",
            tensor=["4", 0],
            output_range="raw",
            layout="channels first",
            channels="as they are",
        ),
        "6": node("PreviewImage", images=["5", 0]),
        "7": node(
            "AnytorchTensorToImage",
            tensor=["4", 0],
            output_range="clamp",
            layout="channels first",
            channels="one picture per channel",
        ),
        "8": node("PreviewImage", images=["7", 0]),
        "9": node("AnytorchTensorToMask", tensor=["1", 0], channel=1, output_range="clamp"),
        "10": show(["9", 0]),
    }
    made = comfy.run(prompt)
    assert made.succeeded, made
    assert torch.equal(made.value("5"), photo()) and torch.equal(made.value("9"), photo()[..., 1])
    assert made.ui["8"]["images"] == ["3 of 30×41"]


def test_a_tensor_that_is_no_picture(comfy: Any) -> None:
    prompt = {
        "1": PHOTO,
        "2": node("CustomPyTorchConv2D", image=["1", 0], **{**CONV, "out_channels": 7}),
        "3": node(
            "AnytorchTensorToImage",
            tensor=["2", 0],
            output_range="clamp",
            layout="channels last",
            channels="as they are",
        ),
        "4": node("PreviewImage", images=["3", 0]),
    }
    assert "has 7 channels" in comfy.run(prompt).error["message"]


def test_normalize_of_one_colour() -> None:
    from anytorch.comfy.values import in_range

    flat = torch.full((2, 3, 3, 1), 4.0)
    flat[1, 0, 0, 0] = 0.0
    shown = in_range(flat, "normalize")
    assert shown[0].unique().tolist() == [1.0] and shown[1].unique().tolist() == [0.0, 1.0]


def test_vectors_of_texts(comfy: Any, prompt_of: Callable[[str], dict[str, Any]]) -> None:
    made = comfy.run(prompt_of("text_embedding"))
    assert made.succeeded, made
    vectors, similarity = made.value("1"), made.value("1", 1)
    assert vectors.shape == (3, 384) and similarity[0, 1] > similarity[0, 2] + 0.2
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    assert made.value("1", 2) == "3 texts, 384 dimensions, on cpu"


CANDLES = "timestamps,open,high,low,close,volume\n" + "".join(
    f"2026-01-{1 + i // 24:02} {i % 24:02}:00,{100 + i % 7},{101 + i % 7},{99 + i % 7},{100 + (i + 1) % 7},{10 + i % 5}\n"
    for i in range(100)
)


def test_forecast(comfy: Any, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "prices.csv").write_text(CANDLES)
    common = {"model": "tiny", "horizon": 3, "samples": 2, "draw_seed": 1, "temperature": 1.0, "top_p": 1.0}
    prompt = {"1": node("AnytorchForecast", **common, file="prices.csv"), "2": node("PreviewImage", images=["1", 0])}
    made = comfy.run(prompt)
    assert made.succeeded, made
    mean, paths, table = (made.value("1", i) for i in (1, 2, 3))
    assert mean.shape == (3, 6) and paths.shape == (2, 3, 6) and table.count("\n") == 4
    assert table.splitlines()[1].startswith("2026-01-05 04:00:00,") and float(mean[0, 3]) == pytest.approx(103, abs=15)
    typed = comfy.run(
        {"1": node("AnytorchForecast", **common, candles=CANDLES), "2": node("PreviewImage", images=["1", 0])}
    )
    assert torch.equal(typed.value("1", 1), mean)
    assert comfy.run(prompt).ran == ["1", "2"]  # the cache keeps the last prompt's values alone
    assert comfy.run(prompt).ran == []
    (tmp_path / "input" / "prices.csv").write_text(CANDLES[: CANDLES.rindex("2026")])  # one row less
    assert comfy.run(prompt).ran == ["1", "2"]


def test_a_model_folder_that_changes_is_loaded_again(comfy: Any, tmp_path: Path) -> None:
    import shutil

    from anytorch.forecast.model.pretrained import tiny_folder

    for kind in ("model", "tokenizer"):
        shutil.copytree(tiny_folder(kind), tmp_path / kind)
    prompt = {
        "1": node(
            "AnytorchForecast", model=str(tmp_path / "model"), tokenizer=str(tmp_path / "tokenizer"), candles=CANDLES,
            horizon=2, samples=1, draw_seed=1, temperature=1.0, top_p=1.0,
        )
    }  # fmt: skip
    first = comfy.run(prompt)
    assert first.succeeded, first
    assert comfy.run(prompt).ran == []
    weights = tmp_path / "model" / "model.safetensors"
    state = lite.load(weights)
    name = next(name for name in state if name.startswith("embedding"))
    lite.save({**state, name: state[name].numpy() * 0.5}, weights)
    again = comfy.run(prompt)
    assert again.ran == ["1"] and not torch.equal(first.value("1", 1), again.value("1", 1))
