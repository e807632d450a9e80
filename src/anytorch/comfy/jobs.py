"""The engines as nodes: texts to vectors, and candles to a forecast with its picture."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytorch.comfy.comfyui import Progress, fingerprint, folder, inside
from anytorch.comfy.kept import kept
from anytorch.comfy.places import NUMPY, place_for, said_plainly, without_inference_mode
from anytorch.comfy.values import CATEGORY, DEVICE, IMAGE, TENSOR, DeviceChoice, resting, text_shown
from anytorch.counts import counted
from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.candles.picture import draw_forecast
from anytorch.forecast.candles.read import read_candles
from anytorch.forecast.candles.rhythm import future_times
from anytorch.forecast.checkpoints import choose_checkpoint, load_predictor
from anytorch.text.embed import ArrowEngine

SUBCATEGORY = f"{CATEGORY}/engines"
PLAIN = "none"
QUANTIZATIONS = [PLAIN, "int8", "int4", "int2", "fp4"]
PROMPTS = [PLAIN, "query", "passage"]
SAMPLE_ROWS = 600
QUANTILES = (0.1, 0.5, 0.9)


def device_name(device: DeviceChoice | None) -> str:
    """For engines, which choose themselves. The CPU's engines are our own C++: "numpy" means no torch kernel, as they do."""
    return "cpu" if device is not None and device.request == NUMPY else place_for(device).name


def folder_state(model: str | None) -> str:
    """Text that changes when the model's folder does; "" for one that goes by a name."""
    path = Path(model).expanduser() if model else None
    return fingerprint(path) if path is not None and path.is_dir() else ""


class AnytorchTextEmbedding:
    DESCRIPTION = "A vector for each line of text: texts of similar meaning have similar vectors."
    CATEGORY, FUNCTION = SUBCATEGORY, "run"
    RETURN_TYPES, RETURN_NAMES = (TENSOR, TENSOR, "STRING"), ("vectors", "similarity", "text")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        model = {"default": "", "tooltip": "A model folder or a name on the Hugging Face Hub; empty: all-MiniLM-L6-v2."}
        return {
            "required": {
                "text": ("STRING", {"default": "", "multiline": True}),
                "model": ("STRING", model),
                "split_lines": (
                    "BOOLEAN",
                    {"default": True, "tooltip": "Off: the whole input is one text."},
                ),
            },
            "optional": {
                "quantization": (QUANTIZATIONS, {"default": PLAIN}),
                "prompt": (
                    PROMPTS,
                    {"default": PLAIN, "tooltip": "For models that tell queries from passages."},
                ),
                "device": (DEVICE, {}),
            },
        }

    @classmethod
    def IS_CHANGED(cls, model: str | None = None, **_: Any) -> str:
        return folder_state(model)

    @said_plainly
    @without_inference_mode
    def run(
        self,
        text: str,
        model: str,
        split_lines: bool,
        quantization: str = PLAIN,
        prompt: str = PLAIN,
        device: DeviceChoice | None = None,
    ) -> tuple[Tensor, Tensor, str]:
        texts = [line for line in text.splitlines() if line.strip()] if split_lines else [text]
        if not any(line.strip() for line in texts):
            raise InputError("there is no text to embed")
        where = device_name(device)
        packed = None if quantization == PLAIN else quantization
        key = ("embed", model, folder_state(model), where, quantization)
        engine = kept(key, lambda: ArrowEngine(model.strip() or None, where, packed))
        bar = Progress(len(texts))
        found = engine.encode(texts, prompt=None if prompt == PLAIN else prompt, progress=bar.at)
        vectors = torch.from_numpy(found)
        told = f"{counted(len(texts), 'text')}, {found.shape[1]} dimensions, on {engine.device}"
        return resting(vectors), resting(torch.from_numpy(engine.similarity(found))), told


class AnytorchForecast:
    DESCRIPTION = (
        "Forecast candles (open, high, low, close, volume) with a Kronos model: a picture, the mean, every path."
    )
    CATEGORY, FUNCTION, OUTPUT_NODE = SUBCATEGORY, "run", True
    RETURN_TYPES = (IMAGE, TENSOR, TENSOR, "STRING")
    RETURN_NAMES = ("picture", "mean", "paths", "table")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        table = {
            "default": "",
            "multiline": True,
            "tooltip": "CSV with a header. Empty: the file, or synthetic candles.",
        }
        return {
            "required": {
                "model": ("STRING", {"default": "tiny", "tooltip": "tiny, kronos-mini, -small, -base, or a folder."}),
                "horizon": ("INT", {"default": 24, "min": 1, "max": 4096, "tooltip": "Bars to forecast."}),
                "samples": ("INT", {"default": 20, "min": 1, "max": 1024, "tooltip": "Paths to draw."}),
                "draw_seed": ("INT", {"default": 0, "min": 0, "max": 2**32 - 1}),
                "temperature": ("FLOAT", {"default": 1.0, "min": 0.01, "max": 10.0, "step": 0.01}),
                "top_p": ("FLOAT", {"default": 1.0, "min": 0.01, "max": 1.0, "step": 0.01}),
            },
            "optional": {
                "candles": ("STRING", table),
                "file": ("STRING", {"default": "", "tooltip": "A CSV or Parquet file in ComfyUI's input folder."}),
                "symbol": (
                    "STRING",
                    {"default": "", "tooltip": "The instrument to forecast, if the table has several."},
                ),
                "tokenizer": ("STRING", {"default": "", "tooltip": "For a folder: the tokenizer it was trained with."}),
                "device": (DEVICE, {}),
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, file: str | None = None) -> bool | str:
        if not file:
            return True
        try:
            there = inside(folder("input"), file, "file").is_file()
        except InputError as exc:
            return exc.message
        return there or f"{file} does not exist; put it into {folder('input')}"

    @classmethod
    def IS_CHANGED(
        cls, file: str | None = None, model: str | None = None, tokenizer: str | None = None, **_: Any
    ) -> str:
        about = fingerprint(inside(folder("input"), file, "file")) if file else ""
        return f"{about} {folder_state(model)} {folder_state(tokenizer)}"

    @said_plainly
    @without_inference_mode
    def run(
        self,
        model: str,
        horizon: int,
        samples: int,
        draw_seed: int,
        temperature: float,
        top_p: float,
        candles: str = "",
        file: str = "",
        symbol: str = "",
        tokenizer: str = "",
        device: DeviceChoice | None = None,
    ) -> dict[str, Any]:
        bar = Progress(4)
        name, history = history_of(candles, file, symbol)
        bar.at(1)
        where = device_name(device)
        choose_checkpoint(model, tokenizer or None)  # a name that cannot be used is refused before anything is loaded
        key = ("forecast", model, folder_state(model), tokenizer, folder_state(tokenizer), where)
        predictor = kept(key, lambda: load_predictor(model, tokenizer or None, device=where))
        bar.at(2)
        seen = history.iloc[-predictor.max_context :]
        found = predictor.predict(
            seen, y_timestamp=future_times(history["timestamps"], horizon), pred_len=horizon, T=temperature, top_p=top_p,
            sample_count=samples, seed=draw_seed, verbose=False, return_samples=True, quantiles=QUANTILES,
            non_negative_volume=True,
            rescale=True,
        )  # fmt: skip
        bar.at(3)
        picture = drawn(
            history, found, f"{name}: {counted(horizon, 'bar')} ahead, {counted(samples, 'path')} ({Path(model).name})"
        )
        bar.at(4)
        table = found.mean.to_csv(index_label="timestamps", lineterminator="\n", float_format="%.9g")
        mean = torch.from_numpy(found.mean.to_numpy("float32", copy=True))  # (steps, 6)
        return text_shown(table, picture, resting(mean), resting(torch.from_numpy(found.samples)), table)


def history_of(candles: str, file: str, symbol: str) -> tuple[str, Any]:
    """The instrument's name and its candles: from the text, the file, or generated where there is neither."""
    if candles.strip() and file.strip():
        raise InputError("both candles and file are given", hint="leave one of them empty")
    if not candles.strip() and not file.strip():
        return "generated candles", sample_candles(SAMPLE_ROWS)
    source: Any = candles.encode() if candles.strip() else inside(folder("input"), file, "file")
    series = read_candles(source)
    names = [one.name for one in series]
    if symbol and symbol not in names:
        raise InputError(f"unknown instrument {symbol!r}; known: {', '.join(names)}")
    if not symbol and len(series) > 1:
        raise InputError(f"the data has {len(series)} instruments: {', '.join(names[:8])}", hint="name one as symbol")
    one = next(found for found in series if not symbol or found.name == symbol)
    return one.name, one.frame


def drawn(history: Any, forecast: Any, title: str) -> Tensor:
    """The forecast's picture as an IMAGE."""
    import numpy as np
    from PIL import Image  # matplotlib and ComfyUI both need it, so it is there

    with tempfile.TemporaryDirectory() as made:
        path = draw_forecast(
            history, forecast.mean, Path(made) / "forecast.png", quantiles=forecast.quantiles, title=title
        )
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0
    return resting(torch.from_numpy(pixels)[None])
