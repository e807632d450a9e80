"""Texts of a pool are those of one generator, also when a device dies under way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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
