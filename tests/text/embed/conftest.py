"""The real tokenizer and folder of the default model; an encoder that needs no compiler; and the real one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scripts import module_at

from anytorch.errors import OutOfMemory
from anytorch.text.embed import encoder_builder
from anytorch.text.embed.engine import ArrowEngine

WIDTH = 16
VOCABULARY = 30522


class FakeEncoder:
    """Mean of a fixed random vector per token, text by text: what a text gives never depends on its neighbours."""

    padded = False

    def __init__(self, *, width: int = WIDTH, most_tokens: int = 1 << 30, quantization: str | None = None) -> None:
        self.width = width
        self.most_tokens = most_tokens  # more in one call is out of memory
        self.quantization = quantization
        self.calls: list[list[int]] = []  # the lengths of each call's texts
        self.closed = False
        self.before: Callable[[list[int]], None] = lambda lengths: None
        self._table = np.random.default_rng(5).standard_normal((VOCABULARY, width)).astype(np.float32)

    def run(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
        assert ids.dtype == starts.dtype == np.int32 and starts[0] == 0 and starts[-1] == len(ids)
        lengths = np.diff(starts).tolist()
        self.before(lengths)
        if len(ids) > self.most_tokens:
            raise OutOfMemory(f"{len(ids)} tokens")
        self.calls.append(lengths)
        return np.stack([self._table[ids[a:b]].mean(0) for a, b in pairwise(starts)])

    def describe(self) -> dict[str, Any]:
        return {"device": "cpu", "dtype": "float32", "kernels": "fake", "quantization": self.quantization}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="session")
def make_encoder() -> Callable[..., FakeEncoder]:
    """`make_encoder(width=…, most_tokens=…)` → a FakeEncoder."""
    return FakeEncoder


@pytest.fixture
def copied_model(model_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage; the weights are linked, not copied."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    (folder / "model.safetensors").symlink_to(model_folder / "model.safetensors")
    return folder


@pytest.fixture
def fake_engine(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ArrowEngine]]:
    """`fake_engine(encoder, **options)` → an engine with the real tokenizer and a FakeEncoder."""
    made: list[ArrowEngine] = []

    def make(*encoders: FakeEncoder, **options: Any) -> ArrowEngine:
        left = list(encoders) or [FakeEncoder()]
        monkeypatch.setattr(encoder_builder, "build_encoder", lambda *given, **named: (left.pop(0), "a test's"))
        made.append(ArrowEngine(options.pop("model_path", model_folder), options.pop("device", "cpu"), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(fake_engine: Callable[..., ArrowEngine]) -> ArrowEngine:
    return fake_engine()


@pytest.fixture(scope="session")
def built_cache(shared_cache: Callable[[str], Path]) -> Path:
    return shared_cache("embed")


@pytest.fixture
def real_cache(built_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One cache folder for all tests with the real encoder: the C++ is compiled once, not once per test."""
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(built_cache))
    return built_cache


@pytest.fixture
def real_engine(
    model_folder: Path, real_cache: Path, missing: Callable[[str, str], Any]
) -> Iterator[Callable[..., ArrowEngine]]:
    """`real_engine(**options)` → an engine with the C++ encoder on the CPU."""
    from anytorch import native
    from anytorch.errors import NativeUnavailable
    from anytorch.native.compiler import find_compiler

    try:
        find_compiler()
    except NativeUnavailable as exc:
        missing("compiler", str(exc))
    assert native.LEVELS
    made: list[ArrowEngine] = []

    def make(model_path: Path | None = None, **options: Any) -> ArrowEngine:
        made.append(ArrowEngine(model_path or model_folder, options.pop("device", "cpu"), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def corpus() -> Any:
    """bench/corpus.py: real English sentences and passages, from the standard library's own documentation."""
    return module_at(Path(__file__).parents[3] / "bench" / "corpus.py")


@pytest.fixture(scope="session")
def cosine() -> Callable[[Any, Any], np.ndarray]:
    """`cosine(a, b)` → row by row, in float64."""

    def of(a: Any, b: Any) -> np.ndarray:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))

    return of


@pytest.fixture(scope="session")
def sentence_transformers() -> Any:
    """The reference. Imported once and for all tests: importing it sets environment variables."""
    import os

    before = dict(os.environ)
    module = pytest.importorskip("sentence_transformers")
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    return module


@pytest.fixture(scope="session")
def long_texts() -> list[str]:
    """Texts of hundreds of words, most of them plain, with whatever else is found in texts among them."""
    plain = ["alpha", "x", "42", "Berlin", "o", "stop"]
    strange = ["naïve", "…", "日本", "[SEP]", "a\u0301", "\u0308", "don't", "\x07", "——", "Straße", "👩‍👩‍👧", "##ing"]
    words = [*plain * 4, *strange]
    generator = random.Random(3)
    gaps = [*[" "] * 9, "  ", "\n", "\n\n", "\t", "\u00a0", "-", ""]
    return [
        "".join(generator.choice(words) + generator.choice(gaps) for _ in range(generator.randrange(400, 2500)))
        for _ in range(60)
    ]
