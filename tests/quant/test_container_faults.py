"""quant.save and quant.load where anything fails at any moment: the old file or the new, and the next call goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from anytorch import quant
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import AnytorchError, ModelError, OutputError
from anytorch.quant import container
from anytorch.quant.container import FILE
from tests.faulty_disk import Counter, each, failing, failing_allocations
from tests.power_loss import recorded


def made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32, bias=False))


def packed(seed: int) -> torch.nn.Module:
    model = made(seed)
    quant.quantize(model, "int8")
    return model


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@contextmanager
def no_bytes(at: int) -> Iterator[Counter]:
    """A context in which there is no memory for the bytes of the `at`-th tensor, which neither torch nor NumPy allocates."""
    counter, real = Counter(at, MemoryError), container.tensor_bytes

    def asked(tensor: torch.Tensor) -> bytes:
        counter.ask("bytes")
        return real(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container, "tensor_bytes", asked)
        yield counter


@pytest.mark.parametrize("kind", ["a full disk", "no memory"])
@pytest.mark.parametrize("first", [True, False], ids=["new", "replaced"])
def test_saving(kind: str, first: bool, tmp_path: Path) -> None:
    folder, models = tmp_path / "model", {0: packed(0), 1: packed(1)}
    fault: Any = partial(failing, within=tmp_path) if kind == "a full disk" else no_bytes
    told = 0
    for attempt in each(fault):
        if first:
            (folder / FILE).unlink(missing_ok=True)
        else:
            quant.save(models[0], folder)
        try:
            with attempt:
                quant.save(models[1], folder)
        except Exception as exc:  # noqa: BLE001
            assert isinstance(exc, OutputError) or (kind == "no memory" and is_out_of_memory(exc)), (
                f"{attempt}: {exc!r}"
            )
            told += 1
            assert first or same(quant.load(made(2), folder), models[0]), f"{attempt}: the old one is lost"
        assert [path.name for path in folder.glob("*")] in ([FILE], []), f"{attempt} left something behind"
        assert first or (folder / FILE).exists()
    assert same(quant.load(made(2), folder), models[1]) and told > 3


@pytest.mark.parametrize("kind", ["a disk that does not read", "no memory"])
def test_loading(kind: str, tmp_path: Path) -> None:
    """A model that was filled in part is filled by the next call."""
    saved = packed(1)
    quant.save(saved, tmp_path)
    fault: Any = partial(failing, within=tmp_path, reads=True) if kind != "no memory" else failing_allocations
    told = 0
    for attempt in each(fault):
        model = made(2)
        try:
            with attempt:
                quant.load(model, tmp_path)
        except Exception as exc:  # noqa: BLE001
            assert isinstance(exc, ModelError) or (kind == "no memory" and is_out_of_memory(exc)), f"{attempt}: {exc!r}"
            told += 1
            quant.load(model, tmp_path)
        assert same(model, saved), str(attempt)
    assert told > 5


def test_a_power_loss_at_any_moment(tmp_path: Path) -> None:
    models = {0: packed(0), 1: packed(1)}
    quant.save(models[0], tmp_path)
    with recorded(tmp_path) as recording:
        quant.save(models[1], tmp_path)
    for state in recording.states():
        recording.restore(state)
        found = quant.load(made(2), tmp_path)
        assert same(found, models[0]) or same(found, models[1]), str(state)
        quant.save(models[1], tmp_path)
        assert same(quant.load(made(2), tmp_path), models[1]), str(state)
    assert len(recording.states()) > 4


def test_the_errors_are_ours(tmp_path: Path) -> None:
    with pytest.raises(AnytorchError, match="No space left"), failing(1, within=tmp_path):
        quant.save(packed(0), tmp_path / "model")
