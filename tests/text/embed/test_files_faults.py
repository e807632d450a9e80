"""`anytorch embed --output` where anything fails at any moment: our error, nothing lost, and the next run goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.faulty_disk import Counter, each, failing, failing_allocations, failing_threads, left_since
from tests.power_loss import recorded

from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import AnytorchError, OutputError
from anytorch.text.embed import files_journal
from anytorch.text.embed.files import FileReport, encode_file
from anytorch.text.embed.files_journal import finished_rows
from anytorch.text.embed.files_read import Chunk, Source
from anytorch.text.embed.files_write import write_vectors

pytest.importorskip("pyarrow.parquet")
import pyarrow as pa

TEXTS = [f"text number {number}" for number in range(7)]
ROWS = 4  # of a part: two of them
Make = Callable[..., Any]
Fault = Callable[[int], AbstractContextManager[Counter]]

FAULTS: dict[str, Callable[[Path], Fault]] = {
    "a full disk": lambda folder: partial(failing, within=folder),
    "a disk that does not read": lambda folder: partial(failing, within=folder, reads=True),
    "one thread refused": lambda _: failing_threads,
    "no more threads": lambda _: partial(failing_threads, on=True),
    "no memory": lambda _: failing_allocations,
}


@pytest.fixture
def job(tmp_path: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], FileReport]]:
    """An empty folder, and what writes `out.parquet` there."""
    monkeypatch.setattr(files_journal, "model_identity", lambda folder: "this model")  # 30 ms, a hundred times
    source, folder = tmp_path / "source.txt", tmp_path / "out"
    source.write_text("".join(f"{text}\n" for text in TEXTS))
    folder.mkdir()
    return folder, partial(encode_file, source, folder / "out.parquet", engine=fake_engine(), chunk_rows=ROWS)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("resumed", [False, True], ids=["begun", "resumed"])
@pytest.mark.parametrize("kind", FAULTS)
def test_whatever_fails_the_next_run_goes_on(
    kind: str, resumed: bool, job: tuple[Path, Callable[[], FileReport]], tmp_path: Path
) -> None:
    folder, run = job
    run()
    whole = (folder / "out.parquet").read_bytes()
    (folder / "out.parquet").unlink()
    if resumed:  # its last part, or the whole, could not be written
        with failing(45, within=folder), pytest.raises(OutputError):
            run()
        assert finished_rows(folder / "out.parquet") == ROWS
    begin, told = shutil.copytree(folder, tmp_path / "begin"), 0
    for attempt in each(FAULTS[kind](folder)):
        shutil.rmtree(folder)
        shutil.copytree(begin, folder)
        kept, before = finished_rows(folder / "out.parquet"), set(threading.enumerate())
        with attempt:
            try:
                run()
            except AnytorchError as exc:
                told += 1
                assert str(folder) in exc.message or "no thread" in exc.message, (str(attempt), exc)
                assert "nothing has been computed" not in exc.message or not kept, "the message denies what is kept"
        assert not left_since(before), f"{attempt} left a thread"
        if not (folder / "out.parquet").exists():
            assert finished_rows(folder / "out.parquet") >= kept, f"{attempt} lost rows"
        assert run().resumed >= kept, str(attempt)
        assert (folder / "out.parquet").read_bytes() == whole, str(attempt)
        assert names(folder) == ["out.parquet"], f"{attempt} left something behind"
    assert told >= {"one thread refused": 1, "no more threads": 1}.get(kind, 5)


def chunks() -> Iterator[Chunk]:
    yield Chunk(0, list(TEXTS), pa.table({"text": list(TEXTS)}))


@pytest.mark.parametrize("ending", ["npy", "jsonl"])
@pytest.mark.parametrize(
    "kind", [kind for kind in FAULTS if "read" not in kind or "thread" in kind]
)  # it reads nothing
def test_a_file_without_a_journal_stays_as_it_was(kind: str, ending: str, tmp_path: Path, fake_engine: Make) -> None:
    engine, folder = fake_engine(), tmp_path / "out"
    folder.mkdir()
    target = folder / f"out.{ending}"
    write_vectors(engine, chunks(), target)
    whole, told = target.read_bytes(), 0
    for attempt in each(FAULTS[kind](folder)):
        target.write_bytes(b"what was there")
        before = set(threading.enumerate())
        with attempt:
            try:
                write_vectors(engine, chunks(), target)
            except Exception as exc:  # noqa: BLE001
                assert isinstance(exc, AnytorchError) or is_out_of_memory(exc), f"{attempt}: {exc!r}"
                told += 1
        assert target.read_bytes() in (whole, b"what was there") and names(folder) == [target.name], str(attempt)
        assert not left_since(before), f"{attempt} left a thread"
    assert told > 0
    assert target.read_bytes() == whole


def test_a_power_loss_at_any_moment(job: tuple[Path, Callable[[], FileReport]]) -> None:
    """Every prefix of what is written, and every order the disk may choose between syncs: the next run ends alike."""
    folder, run = job
    with recorded(folder, partial(finished_rows, folder / "out.parquet")) as recording:
        run()
    whole = (folder / "out.parquet").read_bytes()
    states = recording.states()
    for state in states:
        recording.restore(state)
        moment, finished = str(state), finished_rows(folder / "out.parquet")
        if (folder / "out.parquet").exists():
            assert (folder / "out.parquet").read_bytes() == whole, moment
        else:
            assert finished >= state.done - ROWS, f"more than the last part is lost {moment}"
        report = run()
        assert (folder / "out.parquet").read_bytes() == whole, moment
        assert report.resumed == len(TEXTS) or report.resumed <= finished, moment
        assert names(folder) == ["out.parquet"], moment
    assert len(states) > 50


def test_the_source_that_stops_answering(tmp_path: Path, job: tuple[Path, Callable[[], FileReport]]) -> None:
    """Reads of the texts: an error of ours, and what is finished stays."""
    folder, run = job
    for attempt in each(partial(failing, within=tmp_path / "source.txt", reads=True)):
        with attempt:
            try:
                run()
            except AnytorchError as exc:
                assert "source.txt" in exc.message, str(attempt)
        if attempt.counter.failed:
            run()
        (folder / "out.parquet").unlink()
    assert attempt.at > 2
    assert Source(tmp_path / "source.txt", None).total() == len(TEXTS)
