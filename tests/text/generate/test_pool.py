"""Texts of a pool are those of one generator, also when a device dies under way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from anytorch.errors import InputError, UsageError  # noqa: E402
from anytorch.text.generate.generator import TextGenerator  # noqa: E402
from anytorch.text.generate.pool import TextPool  # noqa: E402

PROMPTS = ["The quick brown fox", "One token", "x", "日本語", "a page makes a text"]


@pytest.mark.slow
def test_two_processes_write_what_one_generator_does_and_lose_nothing(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with TextGenerator(models["llama"], device="cpu") as generator:
        want = [generator.complete(prompt, max_tokens=6, temperature=0).text for prompt in PROMPTS]
    with TextPool(models["llama"], devices=["cpu", "cpu"], at_once=2) as pool:
        for kill in (False, True):
            if kill:
                os.kill(next(process for process in pool.process_ids if process is not None), signal.SIGKILL)
            found = pool.complete(PROMPTS, max_tokens=6, temperature=0)
            assert [one.text for one in found] == want
        assert pool.complete([], max_tokens=6) == []
        with pytest.raises(InputError, match="list"):
            pool.complete("one text", max_tokens=6)
        with pytest.raises(UsageError, match="max_tokens"):
            pool.complete(PROMPTS, max_tokens=0)
        # A prompt that is refused leaves the workers free for the next.
        with pytest.raises(InputError):
            pool.complete(["x", "too long " * 2000], max_tokens=6)
        assert [one.text for one in pool.complete(PROMPTS[:1], max_tokens=6, temperature=0)] == want[:1]


@pytest.mark.slow
def test_two_devices_of_another_kind(
    models: dict[str, Path], npu_extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled test device, which the workers' `import torch` loads: a worker on each, and one that dies."""
    with TextGenerator(models["llama"], device="cpu", dtype="float32") as generator:
        want = [generator.complete(prompt, max_tokens=4, temperature=0).text for prompt in PROMPTS]
    monkeypatch.syspath_prepend(npu_extension.plugin(tmp_path / "npu"))
    monkeypatch.setenv("ANYTORCH_STRICT", "1")  # no worker falls back to the CPU
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with TextPool(models["llama"], devices=["npu:0", "npu:1"], at_once=2, dtype="float32") as pool:
        for kill in (False, True):
            if kill:
                os.kill(next(process for process in pool.process_ids if process is not None), signal.SIGKILL)
            assert [one.text for one in pool.complete(PROMPTS, max_tokens=4, temperature=0)] == want
        assert [one["device"] for one in pool.describe()] == ["npu:0", "npu:1"]
