"""The fuzz targets hold for what is kept of their corpora; and (slow) for some seconds of new inputs, with sanitizers."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import tests.fuzz.readers  # noqa: F401  (they register themselves)
from anytorch.errors import ModelError
from tests.fuzz import kit, mutate
from tests.fuzz.native import build

ROOT = Path(__file__).parents[2]
SECONDS = "4"  # for each target: what a long run finds becomes a line of the corpus


@pytest.fixture
def unheard() -> Iterator[None]:
    """Readers warn about much of what is damaged, which is not what is looked at here."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", sorted(kit.TARGETS))
def test_what_was_kept_holds(name: str, unheard: None) -> None:
    inputs = kit.kept(name)
    assert inputs, f"tests/fuzz/corpus/{name}.txt has no input"
    found = {kit.place_of(exc): data for data in inputs if (exc := kit.finding(kit.TARGETS[name], data)) is not None}
    assert found == {}


def test_every_corpus_has_its_target() -> None:
    assert {path.stem for path in kit.CORPUS.glob("*.txt")} == {*kit.TARGETS, *build.SETS}


ENTRY = re.compile(r'^(?:EXPORT|API|extern "C" __attribute__\S+) [\w *]*?(\w+)\(', re.MULTILINE)
METHOD = re.compile(r'^    \{("\w+"), reinterpret_cast', re.MULTILINE)  # of the launcher's table


def test_every_native_entry_has_a_target() -> None:
    ours = [build.SOURCE / name for one in build.SETS.values() for name in one.sources]
    for path in sorted(build.SOURCE.rglob("*.cpp")):
        assert path in ours, f"no target of tests/fuzz/native has {path.name}"
    called = "".join(path.read_text(encoding="utf-8") for path in sorted(build.HERE.glob("*.[ch]*")))
    entries = [
        name
        for path in sorted(build.SOURCE.rglob("*.cpp"))
        for pattern in (ENTRY, METHOD)
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(entries) > 50
    assert [name for name in entries if f"{name}(" not in called and f"({name}" not in called] == []


def test_a_finding_is_what_was_not_promised() -> None:
    def refused(data: bytes) -> None:
        raise ModelError("no") if data == b"" else KeyError(data)

    one = kit.Target("made up", refused, errors=(ModelError,))
    assert kit.finding(one, b"") is None
    found = kit.finding(one, b"x")
    assert isinstance(found, KeyError)
    assert kit.place_of(found).startswith("KeyError at test_fuzz.py:refused:")


def test_a_panic_of_rust_is_a_finding() -> None:
    class PanicException(BaseException):  # pyo3's, which is no Exception
        pass

    def panics(data: bytes) -> None:
        raise PanicException("index out of bounds")

    assert isinstance(kit.finding(kit.Target("made up", panics), b""), PanicException)


def test_mutated_json_is_json_and_another() -> None:
    seed = {"a": [1, 2.5, "x", None], "b": {"c": '{"d": [1]}'}}
    data = json.dumps(seed).encode()
    made = [mutate.mutated_json(data, random.Random(number)) for number in range(300)]
    parsed = 0
    for one in made:
        try:
            json.loads(one)
            parsed += 1
        except RecursionError:
            pass  # nested deeper than Python goes, on purpose
    assert parsed >= 280 and len(set(made)) >= 200
    assert json.loads(data) == seed


def test_a_mutated_header_keeps_its_length_right() -> None:
    data = kit.kept("safetensors")[0]
    for number in range(100):
        one = mutate.mutated("tensors", data, 4096, number, (), lambda data, most: data)
        header = one[8 : 8 + int.from_bytes(one[:8], "little")]
        assert header[:1] in (b"{", b"[", b'"') or json.loads(header) is not ...


def test_what_is_kept_is_bounded_and_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "CORPUS", tmp_path)
    (tmp_path / "made.txt").write_text("# a crash of 2026-11-16\nb'first'\n\nb'old'\n", encoding="ascii")
    many = [bytes([number]) * 50 for number in range(256)]
    count = kit.keep("made", many, most=2000)
    found = kit.kept("made")
    assert found[0] == b"first" and b"old" not in found and len(found) == count - 1  # a comment is a line, too
    assert set(found[1:]) <= set(many) and len(found) >= 5 and (tmp_path / "made.txt").stat().st_size < 2300
    kit.keep("made", many, most=2000)
    assert kit.kept("made") == found


def test_a_folder_has_only_the_names_that_are_allowed() -> None:
    folder = kit.scratch.folder(b'{"a.json": {"x": 1}, "../b": "no", "c/d.txt": "text"}', ("a.json", "c/d.txt"))
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "a.json",
        "c/d.txt",
    }
    assert json.loads((folder / "a.json").read_bytes()) == {"x": 1}
    assert [path.name for path in kit.scratch.folder(b"\xff", ("a.json",)).iterdir()] == ["a.json"]


def require_atheris(missing: Callable[[str, str], NoReturn]) -> None:
    if importlib.util.find_spec("atheris") is None:
        missing("atheris", "pip install --group fuzz (Linux, Python 3.11 to 3.13)")


PLANTED = """
#include <thread>

#include "fuzz.h"

static int shared = 0;

int one(const uint8_t* data, size_t size) {
  uint32_t word = 0;
  if (size < 5 || data[0] != 'H') return 0;
  memcpy(&word, data + 1, 4);
  if (word != 0x12345678) return 0;  // found by its comparison, not by chance
#if defined(__SANITIZE_THREAD__)
  std::thread other([] { shared++; });
  shared++;
  other.join();
#else
  Exact<int> few(3);
  volatile int beyond = few[3];
  (void)beyond;
#endif
  return 0;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizers", "told"), [(build.ASAN, b"heap-buffer-overflow"), (build.TSAN, b"ThreadSanitizer: data race")]
)
def test_a_planted_mistake_is_found(
    sanitizers: tuple[str, ...], told: bytes, tmp_path: Path, missing: Callable[[str, str], NoReturn]
) -> None:
    """Coverage and comparisons lead to it, and the sanitizer sees it: else all those runs without a finding say nothing."""
    require_atheris(missing)
    (tmp_path / "planted.cpp").write_text(PLANTED)
    program = build.built(build.Native("planted", (), sanitizers, folder=tmp_path), tmp_path)
    command = [str(program), "-max_len=64", "-max_total_time=120", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=600, env={**os.environ, **build.OPTIONS})
    assert done.returncode != 0 and told in done.stderr, done.stderr[-2000:].decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("group", ["python", "native"])
def test_seconds_of_new_inputs_find_nothing(
    group: str, tmp_path: Path, missing: Callable[[str, str], NoReturn]
) -> None:
    require_atheris(missing)
    command = [sys.executable, "-m", "tests.fuzz.run", group, "--seconds", SECONDS, "--home", str(tmp_path)]
    command += ["--seed", "1"]  # what a run by hand finds is new; this one repeats itself, as far as time allows
    done: Any = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if " executions in " in line]
    assert len(lines) == len(kit.TARGETS if group == "python" else build.SETS)
    assert all(int(line.split()[1]) > 0 for line in lines), done.stdout
