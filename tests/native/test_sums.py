"""Our CRC-32 is zlib's for every length and start, and finds what an added-up sum does not."""

from __future__ import annotations

import ctypes
import random
import subprocess
import zlib
from pathlib import Path

import pytest

from anytorch.errors import CompilerMissing
from anytorch.native import sums
from anytorch.native.compiler import find_compiler

PAGE = 4096


@pytest.fixture
def library() -> object:
    found = sums._library()
    if found is None:
        pytest.skip("no fast CRC-32 here")
    return found


def test_it_is_zlibs_sum(library: object) -> None:
    data = bytearray(random.Random(0).randbytes(3000))
    start = ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))
    for length in (*range(600), 1023, 1024, 1025, 2047, 2999):
        for begin in (0, 1):
            value = length * 2654435761 % 2**32
            found = library.crc32_of(value, start + begin, length)  # type: ignore[attr-defined]
            assert found == zlib.crc32(memoryview(data)[begin : begin + length], value), (begin, length)


def test_large_bytes_of_every_kind(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 * sums.SMALL + 5)
    wanted = zlib.crc32(data)
    assert sums.crc32(data) == sums.crc32(bytearray(data)) == sums.crc32(memoryview(data)) == wanted
    assert sums.crc32(data[sums.SMALL * 2 :], sums.crc32(data[: sums.SMALL * 2])) == wanted
    (tmp_path / "file").write_bytes(data)
    assert sums.file_crc32(tmp_path / "file") == (len(data), wanted)
    with (tmp_path / "other").open("wb") as file:
        summed = sums.SummedFile(file)
        for at in range(0, len(data), 1_000_003):
            summed.write(data[at : at + 1_000_003])
    assert (summed.nbytes, summed.crc32) == (len(data), wanted) and (tmp_path / "other").read_bytes() == data


@pytest.mark.parametrize(
    "error", [CompilerMissing("none"), FileNotFoundError(2, "No usable temporary directory found")]
)
def test_without_a_library_zlib_gives_the_same(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    data = bytearray(random.Random(2).randbytes(2 * sums.SMALL + 77))
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    fast = sums.crc32(data), sums.crc32_parts(address, len(data), 2**16)

    def missing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(sums, "load", missing)
    sums._loaded.cache_clear()
    try:
        assert (sums.crc32(data), sums.crc32_parts(address, len(data), 2**16)) == fast
    finally:
        sums._loaded.cache_clear()
    assert len(fast[1]) == -(-len(data) // 2**16)


def test_what_adding_up_misses() -> None:
    """Pages that change places, and flips that cancel out in a sum of 64-bit words."""
    dice = random.Random(3)
    data = bytearray(dice.randbytes(2**20))
    good = sums.crc32(data)
    for _ in range(50):
        first, second = (PAGE * n for n in dice.sample(range(256), 2))
        changed = bytearray(data)
        changed[first : first + PAGE], changed[second : second + PAGE] = (
            data[second : second + PAGE], data[first : first + PAGE],
        )  # fmt: skip
        assert sums.crc32(changed) != good
        at, other = (8 * n for n in dice.sample(range(2**17), 2))
        for bit in (0, 31, 63):
            paired = bytearray(data)
            for place in (at, other):
                paired[place + bit // 8] ^= 1 << bit % 8
            assert sums.crc32(paired) != good


@pytest.mark.parametrize(
    ("macros", "has", "lacks"),
    [
        ("__x86_64__ __GNUC__=9", "_mm_clmulepi64_si128", "_mm512"),  # GCC 9 has no _mm512_zextsi128_si512
        ("__x86_64__ __GNUC__=10", "_mm512_zextsi128_si512", "crc32x"),
        ("__x86_64__ __GNUC__=4 __clang_major__=8", "_mm512_zextsi128_si512", "crc32x"),
        ("__aarch64__ __linux__", "getauxval(16)", "__crc32d"),
        ("__aarch64__ __linux__", "crc32x %w0, %w0, %x1", "_mm_"),
        ("__aarch64__ __APPLE__ __ARM_FEATURE_CRC32", "__crc32d", "getauxval"),
        ("__aarch64__ _WIN32", "is_fast() { return false; }", "crc32x"),
        ("__riscv", "is_fast() { return false; }", "crc32x"),
    ],
)
def test_what_each_compiler_is_given(tmp_path: Path, macros: str, has: str, lacks: str) -> None:
    """What a compiler cannot compile fails in every process again, and what it is not given is summed by zlib."""
    code = [line for line in sums.SOURCE.read_text().splitlines() if not line.startswith("#include")]
    (tmp_path / "crc32.cpp").write_text("\n".join(code))
    others = ["__x86_64__", "__GNUC__", "__clang_major__", "__aarch64__", "__linux__", "__ARM_FEATURE_CRC32"]
    flags = [*(f"-U{name}" for name in others), "-DAT_HWCAP=16", *(f"-D{macro}" for macro in macros.split())]
    command = [*find_compiler().command, *flags, "-E", str(tmp_path / "crc32.cpp")]
    given = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert has in given and lacks not in given
