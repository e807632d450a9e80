"""The state of a run: a damaged one is never resumed from; the one before it is, and says so."""

from __future__ import annotations

import errno
import logging
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faulty_disk import PowerLoss, failing
from tests.power_loss import recorded

from anytorch.errors import InputError, ModelError, OutputError, UsageError
from anytorch.forecast.training import store
from anytorch.forecast.training.store import RunFolder


def state(step: int) -> dict[str, Any]:
    weights = torch.randn(300, generator=torch.Generator().manual_seed(step))
    return {"fingerprint": "a", "step": step, "weights": {"one": weights}, "optimiser": {"m": -weights}}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return (
        ours["step"] == theirs["step"]
        and torch.equal(ours["weights"]["one"], theirs["weights"]["one"])
        and torch.equal(ours["optimiser"]["m"], theirs["optimiser"]["m"])
    )


def test_a_flipped_bit_is_never_resumed_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))
    whole = folder.state.read_bytes()
    dice, fell_back = random.Random(0), 0
    for at in [*range(0, len(whole), 41), *(len(whole) - n for n in range(1, 120))]:
        changed = bytearray(whole)
        changed[at] ^= 1 << dice.randrange(8)
        folder.state.write_bytes(changed)
        with caplog.at_level(logging.WARNING, "anytorch"):
            caplog.clear()
            found = folder.load("a", "cpu")
        assert found is not None
        if found["step"] == 1:
            fell_back += 1
            assert same(found, state(1)) and "going back to" in caplog.text
        else:  # a byte that means nothing: padding, a date
            assert same(found, state(2)) and not caplog.text
    assert fell_back > 60


def test_a_state_that_is_cut_off_or_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))
    whole = folder.state.read_bytes()
    for length in (0, 1, 4, 30, len(whole) // 2, len(whole) - 1):
        folder.state.write_bytes(whole[:length])
        found = folder.load("a", "cpu")
        assert found is not None and same(found, state(1))
    assert not folder.state.exists()  # as after a kill between two renames, where links are not possible
    found = folder.load("a", "cpu")
    assert found is not None and same(found, state(1))
    with pytest.raises(InputError, match="another plan"):
        folder.load("b", "cpu")
    folder.previous.write_bytes(whole[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        folder.load("a", "cpu")
    folder.forget()
    assert folder.load("a", "cpu") is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_a_damaged_state_never_takes_the_place_of_the_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))
    folder.state.write_bytes(folder.state.read_bytes()[:-200])
    found = folder.load("a", "cpu")
    assert found is not None and found["step"] == 1
    assert folder.damaged.exists() and not folder.state.exists()
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.open(tmp_path / "no such folder" / "file", os.O_RDONLY))
    folder.save(state(3))
    folder.state.write_bytes(b"damaged again")
    found = folder.load("a", "cpu")
    assert found is not None and same(found, state(1)), "the good state was overwritten by the damaged one"


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_state_that_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))

    def away(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store.zipfile, "ZipFile", away)
    with pytest.raises(UsageError, match="cannot be read now") as caught:
        folder.load("a", "cpu")
    assert not isinstance(caught.value, InputError), "the run would be started over"
    monkeypatch.undo()
    found = folder.load("a", "cpu")
    assert found is not None and same(found, state(2)) and not folder.damaged.exists()


def test_a_damaged_state_that_cannot_be_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))
    folder.state.write_bytes(b"damaged")
    with failing(1), pytest.raises(OutputError, match="cannot be put aside"):
        folder.load("a", "cpu")
    assert folder.state.read_bytes() == b"damaged" and store.read_state(folder.previous, "cpu", mmap=False)["step"] == 1


@pytest.mark.parametrize("links", [True, False])
def test_a_crash_at_any_moment_leaves_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Power loss: each prefix of the renames of a save is a folder that can be resumed from."""
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))

    class Off(BaseException):
        pass

    def no_links(*_: Any) -> None:
        raise PermissionError(1, "no links here")

    renames, allowed = Path.replace, 0

    def until(self: Path, target: Path) -> Path:
        nonlocal allowed
        if allowed == 0:
            raise Off
        allowed -= 1
        return renames(self, target)

    monkeypatch.setattr(Path, "replace", until)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for count in range(4):
        allowed = count
        if count < 3:
            with pytest.raises(Off):
                folder.save(state(3))
        else:
            folder.save(state(3))
        found = folder.load("a", "cpu")
        assert found is not None and found["step"] in ((2, 1) if count < 3 else (3,))
        assert same(found, state(found["step"]))


def test_a_kill_leaves_no_hidden_copy_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the renames last.pt and previous.pt are one file, and renaming one of its names to the other does nothing."""
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))
    os.link(folder.state, tmp_path / "link")
    (tmp_path / "link").replace(folder.previous)
    assert folder.state.samefile(folder.previous)
    folder.save(state(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "previous.pt"]
    dead, alive = 11, 12
    monkeypatch.setattr(store, "is_alive", lambda process: process == alive)
    for name in (
        f".previous.pt.{dead}",
        f".next.pt.{dead}-3",
        f".next.pt.{os.getpid()}-99999",
        f".next.pt.{alive}-0",
        ".notes",
    ):
        (tmp_path / name).write_bytes(b"gigabytes")
    folder.save(state(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".next.pt.{alive}-0",
        ".notes",
        "last.pt",
        "previous.pt",
    ]
    found = folder.load("a", "cpu")
    assert found is not None and same(found, state(4))


def test_checksums_are_written_whatever_the_program_chose(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        RunFolder(tmp_path).save(state(1))
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert RunFolder(tmp_path).load("a", "cpu") is not None


def test_a_pickle_that_torch_asserts_against_is_damaged(tmp_path: Path) -> None:
    """A reference to a storage that is a number: torch has an assertion there, not an error."""
    path = tmp_path / "state.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02K\x05Q.")
        archive.writestr("archive/version", b"3\n")
    with pytest.raises(ModelError, match="cannot be read: saved_id must be a tuple"):
        store.read_state(path, "cpu", mmap=False)


def test_a_log_of_any_bytes_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    odd = b'{"step": 1}\n\xff\xfe\n[1]\n7\n{"step": null}\n' + b"[" * 100_000
    folder.log.write_bytes(odd + b'\n{"step": 2}\n{"st')
    assert folder.entries() == [{"step": 1}, {"step": 2}]
    folder.keep_log_until(1)
    assert folder.entries() == [{"step": 1}]
    assert store.plain(3) == "3"


@pytest.mark.parametrize("power", [False, True], ids=["a full disk", "a power loss"])
def test_whatever_fails_while_saving_a_state_is_left(tmp_path: Path, power: bool) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))
    at, told = 0, 0
    while True:
        at += 1
        with failing(at, power=power) as disk:
            try:
                folder.save(state(3))
            except (OutputError, PowerLoss):
                told += 1
        found = folder.load("a", "cpu")
        assert found is not None and same(found, state(found["step"])) and found["step"] >= 2, at
        if not disk.failed:
            break
    assert told > 5 and same(found, state(3))
    folder.save(state(4))
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "last.pt",
        "previous.pt",
    ]


@pytest.mark.parametrize("links", [True, False])
def test_a_power_loss_leaves_a_state_whatever_the_order_of_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links here")))
    with recorded(tmp_path) as recording:
        folder.save(state(3))
    states = recording.states()
    for left in states:
        recording.restore(left)
        found = folder.load("a", "cpu")
        assert found is not None and found["step"] >= 2 and same(found, state(found["step"])), str(left)
        assert not folder.damaged.exists(), f"{left}: a state that was not whole had its name"
        folder.save(state(4))
        found = folder.load("a", "cpu")
        assert found is not None and same(found, state(4)), str(left)
    assert len(states) > 10


def test_a_power_loss_while_lines_are_logged(tmp_path: Path) -> None:
    """A log is not synced: its last lines may be lost, or be zeros; what is there is read, and training goes on."""
    folder = RunFolder(tmp_path)
    folder.note(step=1)
    with recorded(tmp_path) as recording:
        folder.note(step=2)
        folder.keep_log_until(1)
        folder.note(step=2)
    for left in recording.states():
        recording.restore(left)
        assert [entry for entry in folder.entries() if entry not in ({"step": 1}, {"step": 2})] == [], str(left)
        folder.keep_log_until(2)  # as every run does first
        folder.note(step=3)
        assert folder.entries()[-1:] == [{"step": 3}], str(left)
