"""Which encoder an engine gets: on which device, and what happens when memory runs out. No compiler needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anytorch
from anytorch.errors import DeviceFallbackWarning, OutOfMemory, UsageError
from anytorch.text.embed import encoder_builder, encoder_device
from anytorch.text.embed.encoder_device import EncoderDevice, choose_device
from anytorch.text.embed.engine import ArrowEngine

TEXTS = [f"sentence {n} " + "and more words " * (n % 11) for n in range(300)]


def test_out_of_memory_halves_the_batch(fake_engine: Callable[..., Any], make_encoder: Any) -> None:
    whole = fake_engine().encode(TEXTS)
    engine = fake_engine(make_encoder(most_tokens=100))
    assert np.array_equal(engine.encode(TEXTS), whole)
    assert engine.batch_tokens <= 100 and "note: memory ran out" in engine.explain()


def test_quantizing_only_if_allowed(fake_engine: Callable[..., Any], make_encoder: Any) -> None:
    long = ["word " * 200]
    with pytest.raises(OutOfMemory, match="a single text of 202 tokens"):
        fake_engine(make_encoder(most_tokens=100)).encode(long)
    engine = fake_engine(make_encoder(most_tokens=100), make_encoder(quantization="int8"), allow_quantize=True)
    with pytest.warns(DeviceFallbackWarning, match="memory ran out on cpu: using quantization='int8'"):
        assert engine.encode(long).shape == (1, 16)
    assert engine.quantization == "int8" and "quantization: int8" in engine.explain()


def test_the_old_encoder_goes_before_the_smaller_one_comes(
    fake_engine: Callable[..., Any], make_encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models do not fit where memory ran out with one; and what was not built is not what the weights are in."""
    large, small = make_encoder(most_tokens=100), make_encoder(quantization="int8")
    engine = fake_engine(large, allow_quantize=True)
    seen: list[tuple[bool, str | None]] = []

    def build(*given: Any, quantization: str | None, **named: Any) -> tuple[Any, str]:
        seen.append((large.closed, engine.quantization))
        return small, "a test's"

    monkeypatch.setattr(encoder_builder, "build_encoder", build)
    with pytest.warns(DeviceFallbackWarning, match="int8"):
        engine.encode(["word " * 200])
    assert seen == [(True, None)] and engine.quantization == "int8"


def test_where_no_smaller_encoder_fits_the_engine_goes_on(
    fake_engine: Callable[..., Any], make_encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine(make_encoder(most_tokens=100), allow_quantize=True)
    short = engine.encode(["word"])

    def build(*given: Any, quantization: str | None, **named: Any) -> tuple[Any, str]:
        if quantization is not None:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
        return make_encoder(most_tokens=100), "as before"

    monkeypatch.setattr(encoder_builder, "build_encoder", build)
    with pytest.warns(DeviceFallbackWarning), pytest.raises(OutOfMemory, match="a single text of 202 tokens"):
        engine.encode(["word " * 200])
    assert engine.quantization is None and "no smaller encoder fits" in engine.explain()
    assert np.array_equal(engine.encode(["word"]), short)


def test_nothing_is_left_when_not_even_the_old_one_fits_again(
    fake_engine: Callable[..., Any], make_encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine(make_encoder(most_tokens=100), allow_quantize=True)

    def build(*given: Any, **named: Any) -> tuple[Any, str]:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(encoder_builder, "build_encoder", build)
    with pytest.warns(DeviceFallbackWarning), pytest.raises(OutOfMemory, match="the model does not fit"):
        engine.encode(["word " * 200])
    with pytest.raises(UsageError, match="closed"):
        engine.encode(["word"])


def test_a_model_too_large_to_load(model_folder: Path, monkeypatch: pytest.MonkeyPatch, make_encoder: Any) -> None:
    asked: list[str | None] = []

    def build(*given: Any, quantization: str | None, **named: Any) -> tuple[Any, str]:
        asked.append(quantization)
        if quantization != "int4":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
        return make_encoder(quantization=quantization), "a test's"

    monkeypatch.setattr(encoder_builder, "build_encoder", build)
    with pytest.raises(OutOfMemory, match="does not fit in the memory of cpu"):
        ArrowEngine(model_folder, "cpu")
    with pytest.warns(DeviceFallbackWarning, match="int"):
        engine = ArrowEngine(model_folder, "cpu", allow_quantize=True)
    assert asked == [None, None, "int8", "int4"] and engine.quantization == "int4"


# --- devices ------------------------------------------------------------------------------------------------------------


def test_auto_needs_no_torch_where_files_show_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_device, "accelerator_seen", lambda: False)
    monkeypatch.setattr(encoder_device, "resolve", lambda *given, **named: pytest.fail("nothing needs resolving"))
    cpu = EncoderDevice("cpu", "cpu", "files show no accelerator on this machine")
    assert choose_device("auto") == choose_device(None) == cpu
    assert choose_device("cpu").why == "you asked for 'cpu'"
    with anytorch.use(backend="cpu"):
        assert choose_device("auto").why == "the settings name 'cpu' (source: code)"


def test_a_forced_device_falls_back_with_a_warning(cpu_wheel: None, fake_engine: Callable[..., Any]) -> None:
    with pytest.warns(DeviceFallbackWarning, match="'cuda' cannot be used") as caught:
        engine = fake_engine(device="cuda")
    assert engine.device == "cpu" and "'cuda' cannot be used" in engine.explain()
    assert caught[0].filename == __file__ or "conftest" in caught[0].filename, "it points at the caller"
    with anytorch.use(strict=True), pytest.raises(anytorch.AnytorchError, match="cannot be used"):
        fake_engine(device="cuda")


def test_a_device_that_is_there_gets_torch(monkeypatch: pytest.MonkeyPatch, fake_engine: Callable[..., Any]) -> None:
    there = EncoderDevice("cuda:0", "cuda:0", "a test says so")
    monkeypatch.setattr(encoder_builder, "choose_device", lambda request: there)
    engine = fake_engine(device="auto")
    assert engine.device == "cuda:0" and not engine.on_cpu and engine.batch_tokens > 10_000
    on_cpu = fake_engine(device="cpu")
    assert np.array_equal(engine.encode(TEXTS), on_cpu.encode(TEXTS)), "whichever tokenizer"


def test_torch_devices_are_named_by_their_name(fake_engine: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    assert fake_engine(device=torch.device("cpu")).device == "cpu"
    assert fake_engine(device=None).device == "cpu"
