"""Write files atomically: a reader never sees half of one. Read JSON from files that may be damaged."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

_numbers = count()
# A file is not there (any more), or something else is. Any other OSError says nothing about what is on the disk.
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# What a file system says that does not sync folders, or does not open them: vboxsf, old 9p, WSL 1, some network mounts.
NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES, errno.EISDIR})


@contextmanager
def replacing(path: Path, *, private: bool = False, through_links: bool = False) -> Iterator[BinaryIO]:
    """A file to write to, which becomes `path` when the block ends: a reader, a crash or Ctrl-C sees the old one or the new.

    It may be read by whom the umask lets, as any other file, or keeps the mode of the one it replaces; `private`: by its
    owner alone. A link is replaced by the file, because others may share what it leads to (the blobs of a model cache);
    with `through_links` it stays a link, and the file it leads to is replaced.
    """
    if through_links:
        path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = _new_beside(path, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            if not private and path.exists():
                temporary.chmod(path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _new_beside(path: Path, mode: int) -> tuple[int, Path]:
    """What tempfile.mkstemp does, with a mode; and without the 5 ms of its import."""
    while True:
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}")
        try:
            return os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode
            ), temporary
        except FileExistsError:  # left behind by a process that was killed and had this number
            continue


def replace_file(path: Path, data: bytes, *, private: bool = False, through_links: bool = False) -> None:
    """Write `data` to `path` atomically (see `replacing`)."""
    with replacing(path, private=private, through_links=through_links) as file:
        file.write(data)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk: only then may what they replace be removed.

    Where the file system cannot do that for folders, the files are safe and their names are as safe as they get.
    """
    if os.name == "nt":  # a folder cannot be opened there, and names are journalled
        return
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as exc:
        if exc.errno not in NO_FOLDER_SYNC:
            raise


def parse_json(data: bytes | str) -> Any:
    """What a JSON text holds. Raises ValueError for every text that is not JSON, however deep or long its parts are."""
    try:
        return json.loads(data)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
