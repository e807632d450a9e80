"""Fine-tuning where anything fails at any moment: our error, and the next run ends with the same bits."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faulty_disk import each, failing, failing_allocations, failing_threads, left_since

from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import AnytorchError
from anytorch.forecast.training import finetune_tokenizer, loop

FAULTS: dict[str, Callable[[Path], Any]] = {
    "a full disk": lambda folder: partial(failing, within=folder),
    "a disk that does not read": lambda folder: partial(failing, within=folder, reads=True),
    "no thread": lambda _: partial(failing_threads, on=True),
    "no memory": lambda _: failing_allocations,
}
# Every how many calls fail, here and in the slow run: a state is many small writes, and test_store.py fails each of them.
STEPS = {"a full disk": (83, 7), "a disk that does not read": (3, 1), "no thread": (1, 1), "no memory": (211, 29)}


def ended(folder: Path) -> tuple[bytes, str, list[torch.Tensor]]:
    """What a run left: the best model, the log, and the weights and moments of its last state."""
    state = torch.load(folder / "last.pt", weights_only=True)
    best, log = (folder / "best_model" / "model.safetensors").read_bytes(), (folder / "log.jsonl").read_text()
    return best, log, [state["weights"][name] for name in sorted(state["weights"])]


@pytest.mark.parametrize("every", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FAULTS)
def test_the_next_run_ends_with_the_same_bits(
    kind: str,
    every: str,
    market: Any,
    shape: dict[str, Any],
    tokenizer_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "draw_curve", lambda entries, path, title="": path)  # half a second each
    config = {**tokenizer_config, "n_enc_layers": 1, "n_dec_layers": 1}
    plan = {
        **shape,
        "steps_per_epoch": 2,
        "evaluate_every": 1,
        "save_every": 1,
        "validation_windows": 8,
        "log_every": 1,
    }
    folder = tmp_path / "run"
    run = partial(finetune_tokenizer, market, tokenizer=config, output=folder, **plan)
    run()
    best, log, state = ended(folder)
    told = 0
    for attempt in each(FAULTS[kind](folder), step=STEPS[kind][every == "all"]):
        shutil.rmtree(folder)
        before = set(threading.enumerate())
        try:
            with attempt:
                run()
        except Exception as exc:  # noqa: BLE001
            assert isinstance(exc, AnytorchError) or (kind == "no memory" and is_out_of_memory(exc)), (
                f"{attempt}: {exc!r}"
            )
            told += 1
            run()
        assert not left_since(before), f"{attempt} left a thread"
        found = ended(folder)
        assert found[:2] == (best, log) and all(map(torch.equal, found[2], state)), f"{attempt}: another end"
        left = [path.name for path in folder.rglob(".*")]
        assert not left, f"{attempt} left {left}"
    assert told > 2 or "thread" in kind or "read" in kind
