from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from anytorch import large_pages

LARGE = large_pages.NBYTES


def _asked(monkeypatch: pytest.MonkeyPatch, address: int, nbytes: int) -> list[tuple[int, int]]:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(large_pages, "_madvise", lambda: lambda first, count, _advice: asked.append((first, count)))
    large_pages.ask(address, nbytes)
    return asked


@pytest.mark.parametrize(
    ("address", "nbytes", "wanted"),
    [
        (4 * LARGE, 3 * LARGE, [(4 * LARGE, 3 * LARGE)]),
        (
            4 * LARGE + 64,
            3 * LARGE,
            [(5 * LARGE, 2 * LARGE)],
        ),  # a large page in part would take more than was asked for
        (4 * LARGE - 64, LARGE + 64, [(4 * LARGE, LARGE)]),
        (4 * LARGE + 64, 2 * LARGE - 65, []),
        (4 * LARGE, LARGE - 1, []),
        (0, 0, []),
    ],
)
def test_whole_pages_are_asked_for(
    address: int, nbytes: int, wanted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _asked(monkeypatch, address, nbytes) == wanted


def test_systems_without_advice_do_with_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_madvise", lambda: None)
    large_pages.ask(4 * LARGE, 3 * LARGE)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's advice")
def test_the_system_takes_the_advice() -> None:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[never]" in switch.read_text():
        pytest.skip("this kernel gives no large pages")
    import ctypes

    with mmap.mmap(-1, 4 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        first = ctypes.addressof(here := ctypes.c_char.from_buffer(memory))
        large_pages.ask(first, 4 * LARGE)
        begin, flags = 0, ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in (span := line.split(" ", 1)[0]) and not line.startswith("VmFlags"):
                begin, end = (int(one, 16) for one in span.split("-"))
                inside = begin <= first + 2 * LARGE < end
            elif line.startswith("VmFlags") and inside:
                flags = line
        del here
    assert " hg" in flags, flags
