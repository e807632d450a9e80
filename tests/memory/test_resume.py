"""Checkpoints of a training run: a damaged byte anywhere is found before the model is touched; the one before is used."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.faulty_disk import PowerLoss, failing
from tests.power_loss import recorded

import anytorch
from anytorch.errors import AnytorchError, ModelError, UsageError
from anytorch.memory import TieredOptimizer, manifest, resume, resume_training, save_training
from anytorch.memory.manifest import MANIFEST

WIDTH = 64


def training(folder: Path, seed: int = 0, layers: int = 6) -> tuple[torch.nn.Module, TieredOptimizer]:
    torch.manual_seed(seed)
    parts = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1)) for _ in range(layers))
    model = torch.nn.Sequential(*parts)
    anytorch.memory.fit(model, "cpu", device_budget="200KiB", reserve="100KiB", disk=str(folder / "disk"))
    return model, TieredOptimizer(model, torch.optim.AdamW, lr=1e-2)


def take_step(model: torch.nn.Module, optimizer: TieredOptimizer, number: int) -> None:
    model(torch.full((2, WIDTH), float(number))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """A folder with the checkpoints of steps 1 and 2, and the weights after each."""
    folder = tmp_path_factory.mktemp("run")
    model, optimizer = training(folder)
    weights = []
    for step in (1, 2):
        take_step(model, optimizer, step)
        save_training(folder / "run", optimizer, step=step, extra={"note": step})
        weights.append(weights_of(model))
    anytorch.memory.fitted(model).close()
    return folder / "run", weights


def copy_of(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def damages(checkpoint: Path) -> list[tuple[str, int]]:
    """Places to damage: the first, the middle and the last byte of every file, and some in between."""
    found = []
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        size = path.stat().st_size
        found += [(str(path.relative_to(checkpoint)), size * part // 7) for part in range(7)]
        found.append((str(path.relative_to(checkpoint)), size - 1))
    return found


def test_every_file_has_a_sum_and_a_flipped_bit_anywhere_is_found(
    run: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    folder = copy_of(run[0], tmp_path)
    newest = folder / "step-00000002"
    listed = json.loads((newest / MANIFEST).read_text())["files"]
    assert set(listed) == {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()} - {
        MANIFEST
    }
    assert resume.read_verified(newest)[0]
    for name, at in damages(newest):
        whole = (newest / name).read_bytes()
        for changed in (_flipped(whole, at), whole[:at]):
            (newest / name).write_bytes(changed)
            meta, why = resume.read_verified(newest)
            assert meta is None and why, (name, at)
        (newest / name).unlink()
        assert resume.read_verified(newest)[0] is None
        (newest / name).write_bytes(whole)
    assert resume.read_verified(newest)[0]


def test_an_added_file_counts_only_where_it_would_be_read(
    run: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    """A copied config.json, or what macOS leaves beside each file, must not cost the training since the one before."""
    folder, weights = copy_of(run[0], tmp_path), run[1]
    newest = folder / "step-00000002"
    for name in ("model/config.json", "model/._model.safetensors", "optimizer/.DS_Store.json", "notes.json"):
        (newest / name).write_bytes(b"{}")
    model, optimizer = training(tmp_path, seed=5)
    state = resume_training(folder, optimizer)
    assert state is not None and state["step"] == 2 and same(weights_of(model), weights[1])
    anytorch.memory.fitted(model).close()
    assert not manifest.problem_of(newest, resume.READ)
    (newest / "more.safetensors").write_bytes(b"")
    problem = manifest.problem_of(newest, [*resume.READ, "more.safetensors"])
    assert problem == f"more.safetensors is not listed in {manifest.MANIFEST}"


@pytest.mark.parametrize("name", resume.READ)
def test_an_added_file_that_would_be_read_is_found(tmp_path: Path, name: str) -> None:
    """As where the model was written in shards: its index names them, but a model.safetensors beside it comes first."""
    for folder in ("model", "optimizer"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "listed.safetensors").write_bytes(b"x")
    manifest.write_manifest(tmp_path)
    (tmp_path / name).write_bytes(b"y")
    assert manifest.problem_of(tmp_path, resume.READ) == f"{name} is not listed in {manifest.MANIFEST}"


def _flipped(whole: bytes, at: int) -> bytes:
    changed = bytearray(whole)
    changed[at] ^= 0x80
    return bytes(changed)


@pytest.mark.parametrize("where", ["model/model.safetensors", "optimizer/000000.safetensors"])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(
    run: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, weights = copy_of(run[0], tmp_path), run[1]
    damaged = folder / "step-00000002" / where
    damaged.write_bytes(_flipped(damaged.read_bytes(), damaged.stat().st_size - 3))
    model, optimizer = training(tmp_path, seed=5)
    with caplog.at_level(logging.WARNING, "anytorch"):
        assert resume_training(folder, optimizer) == {"step": 1, "extra": {"note": 1}}
    assert "step-00000002 is damaged" in caplog.text and "going back to step-00000001" in caplog.text
    assert same(weights_of(model), weights[0])
    assert sorted(path.name for path in folder.iterdir()) == ["damaged-step-00000002", "step-00000001"]
    take_step(model, optimizer, 2)
    save_training(folder, optimizer, step=2)
    assert same(weights_of(model), weights[1]), "the run goes on as if nothing had happened"
    anytorch.memory.fitted(model).close()


def test_where_all_are_damaged_nothing_is_touched(
    run: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    folder = copy_of(run[0], tmp_path)
    for checkpoint in folder.iterdir():
        file = checkpoint / "model" / "model.safetensors"
        file.write_bytes(_flipped(file.read_bytes(), file.stat().st_size // 2))
    model, optimizer = training(tmp_path, seed=5)
    before = weights_of(model)
    with pytest.raises(ModelError, match="no checkpoint can be resumed from") as caught:
        resume_training(folder, optimizer)
    assert "step-00000001" in caught.value.message and "step-00000002" in caught.value.message
    assert same(weights_of(model), before) and len(list(folder.iterdir())) == 2
    anytorch.memory.fitted(model).close()


def test_a_checkpoint_of_an_earlier_version_is_read(
    run: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    folder, weights = copy_of(run[0], tmp_path), run[1]
    newest = folder / "step-00000002"
    meta = json.loads((newest / "training.json").read_text())
    (newest / MANIFEST).unlink()
    assert resume.read_verified(newest)[0] is None, "one of this version without its sums is not whole"
    (newest / "training.json").write_text(json.dumps({**meta, "format": 1}))
    model, optimizer = training(tmp_path, seed=5)
    state = resume_training(folder, optimizer)
    assert state is not None and state["step"] == 2 and same(weights_of(model), weights[1])
    anytorch.memory.fitted(model).close()


def test_nothing_is_removed_before_the_new_one_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training(tmp_path)
    told: list[str] = []
    sync, remove = resume.sync_folder, resume.remove_whole
    monkeypatch.setattr(resume, "sync_folder", lambda path: (told.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(resume, "remove_whole", lambda path: (told.append(f"remove {path.name}"), remove(path)))
    for step in (1, 2):
        take_step(model, optimizer, step)
        save_training(tmp_path / "run", optimizer, step=step, keep=1)
    assert told[-3:] == ["sync run", "remove step-00000001", "sync run"]  # the last: its name goes before its files
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]
    with pytest.raises(UsageError, match="keep=0"):
        save_training(tmp_path / "run", optimizer, step=3, keep=0)
    anytorch.memory.fitted(model).close()


@pytest.mark.parametrize("power", [False, True], ids=["a full disk", "a power loss"])
def test_whatever_fails_while_saving_nothing_is_lost(
    run: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path, power: bool
) -> None:
    """Each open, write, fsync, rename and removal of a save fails once: our error, an older checkpoint, and on it goes."""
    folder = copy_of(run[0], tmp_path)
    model, optimizer = training(tmp_path, layers=3)
    take_step(model, optimizer, 3)
    at, told = 0, 0
    while True:
        at += 1
        with failing(at, power=power) as disk:
            try:
                save_training(folder, optimizer, step=3)
            except (AnytorchError, PowerLoss):
                told += 1
        found = resume.checkpoints(folder)
        assert found, at
        assert all(resume.read_verified(checkpoint)[0] for checkpoint in found), f"call {at} left half of one"
        if not disk.failed:
            break
    assert told > 20 and at > 30
    take_step(model, optimizer, 4)
    newest = save_training(folder, optimizer, step=4)
    assert resume.checkpoints(folder)[-1] == newest and not list(folder.glob(".*"))
    anytorch.memory.fitted(model).close()


def test_a_power_loss_leaves_whole_checkpoints_whatever_the_order_of_writes(tmp_path: Path) -> None:
    """Between two syncs a disk may write in any order: the third save, which removes the first, at every moment of it."""
    model, optimizer = training(tmp_path, layers=2)
    folder = tmp_path / "run"
    for step in (1, 2):
        take_step(model, optimizer, step)
        save_training(folder, optimizer, step=step)
    take_step(model, optimizer, 3)
    with recorded(folder, lambda: len(resume.checkpoints(folder))) as recording:
        save_training(folder, optimizer, step=3)
    states = recording.states()
    for state in {repr({n: d for n, d in one.tree.items() if n[0] != "."}): one for one in states}.values():
        recording.restore(state)
        found = resume.checkpoints(folder)
        assert len(found) >= 2, f"{state}: there is none to go back to"
        wrong = [why for checkpoint in found if (why := resume.read_verified(checkpoint)[1])]
        assert not wrong, f"{state}: half of one looks like one: {wrong}"
    assert len(states) > 60
    newest = save_training(folder, optimizer, step=4)
    assert resume.checkpoints(folder)[-1] == newest and not list(folder.glob(".*"))
    anytorch.memory.fitted(model).close()


def names_in(folder: Path) -> list[str]:
    return [path.name for path in resume.checkpoints(folder)]


def test_the_checkpoint_just_written_is_never_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither for an older run's later steps in the same folder, nor for those of the same step."""
    model, optimizer = training(tmp_path, layers=2)
    folder = tmp_path / "run"
    for step in (100, 200):
        save_training(folder, optimizer, step=step)
    assert not caplog.text
    written = save_training(folder, optimizer, step=10)
    assert names_in(folder) == [written.name, "step-00000200"] == ["step-00000010", "step-00000200"]
    assert "holds step-00000200, of a later step" in caplog.text
    for number in range(1, 12):
        written = save_training(folder, optimizer, step=200)
        assert written.name == f"step-00000200.{number}" and resume.checkpoints(folder)[-1] == written, number
    assert names_in(folder) == ["step-00000200.10", "step-00000200.11"]
    written = save_training(folder, optimizer, step=5, keep=1)
    assert names_in(folder) == [written.name] == ["step-00000005"]
    anytorch.memory.fitted(model).close()


def test_names_are_sorted_by_their_numbers(tmp_path: Path) -> None:
    sorted_so = ["step-00000006", "step-00000006.2", "step-00000006.10", "step-00000006.10.1234", "step-100000000"]
    for name in [*reversed(sorted_so), "step-00000006-copy", "step-6.bak"]:
        (tmp_path / name).mkdir()
    assert names_in(tmp_path) == sorted_so
    assert (
        resume.free_name(tmp_path, 6).name == "step-00000006.11"
        and resume.free_name(tmp_path, 7).name == "step-00000007"
    )


def test_a_damaged_one_is_put_aside_also_the_second_time(
    run: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    """With its name it would count as the newest, and the next save would remove the whole one."""
    folder = copy_of(run[0], tmp_path)
    (folder / "damaged-step-00000002").mkdir()
    (folder / "step-00000002" / MANIFEST).write_bytes(b"{")
    assert resume.newest_whole(resume.checkpoints(folder))[0].name == "step-00000001"
    assert names_in(folder) == ["step-00000001"] and (folder / "damaged-step-00000002-1" / MANIFEST).exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("what", ["training.json", MANIFEST, "model/model.safetensors"])
def test_what_cannot_be_read_now_is_not_damaged(
    run: tuple[Path, list[dict[str, torch.Tensor]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    code: int,
) -> None:
    """A network file system that is away for a second must not cost the training since the checkpoint before."""
    folder = copy_of(run[0], tmp_path)
    away = folder / "step-00000002" / what
    reads, sums = Path.read_bytes, manifest.file_crc32

    def refuse(path: Path) -> None:
        if path == away:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) or reads(path))
    monkeypatch.setattr(manifest, "file_crc32", lambda path: refuse(path) or sums(path))
    with pytest.raises(ModelError, match=f"cannot be read: {os.strerror(code)}"):
        resume.newest_whole(resume.checkpoints(folder))
    monkeypatch.undo()
    assert names_in(folder) == ["step-00000001", "step-00000002"] == sorted(path.name for path in folder.iterdir())
    assert resume.newest_whole(resume.checkpoints(folder))[0].name == "step-00000002"
