"""Caches and settings where anything fails at any moment, or the power goes: the old entry or the new, never a third."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anytorch import native, settings
from anytorch.cache import Store
from anytorch.errors import AnytorchError, CacheError, ConfigError
from anytorch.graph import records
from anytorch.measured import store
from anytorch.measured.verdict import Question, Trial, Verdict
from anytorch.native import library, trust
from tests.faulty_disk import each, failing, failing_threads
from tests.graph import made
from tests.power_loss import REAL_OPEN, recorded


@dataclass
class Job:
    """`put(n)` stores n in place of what was there; `get()` is what a new process finds, None for nothing."""

    folder: Path
    put: Callable[[int], None]
    get: Callable[[], int | None]
    told: type[AnytorchError] | None  # the error; None where the work goes on without a cache


def job_of(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> Job:
    folder.mkdir()
    if kind == "cache":
        return Job(
            folder, lambda n: Store("some", folder).put("a", n), lambda: Store("some", folder).get("a"), CacheError
        )
    if kind == "settings":
        path = folder / "config.toml"
        return Job(
            folder,
            lambda n: void(settings.write_settings_file({"settings": {"threads": n}}, path)),
            lambda: settings.read_settings_file(path).get("settings", {}).get("threads"),
            ConfigError,
        )
    if kind == "measured":
        patch.setattr(store, "folder", lambda: folder)
        asked = Question.of("kind", "a case", "cpu", shape="1x2")

        def found() -> int | None:
            store.forget()
            kept = store.recall(asked)
            return None if kept is None else int(kept.chosen)

        trials = tuple(Trial(str(n), 0.001, repeats=5) for n in range(3))
        return Job(folder, lambda n: void(store.remember(Verdict(asked, trials, str(n), "it is", 3.0))), found, None)
    return records_job(folder, patch) if kind == "graph records" else library_job(folder, patch)


def records_job(folder: Path, patch: pytest.MonkeyPatch) -> Job:
    """Records of one search, told apart by their day."""
    patch.setattr(records, "folder", lambda: folder)

    def put(number: int) -> None:
        verdict = made.record(eager=True, when=f"2026-11-0{number}T07:00:00Z").verdict
        found = SimpleNamespace(program=None, verdict=verdict, kernels=())
        search: Any = SimpleNamespace(graph=made.graph(), known={"b": 4}, run=lambda: found)
        assert records.searched(search) is found, "the work is there, whatever happened to its record"

    def get() -> int | None:
        return next((int(one.verdict.when[8:10]) for one in records.records()), None)

    return Job(folder, put, get, None)


def void(_: object) -> None:
    return None


def content(path: Path) -> bytes:
    """What the test itself reads, whatever fails."""
    with REAL_OPEN(path, "rb") as file:
        return file.read()


def library_job(folder: Path, patch: pytest.MonkeyPatch) -> Job:
    """A library of which the compiler makes the next number; a damaged one is built again."""
    patch.setenv("ANYTORCH_CACHE_DIR", str(folder))
    source = folder.with_name("source.cpp")
    source.write_text("// a source\n")
    now = {"number": 0}

    def compile_library(_: Any, sources: Any, flags: Any, target: Path) -> None:
        target.write_bytes(json.dumps(now["number"]).encode() * 100)

    def new_process() -> None:
        trust._whole.clear()
        for private in library._private.values():
            private.cleanup()
        library._private.clear()

    def put(number: int) -> None:
        now["number"] = number
        new_process()
        built = native.build("number", [source])
        assert content(built) == str(number).encode() * 100, "not the library that was asked for"

    def get() -> int | None:
        new_process()
        found = [path for path in (folder / library.FOLDER).glob(f"*{library.SUFFIX}") if not trust.refusal(path)]
        return int(content(found[0])[:1]) if found else None

    patch.setattr(library, "compile_library", compile_library)
    return Job(folder, put, get, None)


KINDS = ["cache", "settings", "measured", "graph records", "library"]


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    yield job_of(request.param, tmp_path / "folder", monkeypatch)
    store.forget()
    trust._whole.clear()
    library._private.clear()


def forget(job: Job) -> None:
    """A library is named by its source, so that another one is built only where there is none."""
    if (job.folder / library.FOLDER).exists():
        shutil.rmtree(job.folder / library.FOLDER)


@pytest.mark.parametrize(
    ("job", "reads"), [*((kind, False) for kind in KINDS), ("cache", True), ("library", True)], indirect=["job"]
)  # the others do not read where they write
def test_whatever_fails_the_old_or_the_new_is_there(job: Job, reads: bool) -> None:
    told = 0
    for attempt in each(partial(failing, within=job.folder, reads=reads)):
        forget(job)
        job.put(1)
        assert job.get() == 1
        forget(job)
        before = job.get()
        try:
            with attempt:
                job.put(2)
        except AnytorchError as exc:
            assert job.told is not None and isinstance(exc, job.told), f"{attempt}: {exc!r}"
            told += 1
        assert job.get() in (before, 2), f"{attempt}: the old one is lost"
        job.put(2)
        assert job.get() == 2, str(attempt)
        left = [path.name for path in job.folder.rglob(".*")]
        assert not left, f"{attempt} left {left}"
    assert job.get() == 2
    assert attempt.at > (1 if reads else 4)
    assert reads or told > 2 or job.told is None


@pytest.mark.parametrize("job", KINDS, indirect=True)
def test_a_disk_that_does_not_read_is_told_or_done_without(job: Job) -> None:
    job.put(1)
    for attempt in each(partial(failing, within=job.folder, reads=True)):
        try:
            with attempt:
                found = job.get()
        except AnytorchError as exc:
            assert job.told is not None and isinstance(exc, job.told), f"{attempt}: {exc!r}"
        else:
            assert found in (1, None), str(attempt)
        assert job.get() == 1, f"{attempt}: it is lost"


@pytest.mark.parametrize("job", KINDS, indirect=True)
def test_a_power_loss_at_any_moment(job: Job) -> None:
    job.put(1)
    forget(job)
    before = job.get()
    with recorded(job.folder) as recording:
        job.put(2)
    for state in recording.states():
        recording.restore(state)
        assert job.get() in (before, 2), str(state)
        job.put(2)
        assert job.get() == 2, str(state)
    assert len(recording.states()) > 4


def test_no_thread_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with failing_threads(1, on=True) as counter:
        for kind in KINDS:
            job = job_of(kind, tmp_path / kind, monkeypatch)
            job.put(1)
            assert job.get() == 1
    assert counter.calls == 0
