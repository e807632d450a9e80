"""The cache is strict about what it reads, atomic about what it writes, and bounded."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from anytorch.cache import Store
from anytorch.errors import CacheError
from tests.faulty_disk import PowerLoss, failing


def test_what_is_put_is_got(tmp_path: Path) -> None:
    store = Store("numbers", tmp_path)
    assert store.get("a") is None
    store.put("a", {"n": 1})
    assert Store("numbers", tmp_path).get("a") == {"n": 1}


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    store = Store("numbers", tmp_path)
    for number in range(5):
        store.put(str(number), number, keep=3)
    assert list(store.entries()) == ["2", "3", "4"]
    store.put("2", 22, keep=3)
    store.put("5", 5, keep=3)
    assert list(store.entries()) == ["4", "2", "5"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 99, "entries": {}}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_file_is_an_error_and_is_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    store = Store("numbers", tmp_path)
    store.path.write_bytes(content)
    for attempt in (lambda: store.get("a"), lambda: store.put("a", 1)):
        with pytest.raises(CacheError, match="anytorch reset --cache"):
            attempt()
    assert store.path.read_bytes() == content


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError):
        Store("numbers", tmp_path / "file").put("a", 1)


def test_clear(tmp_path: Path) -> None:
    store = Store("numbers", tmp_path)
    assert store.clear() is False
    store.put("a", 1)
    assert store.clear() is True
    assert store.entries() == {}


@pytest.mark.parametrize("power", [False, True], ids=["a full disk", "a power loss"])
def test_whatever_fails_while_writing_the_old_entries_are_left(tmp_path: Path, power: bool) -> None:
    store = Store("some", tmp_path)
    store.put("a", 1)
    at = 0
    while True:
        at += 1
        with failing(at, power=power) as disk, contextlib.suppress(CacheError, PowerLoss):
            store.put("b", at)
        assert store.get("a") == 1
        if not disk.failed:
            break
    assert at > 3 and store.entries() == {"a": 1, "b": at}
