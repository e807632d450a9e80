"""What goes wrong on real machines: no wrong result, no lost tensor, nothing left behind after the next start."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import anytorch
from anytorch.errors import BudgetTooSmall, ModelError, OutOfMemory, UsageError
from anytorch.memory import levels
from anytorch.memory import reader as reader_module
from anytorch.memory.buffers import HostArena, bytes_of, gather, host_buffer, scatter
from anytorch.memory.images import from_files, views_of
from anytorch.memory.reader import Reader, checksums_of, chunks_of
from anytorch.memory.sizes import PAGE, parse_nbytes, words
from anytorch.memory.spill import PREFIX, Spill, remove_stale
from anytorch.safetensors_files import locate_tensors

MB = 2**20


@pytest.fixture
def checkpoint(models: Any, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint" / "model.safetensors"
    path.parent.mkdir()
    state = models.made().state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items() if name != "head.weight"}, path)
    return path


def loaded(models: Any, checkpoint: Path, given: dict[str, Any], **options: Any) -> Any:
    options = {"device_budget": 1.2 * MB} | options
    return anytorch.memory.load(models.Tied, "cpu", weights=checkpoint, speeds=given["speeds"], **options)


# --- reading -----------------------------------------------------------------------------------------------------------


def test_short_reads_are_continued(models: Any, checkpoint: Path, given: dict[str, Any], monkeypatch: Any) -> None:
    expected = models.made()(models.IDS)
    real = os.preadv

    def short(fd: int, buffers: list[Any], offset: int) -> int:
        length = len(buffers[0])
        return real(fd, [buffers[0][: max(PAGE, length // 2 // PAGE * PAGE)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    model = loaded(models, checkpoint, given)
    with torch.no_grad():
        assert torch.equal(model(models.IDS), expected)
    anytorch.memory.fitted(model).close()


def test_a_file_that_is_cut_off_while_in_use(models: Any, checkpoint: Path, given: dict[str, Any]) -> None:
    expected = models.made()(models.IDS)
    whole = checkpoint.read_bytes()
    model = loaded(models, checkpoint, given)
    os.truncate(checkpoint, len(whole) // 2)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ModelError, match="cut off"):
            model(models.IDS)
    checkpoint.write_bytes(whole)  # the same file again
    with torch.no_grad():
        assert torch.equal(model(models.IDS), expected), "an error leaves no half-read block behind"
    anytorch.memory.fitted(model).close()


def test_input_output_errors_reach_the_caller(
    models: Any, checkpoint: Path, given: dict[str, Any], monkeypatch: Any
) -> None:
    model = loaded(models, checkpoint, given)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    anytorch.memory.fitted(model).mover.forget_all()
    with torch.no_grad(), pytest.raises(ModelError, match="Input/output error"):
        model(models.IDS)
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(model(models.IDS), models.made()(models.IDS))
    anytorch.memory.fitted(model).close()


@pytest.mark.parametrize("refused_at", ["open", "read"])
def test_where_direct_reads_are_refused(
    models: Any, checkpoint: Path, given: dict[str, Any], monkeypatch: Any, refused_at: str
) -> None:
    real_open, real_read = os.open, os.preadv
    direct: set[int] = set()

    def opened(path: Any, flags: int, *more: Any) -> int:
        if flags & reader_module.O_DIRECT and refused_at == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags, *more)
        (direct.add if flags & reader_module.O_DIRECT else direct.discard)(fd)
        return fd

    def read(fd: int, buffers: list[Any], offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, buffers, offset)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", read)
    model = loaded(models, checkpoint, given)
    with torch.no_grad():
        assert torch.equal(model(models.IDS), models.made()(models.IDS))
    anytorch.memory.fitted(model).close()


@pytest.mark.parametrize("damage", ["flip", "zero page", "swap", "cut"])
def test_our_own_files_are_checked(models: Any, given: dict[str, Any], disk: Path, damage: str) -> None:
    model = models.made(width=512, layers=3)  # files of 8 MB
    anytorch.memory.fit(model, "cpu", device_budget=18 * MB, **given)
    path = max(disk.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0x10
    elif damage == "zero page":
        data[3 * MB : 3 * MB + PAGE] = bytes(PAGE)
    elif damage == "swap":
        one, two = slice(MB + PAGE, 2 * MB + PAGE), slice(2 * MB + PAGE, 3 * MB + PAGE)
        data[one], data[two] = data[two], data[one]
    else:
        del data[-10:]
    path.write_bytes(data)
    anytorch.memory.fitted(model).mover.forget_all()
    with torch.no_grad(), pytest.raises(ModelError, match=r"damaged|cut off"):
        model(models.IDS)
    if damage != "cut":
        with pytest.raises(ModelError, match="damaged"):
            model.state_dict()
    anytorch.memory.fitted(model).close()


def test_a_checkpoint_that_makes_no_sense(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    good = path.read_bytes()
    for broken, message in (
        (good[:-100], "cut off"),
        (b"", "not a whole safetensors file"),
        (b"\xff" * 64, "not a whole safetensors file"),
        (good[:8] + b"x" * (len(good) - 8), "not JSON"),
        (good.replace(b'"F32"', b'"X32"'), "X32"),
        (good.replace(b"[1000]", b"[1001]"), "does not match its dtype"),
    ):
        path.write_bytes(broken)
        with pytest.raises(ModelError, match=message):
            locate_tensors(path)
    with pytest.raises(ModelError, match="does not exist"):
        locate_tensors(tmp_path / "nonsense")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        locate_tensors(tmp_path / "empty")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permission_lost_before_the_start(models: Any, checkpoint: Path, given: dict[str, Any]) -> None:
    checkpoint.chmod(0)
    with pytest.raises(ModelError, match="Permission"):
        loaded(models, checkpoint, given)


def test_permission_refused_by_the_system(
    models: Any, checkpoint: Path, given: dict[str, Any], monkeypatch: Any
) -> None:
    """As root the permissions of a file mean nothing, so the refusal is made up."""
    real = os.open

    def refused(path: Any, flags: int, *more: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise OSError(errno.EACCES, "Permission denied")
        return real(path, flags, *more)

    model = loaded(models, checkpoint, given)
    monkeypatch.setattr(os, "open", refused)
    anytorch.memory.fitted(model).mover.forget_all()
    with torch.no_grad():  # the files are open: losing the permission later changes nothing
        assert torch.equal(model(models.IDS), models.made()(models.IDS))
    anytorch.memory.fitted(model).close()
    with pytest.raises(ModelError, match="Permission denied"):
        loaded(models, checkpoint, given)


# --- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_full_disk_leaves_the_model_as_it_was(
    models: Any, given: dict[str, Any], disk: Path, monkeypatch: Any, fails_at: int
) -> None:
    model = models.made()
    expected = model(models.IDS)
    calls = iter(range(1, 100))

    def full(*_: Any) -> None:
        if next(calls) >= fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemory, match="full") as caught:
        anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    assert str(disk) in str(caught.value)
    assert torch.equal(model(models.IDS), expected)
    assert not list(disk.iterdir())
    monkeypatch.undo()
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    with torch.no_grad():
        assert torch.equal(model(models.IDS), expected)
    anytorch.memory.unfit(model)


def test_ctrl_c_while_fitting(models: Any, given: dict[str, Any], disk: Path, monkeypatch: Any) -> None:
    model = models.made()
    expected = model(models.IDS)
    real, calls = os.fsync, iter(range(100))

    def interrupted(fd: int) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        real(fd)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    monkeypatch.undo()
    assert torch.equal(model(models.IDS), expected)
    assert not list(disk.iterdir())


def test_a_folder_that_cannot_be_written(models: Any, given: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    model = models.made()
    with pytest.raises(UsageError, match="disk level"):
        anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **(given | {"disk": file / "inside"}))


def test_a_read_only_file_system_is_no_small_budget(
    models: Any, given: dict[str, Any], disk: Path, monkeypatch: Any
) -> None:
    """It says that nothing is free. A disk that is merely full says the same, and there a budget is the answer."""
    model = models.made()
    expected = model(models.IDS)
    used_up = shutil.disk_usage(disk.parent)._replace(free=0)
    monkeypatch.setattr(levels.shutil, "disk_usage", lambda folder: used_up)
    with pytest.raises(BudgetTooSmall, match="must be stored on disk, but the disk budget is 0 bytes"):
        anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    assert not list(disk.iterdir())

    def read_only(self: Path, *_: Any, **__: Any) -> None:
        if not self.exists():
            raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(UsageError) as caught:
        anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    said = f"cannot use {disk} as the disk level: it is not writable (Read-only file system)"
    assert caught.value.message == said and "may write to" in caught.value.hint
    assert torch.equal(model(models.IDS), expected)
    anytorch.memory.fit(model, "cpu", device_budget=100 * MB, **given)  # nothing has to be written
    anytorch.memory.unfit(model)
    model(models.IDS)


KILLED = """
import os, sys, torch
from anytorch.memory.spill import Spill
import anytorch.memory.spill as module
spill = Spill(sys.argv[1])
spill.write({"a": torch.ones(100_000)})
def stop(fd, view, offset):
    os.pwrite(fd, view[:4096], offset)
    print("writing", flush=True)
    import time
    time.sleep(60)
module.write_all = stop
spill.write({"b": torch.ones(1_000_000)})
"""


def test_kill_9_during_a_write(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "writing\n"
    assert not remove_stale(folder), "its owner lives"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert list(folder.rglob("*.partial")), "this is what a killed process leaves"
    spill = Spill(folder)  # the next start
    assert [path.name for path in folder.iterdir()] == [spill.folder.name]
    spill.close()
    assert not list(folder.iterdir())


def test_an_unfinished_folder_goes_after_an_hour(tmp_path: Path) -> None:
    hidden = tmp_path / f".{PREFIX}1-abc"
    hidden.mkdir()
    assert not remove_stale(tmp_path)
    os.utime(hidden, (time.time() - 4000,) * 2)
    assert remove_stale(tmp_path) == [hidden]


def test_two_processes_on_the_same_files(
    models: Any, checkpoint: Path, given: dict[str, Any], disk: Path, run_script: Callable[..., dict[str, Any]]
) -> None:
    """Both read one checkpoint and spill into one folder; neither sees or removes the other's files."""
    torch.set_num_threads(1)  # here and there: sums of more are in another order (tests/conftest.py puts it back)
    model = models.made()
    expected = model(models.IDS)
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    told = run_script(
        f"""
        import importlib.util, torch, anytorch
        from anytorch.memory.types import Speeds
        torch.set_num_threads(1)
        spec = importlib.util.spec_from_file_location("models", {str(Path(__file__).with_name("models.py"))!r})
        models = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(models)
        more = dict(device_budget=1_258_291, speeds=Speeds(1, 1))
        one = anytorch.memory.load(models.Tied, "cpu", weights={str(checkpoint)!r}, **more)
        two = anytorch.memory.fit(models.made(), "cpu", disk={str(disk)!r}, **more)
        with torch.no_grad():
            answer(one=one(models.IDS).tolist(), two=two(models.IDS).tolist())
        """
    )
    assert told["one"] == told["two"] == expected.tolist()
    with torch.no_grad():
        assert torch.equal(model(models.IDS), expected)
    anytorch.memory.unfit(model)


# --- the parts ---------------------------------------------------------------------------------------------------------


def test_misaligned_tensors_are_read_right(tmp_path: Path) -> None:
    """A header of odd length puts every tensor off its boundary; older writers made such files."""
    import json
    import struct

    values = {"a": torch.randn(1000), "b": torch.randn(333).double(), "c": torch.arange(5, dtype=torch.int16)}
    header: dict[str, Any] = {}
    end = 0
    for name, code in (("a", "F32"), ("b", "F64"), ("c", "I16")):
        header[name] = {
            "dtype": code,
            "shape": list(values[name].shape),
            "data_offsets": [end, end + values[name].nbytes],
        }
        end += values[name].nbytes
    text = json.dumps(header).encode()
    text += b" " * ((3 - len(text)) % 8)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bytes(bytes_of(v)) for v in values.values()))
    located = locate_tensors(path)
    assert located["a"].offset % 4
    reader = Reader()
    image = from_files("x", located.values(), in_place=True)
    buffer = host_buffer(image.nbytes)
    reader.read(image.pieces, buffer)
    for name, tensor in views_of(image, buffer).items():
        assert torch.equal(tensor, values[name])
    reader.close()


@pytest.mark.parametrize("size", [1, 4095, 4096, MB, 3 * MB + 5])
@pytest.mark.parametrize("offset", [0, 8, 4096, 5000])
def test_chunks_cover_a_piece_exactly(size: int, offset: int) -> None:
    from anytorch.memory.images import Piece

    chunks = list(chunks_of(Piece("f", offset, size, 64), MB))
    assert sum(chunk.nbytes for chunk in chunks) == size
    at, image = offset, 64
    for chunk in chunks:
        assert chunk.file_offset % PAGE == 0 and chunk.read_nbytes <= MB
        assert chunk.file_offset + chunk.lead == at and chunk.image_offset == image
        at, image = at + chunk.nbytes, image + chunk.nbytes


def test_the_host_arena_is_exactly_as_large_as_asked() -> None:
    arena = HostArena(10_000_019, pinned=False)
    whole = torch.arange(10_000_019 // 8, dtype=torch.int64).view(torch.uint8)
    pieces = arena.take(whole.numel()) + arena.take(10_000_019 - whole.numel())
    assert sum(piece.numel() for piece in pieces) == 10_000_019 and len(pieces) > 3
    scatter(whole[:5_000_000], pieces)
    scatter(whole[5_000_000:], pieces, 5_000_000)
    back = torch.zeros_like(whole)
    gather(pieces, back)
    assert torch.equal(back, whole)
    with pytest.raises(AssertionError):
        arena.take(1)


def test_sums_find_every_kind_of_damage() -> None:
    data = torch.randint(0, 256, (3 * MB + 100,), dtype=torch.uint8)
    good = checksums_of(data)
    assert len(good) == 4
    for position in (0, MB - 1, MB, 3 * MB + 99):
        changed = data.clone()
        changed[position] ^= 1
        assert checksums_of(changed) != good
    swapped = torch.cat([data[MB : 2 * MB], data[:MB], data[2 * MB :]])
    assert checksums_of(swapped) != good
    page = 4096  # what a sum of words would not see: pages of one part, and a bit that is set here and cleared there
    assert checksums_of(torch.cat([data[page : 2 * page], data[:page], data[2 * page :]])) != good
    words = data.clone()
    words.view(-1)[:16].view(torch.int64).add_(torch.tensor([1 << 20, -(1 << 20)]))
    assert checksums_of(words) != good
    assert checksums_of(data[1:]) != good and checksums_of(torch.cat([data[:1], data])[1:]) == good


def test_sizes() -> None:
    assert parse_nbytes("8GB") == 8 * 2**30 and parse_nbytes("512 MiB") == 512 * MB and parse_nbytes(77) == 77
    for wrong in ("much", "-1GB", "", True, None, [], 10**400, "1e400GB", float("nan"), float("inf"), "9" * 5000):
        with pytest.raises(UsageError, match="not a size"):
            parse_nbytes(wrong)
    assert words(1.5 * 2**30) == "1.5 GiB" and words(10) == "10 bytes"


def test_leftovers_of_a_spill_are_gone(tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    spill.write({"a": torch.ones(10)})
    spill.close()
    spill.close()
    assert not list(tmp_path.iterdir())


def test_sums_in_place_are_those_of_the_file(tmp_path: Path) -> None:
    """Tensors of odd lengths and padding between them: the sums a writer makes are those a reader finds."""
    torch.manual_seed(3)
    sizes = (1, MB - 64, 63, 2 * MB + 7, 0, 5)
    tensors = {f"t{n}": torch.randint(0, 256, (size,), dtype=torch.uint8) for n, size in enumerate(sizes)}
    spill = Spill(tmp_path)
    stored = spill.write(tensors)
    first = next(iter(stored.values()))
    data = torch.frombuffer(bytearray(Path(first.path).read_bytes()[first.data_start :]), dtype=torch.uint8)
    assert first.checksums == checksums_of(data) and len(data) > 3 * MB
    reader = Reader()
    for name, tensor in reader.read_tensors(stored.values()).items():
        assert torch.equal(tensor, tensors[name])
    reader.close()
    spill.close()
