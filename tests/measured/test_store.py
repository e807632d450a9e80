"""The one store: found again by the same question alone, whole under concurrency, tolerant of damage, bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anytorch
from anytorch import settings
from anytorch.measured import machine, store, verdict
from anytorch.measured.store import recall, remember, verdicts
from anytorch.measured.verdict import NO_MEMORY, NO_TIME, Question, Trial, Verdict
from anytorch.probe import snapshot
from anytorch.probe.facts import Gpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    verdict._this_machine.cache_clear()
    yield
    verdict._this_machine.cache_clear()


def question(**facts: Any) -> Question:
    return Question.of("kind", "a case", "cpu", **{"shape": "1x2", **facts})


def answer(asked: Question, *more: Trial, budget_s: float = 3.0) -> Verdict:
    trials = (Trial("a", 0.002, 0.0001, 5, 1e-7, facts={"nbytes": 4}), Trial("b", 0.001, repeats=5), *more)
    return Verdict(asked, trials, "b", "1 ms; next is a, 2 ms", budget_s)


def new_process() -> None:
    store.forget()


def test_a_verdict_is_found_again_in_another_process() -> None:
    assert recall(question()) is None
    kept = remember(answer(question()))
    assert not kept.remembered
    new_process()
    found = recall(question())
    assert found == replace(kept, remembered=True) and found.explain().endswith("b  1 ms  ← chosen")
    assert recall(question(), names=["a", "b"]) is not None and recall(question(), names=["a"]) is None
    assert list(verdicts()) == [found]


def test_another_shape_device_kind_version_machine_or_driver_is_another_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keys() -> str:
        verdict._this_machine.cache_clear()
        return question().key

    first = keys()
    assert first == keys() and len(first) == 32
    others = {question(shape="2x2").key, Question.of("kind", "a case", "webgpu:0", shape="1x2").key}
    others.add(Question.of("other", "a case", "cpu", shape="1x2").key)
    assert Question.of("kind", "other words", "cpu", shape="1x2").key == first, "words are for people"
    here = snapshot()
    gpu = Gpu(vendor="nvidia", name="Card", uuid="GPU-1", driver="580.1")
    for hardware in (
        replace(here, gpus=(gpu,)),
        replace(here, gpus=(replace(gpu, uuid="GPU-2"),)),
        replace(here, gpus=(replace(gpu, driver="580.2"),)),
        replace(here, cpu=replace(here.cpu, logical=here.cpu.logical + 1)),
    ):
        monkeypatch.setattr(machine, "snapshot", lambda hardware=hardware: hardware)
        others.add(keys())
    monkeypatch.setattr(machine, "snapshot", lambda: here)
    monkeypatch.setattr(verdict, "__version__", "99")
    others.add(keys())
    assert len(others) == 8 and first not in others


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"format": 99}',
        b'{"format": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
        lambda body: json.dumps({**body, "trials": [{"nonsense": 1}]}).encode(),
        lambda body: json.dumps({**body, "trials": [{"name": "a", "seconds": "fast"}]}).encode(),
        lambda body: json.dumps({**body, "chosen": ["b"]}).encode(),
        lambda body: json.dumps({**body, "most_error": "little"}).encode(),
        lambda body: json.dumps({**body, "question": {**body["question"], "facts": {"another": 1}}}).encode(),
        # Kinds that only whoever shows the verdict would stumble over.
        lambda body: json.dumps({**body, "question": {**body["question"], "title": None}}).encode(),
        lambda body: json.dumps({**body, "why": 0}).encode(),
        lambda body: json.dumps({**body, "budget_s": 10**400}).encode(),
        lambda body: json.dumps({**body, "trials": [{"name": ["a"]}]}).encode(),
        lambda body: json.dumps({**body, "trials": [{"name": "a", "refused": None}]}).encode(),
        lambda body: json.dumps({**body, "trials": [{"name": "a", "seconds": 10**320}]}).encode(),
    ],
)
def test_a_damaged_file_is_measured_again(damage: Any) -> None:
    kept = remember(answer(question()))
    (path,) = store.folder().glob("*.json")
    path.write_bytes(damage(kept.as_json()) if callable(damage) else damage)
    new_process()
    assert recall(question()) is None
    remember(kept)
    new_process()
    assert recall(question()) is not None and len(list(verdicts())) == 1


def test_other_files_are_not_harmed_by_a_damaged_one() -> None:
    remember(answer(question()))
    (store.folder() / "odd.json").write_text("{")
    assert [found.chosen for found in verdicts()] == ["b"]


def test_an_accident_of_this_moment_is_kept_for_this_process_alone() -> None:
    remember(answer(question(), Trial("c", refused=NO_MEMORY, passing=True)))
    assert recall(question()) is not None
    new_process()
    assert recall(question()) is None


def test_what_ran_out_of_time_holds_for_who_has_no_more() -> None:
    remember(answer(question(), Trial("c", refused=NO_TIME), budget_s=3.0))
    new_process()
    assert recall(question(), budget_s=3.0) is not None and recall(question(), budget_s=0.5) is not None
    assert recall(question(), budget_s=10.0) is None, "with more time it is measured again"
    with anytorch.use(measure_s=10.0):
        assert recall(question()) is None


def test_nothing_chosen_is_nothing_known() -> None:
    remember(replace(answer(question()), chosen=""))
    new_process()
    assert recall(question()) is None


def test_the_number_of_files_and_of_what_is_kept_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST", 8)
    store.forget()
    for number in range(20):
        asked = question(number=number)
        remember(answer(asked))
        os.utime(store.folder() / f"{asked.key}.json", (number, number))
    assert len(list(store.folder().iterdir())) <= 8 and len(store._seen) <= 8
    new_process()
    assert recall(question(number=19)) is not None and recall(question(number=0)) is None


def test_a_folder_that_cannot_be_written_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path / "file"))
    remember(answer(question()))
    assert "cannot be stored" in caplog.text and recall(question()) is not None, "this process knows it all the same"
    assert list(verdicts()) == []


def test_everything_can_be_forgotten() -> None:
    assert store.clear() is None
    remember(answer(question()))
    assert store.clear() == store.folder() and not store.folder().exists()
    assert recall(question()) is None


WRITER = """
import sys
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question, Trial, Verdict
for number in range(40):
    for name, facts in ((sys.argv[1], {"own": sys.argv[1]}), ("shared", {})):
        asked = Question("kind", name, "cpu", {"number": number, **facts})
        trials = tuple(Trial(f"{sys.argv[1]} {i}" * 20, 0.001 * i) for i in range(1, 30))
        remember(Verdict(asked, trials, trials[0].name, "why"))
"""


def test_processes_that_write_at_once_lose_nothing_and_break_nothing() -> None:
    environment = {**os.environ, "ANYTORCH_CACHE_DIR": str(settings.cache_folder())}
    running = [subprocess.Popen([sys.executable, "-c", WRITER, name], env=environment) for name in "abcd"]
    while any(one.poll() is None for one in running):
        for found in verdicts():  # a reader sees whole files only
            assert len(found.trials) == 29
    assert [one.returncode for one in running] == [0] * 4
    files = list(store.folder().iterdir())
    assert len(files) == 4 * 40 + 40 and all(path.suffix == ".json" for path in files)
    assert len(list(verdicts())) == len(files)


def test_single_verdicts_are_dropped_here_and_on_disk() -> None:
    kept, gone = remember(answer(question())), remember(answer(question(shape="3x4")))
    assert store.stored(kept.question.key) == replace(kept, remembered=True)
    assert store.stored("../config") is None and store.stored("0" * 32) is None
    assert store.drop([gone.question.key, "0" * 32]) == 1
    assert recall(gone.question) is None and recall(kept.question) is not None
    new_process()
    assert recall(gone.question) is None and [one.question.key for one in verdicts()] == [kept.question.key]
