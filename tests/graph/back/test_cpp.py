"""The back end of C++: what lies in the cache is compared before it is compiled or run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from anytorch.graph.back import cpp as back

TEXT = '#include "lanes.h"\nEXPORT void kernel() {}\n'


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were compiled or, had they been before, whose library was loaded."""
    made: list[str] = []

    def load(name: str, sources: Sequence[Path], **options: Any) -> None:
        made.extend(one.read_text() for one in sources)

    monkeypatch.setattr(back.native, "load", load)
    return made


def test_a_source_in_the_cache_is_compared_before_its_library_is_used(loaded: list[str], tmp_path: Path) -> None:
    library = back._library.__wrapped__  # as in another process: nothing is remembered
    library(TEXT, tmp_path, None)
    (path,) = tmp_path.rglob("kernel.cpp")
    written = path.read_text()
    assert written.endswith(TEXT) and loaded == [written]
    for damaged in (written.replace("{}", "{ __builtin_trap(); }"), "", written[:-5]):
        path.write_text(damaged)
        library(TEXT, tmp_path, None)
        assert loaded[-1] == written and path.read_text() == written


def test_a_source_that_is_right_is_left_alone(loaded: list[str], tmp_path: Path) -> None:
    back._library.__wrapped__(TEXT, tmp_path, None)
    (path,) = tmp_path.rglob("kernel.cpp")
    before = path.stat().st_mtime_ns, path.stat().st_ino
    back._library.__wrapped__(TEXT, tmp_path, None)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before and len(loaded) == 2


def test_texts_that_differ_have_files_of_their_own(loaded: list[str], tmp_path: Path) -> None:
    for text in (TEXT, TEXT + "// other\n"):
        back._library.__wrapped__(text, tmp_path, None)
    assert len(list(tmp_path.rglob("kernel.cpp"))) == 2 and loaded[0] != loaded[1]
