"""The engines as nodes: texts to vectors, and candles to a forecast with its picture."""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytorch.comfy.comfyui import Progress, file_refusal, fingerprint, folder, inside
from anytorch.comfy.places import NUMPY, place_for, said_plainly, without_inference_mode
from anytorch.comfy.values import DEVICE, IMAGE, TENSOR, DeviceChoice, Node, inputs, resting, text_shown, whole, widget
from anytorch.counts import counted
from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.candles.picture import draw_forecast
from anytorch.forecast.candles.read import read_candles
from anytorch.forecast.candles.rhythm import future_times
from anytorch.forecast.checkpoints import choose_checkpoint, load_predictor
from anytorch.text.embed import ArrowEngine

PLAIN = "none"
QUANTIZATIONS = [PLAIN, "int8", "int4", "int2", "fp4"]
PROMPTS = [PLAIN, "query", "passage"]
SAMPLE_ROWS = 600
QUANTILES = (0.1, 0.5, 0.9)
MOST = (
    2  # engines of all kinds that stay loaded (loading takes longer than using); the one unused for longest goes first
)

_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = threading.Lock()


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """The value `make` returned for the first call with `key`. Not thread-safe: ComfyUI runs one node at a time."""
    with _lock:
        if key not in _kept:
            while len(_kept) >= MOST:
                close(_kept.popitem(last=False)[1])
            _kept[key] = make()
        _kept.move_to_end(key)
        return _kept[key]


def forget() -> int:
    """Close all of them, and say how many there were."""
    with _lock:
        count = len(_kept)
        while _kept:
            close(_kept.popitem()[1])
        return count


def close(engine: Any) -> None:
    if hasattr(engine, "close"):
        engine.close()


def device_name(device: DeviceChoice | None) -> str:
    """The device's name for an engine. The CPU's engines are our own C++: "numpy" means no torch kernel, as they do."""
    return "cpu" if device is not None and device.request == NUMPY else place_for(device).name


def input_file(name: str) -> Path:
    return inside(folder("input"), name, "file")


def folder_state(model: str | None) -> str:
    """Text that changes when the model's folder does; "" for one that goes by a name."""
    path = Path(model).expanduser() if model else None
    return fingerprint(path) if path is not None and path.is_dir() else ""


class AnytorchTextEmbedding(Node, title="Text Embedding", group="engines"):
    DESCRIPTION = "A vector for each line of text: texts of similar meaning have similar vectors."
    RETURN_TYPES, RETURN_NAMES = (TENSOR, TENSOR, "STRING"), ("vectors", "similarity", "text")
    required = inputs(
        text=widget("STRING", "", multiline=True),
        model=widget("STRING", "", "A model folder or a name on the Hugging Face Hub; empty: all-MiniLM-L6-v2."),
        split_lines=widget("BOOLEAN", True, "Off: the whole input is one text."),
    )
    optional = inputs(
        quantization=widget(QUANTIZATIONS, PLAIN),
        prompt=widget(PROMPTS, PLAIN, "For models that tell queries from passages."),
        device=(DEVICE, {}),
    )

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


class AnytorchForecast(Node, title="Forecast", group="engines"):
    DESCRIPTION = (
        "Forecast candles (open, high, low, close, volume) with a Kronos model: a picture, the mean, every path."
    )
    OUTPUT_NODE = True
    RETURN_TYPES = (IMAGE, TENSOR, TENSOR, "STRING")
    RETURN_NAMES = ("picture", "mean", "paths", "table")
    required = inputs(
        model=widget("STRING", "tiny", "tiny, kronos-mini, -small, -base, or a folder."),
        horizon=whole(24, 1, 4096, "Bars to forecast."),
        samples=whole(20, 1, 1024, "Paths to draw."),
        draw_seed=whole(0, 0, 2**32 - 1),
        temperature=widget("FLOAT", 1.0, min=0.01, max=10.0, step=0.01),
        top_p=widget("FLOAT", 1.0, min=0.01, max=1.0, step=0.01),
    )
    optional = inputs(
        candles=widget("STRING", "", "CSV with a header. Empty: the file, or synthetic candles.", multiline=True),
        file=widget("STRING", "", "A CSV or Parquet file in ComfyUI's input folder."),
        symbol=widget("STRING", "", "The instrument to forecast, if the table has several."),
        tokenizer=widget("STRING", "", "For a folder: the tokenizer it was trained with."),
        device=(DEVICE, {}),
    )

    @classmethod
    def VALIDATE_INPUTS(cls, file: str | None = None) -> bool | str:
        return not file or file_refusal(input_file, file, folder("input")) or True

    @classmethod
    def IS_CHANGED(
        cls, file: str | None = None, model: str | None = None, tokenizer: str | None = None, **_: Any
    ) -> str:
        about = fingerprint(input_file(file)) if file else ""
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
        found = predictor.forecast(
            seen, y_timestamp=future_times(history["timestamps"], horizon), pred_len=horizon, T=temperature, top_p=top_p,
            sample_count=samples, seed=draw_seed, verbose=False, quantiles=QUANTILES,
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
    source: Any = candles.encode() if candles.strip() else input_file(file)
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
