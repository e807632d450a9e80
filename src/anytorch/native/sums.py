"""CRC-32 of what we write and read back: zlib's sum, computed by our C++ at the speed of memory where it can be built.

A CRC finds every flipped bit, every pair of them and every burst of up to 32 bits in a part, pages that changed places, and
all but one in 2**32 of whatever else happens to a file. It is no defence against deliberate changes.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from anytorch import logs
from anytorch.errors import NativeUnavailable
from anytorch.native.library import load

Buffer = bytes | bytearray | memoryview
log = logs.logger(__name__)
SOURCE = Path(__file__).parent / "code" / "crc32.cpp"
SMALL = 2**20  # bytes for which zlib is as good, and nothing has to be compiled
READ = 8 * 2**20


def crc32(data: Buffer, value: int = 0) -> int:
    """The CRC-32 of some bytes, continued from `value`: the same as zlib.crc32."""
    view = memoryview(data).cast("B")
    library = _library() if view.nbytes > SMALL else None
    if library is None or (view.readonly and not isinstance(data, bytes)):
        return zlib.crc32(view, value)
    # ctypes takes the address of bytes, and of what can be written to.
    address = data if isinstance(data, bytes) else ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(library.crc32_of(value, address, view.nbytes))


def crc32_at(address: int, nbytes: int, value: int = 0) -> int:
    """The same of the memory at an address, which must stay while this looks at it."""
    library = _library() if nbytes > SMALL // 4 else None
    if library is None:
        return zlib.crc32(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"), value)
    return int(library.crc32_of(value, address, nbytes))


def crc32_parts(address: int, nbytes: int, part: int) -> tuple[int, ...]:
    """The CRC-32 of every `part` bytes of the memory at `address`; the last part may be shorter."""
    count = -(-nbytes // part)
    library = _library() if nbytes > SMALL else None
    if library is None:
        view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        return tuple(zlib.crc32(view[at : at + part]) for at in range(0, nbytes, part))
    sums = (ctypes.c_uint32 * count)()
    library.crc32_parts(address, nbytes, part, sums)
    return tuple(sums)


def file_crc32(path: Path) -> tuple[int, int]:
    """The bytes of a file and their CRC-32. Raises OSError."""
    value, nbytes = 0, 0
    buffer = bytearray(READ)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            value = crc32(view[:count], value)
            nbytes += count
    return nbytes, value


class SummedFile:
    """A file to write to, which adds up what is written: `nbytes` and `crc32`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes, self.crc32 = 0, 0

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.crc32 = crc32(view, self.crc32)
        self.nbytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


_once = threading.Lock()


def _library() -> Any:
    with _once:  # reading threads ask for it all at once
        return _loaded()


@lru_cache(maxsize=1)
def _loaded() -> Any:
    try:
        library = load("crc32", [SOURCE], level="baseline")
    except (NativeUnavailable, OSError) as exc:  # OSError: there is neither a cache nor a temporary folder to build in
        log.info("checksums are computed by zlib: %s", exc)
        return None
    if not library.crc32_is_fast():
        return None
    library.crc32_of.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64]
    library.crc32_of.restype = ctypes.c_uint32
    library.crc32_parts.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library.crc32_parts.restype = None
    return library
