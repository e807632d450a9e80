"""The folder that the workers of one service share, and the removal of folders of killed services.

A service holds a lock on its folder. Its workers inherit the lock, so the system lets go of it when the last of them has
ended, however they ended; no process that has got one of their numbers since can be mistaken for them. A folder that
nobody holds is removed when the next service starts.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from anytorch import logs

log = logs.logger(__name__)

PREFIX = "anytorch-serve-"
YOUNG_S = 60.0  # a folder younger than that may be one whose owner is about to lock it


def make_run_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor of its lock: whoever keeps that open keeps the folder. POSIX alone."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(folder, os.O_RDONLY)
    _lock(descriptor)
    return folder, descriptor


def sweep_run_folders() -> list[Path]:
    """Remove our own folders that no service or worker holds any more; return their paths."""
    swept = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if time.time() - found.st_mtime < YOUNG_S:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as exc:  # somebody else has just removed it
            log.debug("%s is skipped: %s", folder, exc)
            continue
        try:
            if _lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
        finally:
            os.close(descriptor)
    return swept


def _lock(descriptor: int) -> bool:
    """Lock a folder; False if another process has it locked or the file system has no locks."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        log.debug("a run folder is not locked: %s", exc)
        return False
    return True
