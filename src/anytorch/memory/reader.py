"""Reading blocks from disk at the disk's speed: large direct reads by a few threads, into memory that is already there.

Direct reads (O_DIRECT) go past the page cache: no second copy in RAM, no page faults, and a budget that means something.
Where the file system refuses them, reads are buffered and the cache is told to forget what was read.

What we wrote ourselves is checked: one CRC-32 per MiB, at the speed of memory (`anytorch.native.sums`). It finds every
flipped bit and every pair of them, every zeroed or stale page, pages that changed places and every cut-off file. It is no
defence against deliberate changes.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anytorch import logs
from anytorch.errors import ModelError
from anytorch.memory.buffers import bytes_of, host_buffer
from anytorch.memory.images import Piece, from_files, views_of
from anytorch.memory.sizes import PAGE, round_up
from anytorch.native.sums import crc32_parts
from anytorch.safetensors_files import DIGITS, StoredTensor
from anytorch.workers import Workers

if TYPE_CHECKING:
    import torch

PART = 2**20


def checksums_of(buffer: torch.Tensor) -> tuple[int, ...]:
    """Of a contiguous uint8 tensor on the CPU: the CRC-32 of every MiB, and of the shorter part at its end."""
    assert buffer.is_contiguous() and buffer.element_size() == 1, (buffer.stride(), buffer.dtype)
    return crc32_parts(buffer.data_ptr(), buffer.numel(), PART)


def digits(sums: tuple[int, ...]) -> str:
    return "".join(f"{value:0{DIGITS}x}" for value in sums)


log = logs.logger(__name__)
THREADS = 4  # 4 x 8 MiB in flight reached the disk's rate on every disk we measured
CHUNK = 8 * 2**20
THREAD_NAME = "anytorch-reader"
O_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Chunk:
    """One read. `lead` bytes at its start belong to the page, not to the piece; `nbytes` are wanted after them."""

    piece: Piece
    file_offset: int
    lead: int
    nbytes: int
    image_offset: int  # of the first wanted byte

    @property
    def read_nbytes(self) -> int:
        return round_up(self.lead + self.nbytes, PAGE)


def chunks_of(piece: Piece, size: int = CHUNK) -> Iterator[Chunk]:
    """Page-aligned reads that cover a piece, at most `size` bytes each (a multiple of a MiB)."""
    assert size >= PART, size
    lead = piece.file_offset % PAGE
    at = piece.file_offset - lead
    end = piece.file_offset + piece.nbytes
    image = piece.image_offset
    while at < end:
        stop = min(at + size, end)
        wanted = stop - at - lead
        yield Chunk(piece, at, lead, wanted, image)
        image += wanted
        at, lead = stop, 0


def open_direct(path: str | Path, flags: int, direct: bool = True) -> tuple[int, bool]:
    """Open a file, past the page cache if that is wanted and its file system can; returns its number and whether it is."""
    if direct and O_DIRECT:
        try:
            return os.open(path, flags | O_DIRECT, 0o600), True
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # what a file system without direct reads says
                raise
    return os.open(path, flags, 0o600), False


class File:
    """One open file. Opened once: renaming or losing permission later does not matter, being cut off does, and raises."""

    def __init__(self, path: str, *, direct: bool = True) -> None:
        self.path = path
        try:
            self._fd, self.direct = open_direct(path, os.O_RDONLY, direct)
        except OSError as exc:
            raise ModelError(f"cannot open {path}: {exc.strerror}", hint="check that it is there and readable") from exc
        self._fds = [self._fd]

    def read(self, view: memoryview, offset: int, wanted: int) -> None:
        """Fill `view` from `offset`; the first `wanted` bytes must be there. Raises ModelError when they are not."""
        got = 0
        while got < wanted:
            try:
                count = os.preadv(self._fd, [view[got:]], offset + got)
            except OSError as exc:
                if exc.errno == errno.EINVAL and self.direct:
                    self._fall_back()
                    continue
                raise ModelError(f"reading {self.path} failed at byte {offset + got}: {exc.strerror}") from exc
            got += count
            if count == 0 or (self.direct and got < wanted and got % PAGE):
                raise ModelError(
                    f"{self.path} is cut off: {offset + wanted} bytes were expected, it ends at {offset + got}",
                    hint="write or download the file again",
                )
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, wanted, os.POSIX_FADV_DONTNEED)

    def drop_cache(self) -> None:
        """Let the page cache forget the whole file, as far as it does so."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _fall_back(self) -> None:
        """Some file systems accept the flag and refuse the read."""
        log.info("%s refuses direct reads; reading through the page cache", self.path)
        self._fd = os.open(self.path, os.O_RDONLY)
        self._fds.append(self._fd)
        self.direct = False

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


class Reader:
    """A few reading threads and the files they read. `verify`: compare our own files with their checksums, always."""

    def __init__(self, *, threads: int = THREADS, direct: bool = True, verify: bool = True) -> None:
        self.direct = direct
        self.verify = verify
        self.nbytes_read = 0
        self._files: dict[tuple[str, bool], File] = {}
        self._lock = threading.Lock()
        self._threads = threads
        self._pool = Workers(threads, thread_name_prefix=THREAD_NAME)
        self._closed = False

    def submit(self, work: Callable[[], None]) -> Future[None]:
        return self._pool.submit(work)

    def start(self, pieces: Sequence[Piece], buffer: torch.Tensor) -> list[Future[None]]:
        """Begin to read an image into a page-aligned CPU buffer; the futures are done when it is all there."""
        view = bytes_of(buffer)
        futures = []
        for piece in pieces:
            for chunk in chunks_of(piece, self._shared_out(piece.nbytes)):
                futures.append(self._pool.submit(self._into_place, chunk, buffer, view))
        return futures

    def _shared_out(self, nbytes: int) -> int:
        """The length of a read: a small piece is read by all threads, too, as somebody may be waiting for it."""
        return min(CHUNK, max(PART, round_up(nbytes // self._threads, PART)))

    def read(self, pieces: Sequence[Piece], buffer: torch.Tensor) -> None:
        finish(self.start(pieces, buffer))

    def read_tensors(self, stored: Iterable[StoredTensor]) -> dict[str, torch.Tensor]:
        """These tensors, by name, in host memory that they share."""
        image = from_files("tensors", stored, in_place=True)
        buffer = host_buffer(max(image.nbytes, 1))
        self.read(image.pieces, buffer)
        return views_of(image, buffer)

    def _into_place(self, chunk: Chunk, buffer: torch.Tensor, view: memoryview) -> None:
        begin = chunk.image_offset - chunk.lead
        if chunk.piece.direct:
            self.read_chunk(chunk, view[begin:])
            self.check(chunk, buffer[chunk.image_offset : chunk.image_offset + chunk.nbytes])
        else:  # its place in the image suits its element size, not the page
            file = self.file(chunk.piece.path, direct=False)
            start = chunk.image_offset
            file.read(view[start : start + chunk.nbytes], chunk.file_offset + chunk.lead, chunk.nbytes)
            self._count(chunk.nbytes)

    def through(self, pieces: Sequence[Piece], buffer: torch.Tensor) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Yield every chunk of the pieces with its bytes, checked, in the page-aligned buffer; the next overwrites them."""
        view = bytes_of(buffer)
        for piece in pieces:
            for chunk in chunks_of(piece, buffer.numel()):
                if chunk.read_nbytes <= CHUNK:
                    self.read_chunk(chunk, view)  # another thread would not be faster
                else:
                    starts = range(0, chunk.read_nbytes, CHUNK)
                    finish([self.submit(partial(self.read_chunk, chunk, view, start, CHUNK)) for start in starts])
                wanted = buffer[chunk.lead : chunk.lead + chunk.nbytes]
                self.check(chunk, wanted)
                yield chunk, wanted

    def read_chunk(self, chunk: Chunk, view: memoryview, start: int = 0, length: int | None = None) -> None:
        """Read a chunk, or `length` bytes of it from `start` on, to the same place of `view`, by the calling thread."""
        end = chunk.read_nbytes if length is None else min(start + length, chunk.read_nbytes)
        wanted = min(end, chunk.lead + chunk.nbytes) - start
        self.file(chunk.piece.path, direct=self.direct).read(view[start:end], chunk.file_offset + start, wanted)
        self._count(wanted if start else wanted - chunk.lead)

    def check(self, chunk: Chunk, wanted: torch.Tensor) -> None:
        """Compare with the checksums of a file we wrote ourselves. Raises ModelError."""
        piece = chunk.piece
        if piece.checksums is None or not self.verify:
            return
        first = (chunk.file_offset - piece.file_offset) // PART
        found = checksums_of(wanted)
        if piece.checksums[first : first + len(found)] != found:
            raise ModelError(
                f"{piece.path} is damaged between bytes {chunk.file_offset} and {chunk.file_offset + chunk.nbytes}: "
                "its checksum is not the one it was written with",
                hint="the disk or another program changed it; start again from the original model",
            )

    def file(self, path: str, *, direct: bool) -> File:
        with self._lock:
            key = (path, direct)
            if key not in self._files:
                self._files[key] = File(path, direct=direct)
            return self._files[key]

    def forget(self, path: str) -> None:
        """Close a file that is about to be replaced or removed."""
        with self._lock:
            for direct in (True, False):
                file = self._files.pop((path, direct), None)
                if file is not None:
                    file.close()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes_read += nbytes

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # The garbage collector may call this from a reading thread, which cannot wait for itself.
            ours = threading.current_thread().name.startswith(THREAD_NAME)
            self._pool.shutdown(wait=not ours, cancel_futures=True)
            for file in self._files.values():
                file.close()
            self._files.clear()


def finish(futures: Sequence[Future[None]]) -> None:
    """Wait for all of them, so that no thread writes any more; then raise what the first failed one raised."""
    failure: BaseException | None = None
    for future in futures:
        try:
            future.result()
        except BaseException as exc:  # noqa: BLE001  (raised below, when the memory is quiet)
            failure = failure or exc
    if failure is not None:
        raise failure
