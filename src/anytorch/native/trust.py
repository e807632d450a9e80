"""Decide whether a cached library may be loaded: only as it was built, and only if no other user could have put it there.

Loading runs the file's code, and a damaged one ends the process (SIGBUS, SIGSEGV) at every start. So the hash that a library
was built with lies beside it and is compared before loading; and the library, its hash and their folder must belong to this
user or to root, and must not be writable by others than root's group and this user's own groups. (Kubernetes' fsGroup lets
the group write at each mount, and OpenShift's images are root:root 0775.)

A file system may have its own idea of who we are (NFS with all_squash, CIFS with uid=): there, whoever owns a file that we
just made is us. One whose modes cannot be changed at all (drvfs, all 0777) needs the setting `trust_cache`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from anytorch import logs, settings
from anytorch.files import replace_file

log = logs.logger(__name__)

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
HASH = ".sha256"
NO_HASH = "it has no hash to compare it with"  # an earlier version's, or its builder was killed
PRIVATE = 0o755  # of a library: written by its owner alone, whatever the umask
_whole: dict[Path, tuple[int, int]] = {}  # libraries that were compared by this process, by inode and time of change


def seal(library: Path) -> None:
    """Store the hash of a library that was just built, beside it."""
    replace_file(hash_of(library), _digest(library).encode())
    set_mode(hash_of(library), PRIVATE & 0o666)


def set_mode(path: Path, mode: int) -> None:
    """Change a mode where the file system lets us; where it does not, the modes that it shows decide (`refusal`)."""
    try:
        path.chmod(mode)
    except OSError as exc:
        log.info("the mode of %s cannot be changed: %s", path, exc.strerror)


def hash_of(library: Path) -> Path:
    return library.with_name(library.name + HASH)


def refusal(library: Path) -> str:
    """Why a library must not be loaded, in words; "" if it may. Costs a hash (a few ms at most) once in a process."""
    try:
        for path in (library, hash_of(library)):
            if why := _not_ours(path.stat(), "it", library.parent):
                return why
        if why := _not_ours(library.parent.stat(), "its folder", library.parent):
            return why
        status = library.stat()
        if _whole.get(library) == (status.st_ino, status.st_mtime_ns):
            return ""
        if hash_of(library).read_text(errors="replace").strip() != _digest(library):
            return "it was changed after it was built"
    except FileNotFoundError:
        return NO_HASH
    except OSError as exc:
        return f"it cannot be read: {exc.strerror}"
    _whole[library] = (status.st_ino, status.st_mtime_ns)
    return ""


def own_folder(cache: Path, name: str) -> Path:
    """The folder of the cache to build in: `name`, or this user's own if that belongs to another user or cannot be written.

    One of ours that others may write to is closed to them: with a umask of 002 it was made so. Raises OSError.
    """
    folder = cache / name
    for last in (False, True):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = folder.stat()
        if hasattr(os, "geteuid") and status.st_uid == os.geteuid() and status.st_mode & OTHERS_WRITE:
            set_mode(folder, stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
        why = _not_ours(folder.stat(), "it", folder)
        if not why and os.access(folder, os.W_OK | os.X_OK):
            return folder
        why = why or "it cannot be written"  # root's, of an image that root warmed
        if last:
            raise PermissionError(1, f"{folder} cannot be used: {why}")
        log.info("%s is not used for native code: %s", folder, why)
        folder = cache / f"{name}-{os.geteuid()}"
    raise AssertionError


def _not_ours(status: os.stat_result, what: str, folder: Path) -> str:
    """Why another user could have written a file of this status, in words; "" if none could. It is in, or is, `folder`."""
    if not hasattr(os, "geteuid"):  # Windows: what is in a user's folders is the user's
        return ""
    if settings.get("trust_cache"):
        return ""
    if status.st_uid not in (0, os.geteuid()) and status.st_uid != _owner_of_new(folder):
        return f"{what} belongs to another user"
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return ""
    others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid not in _groups())
    return f"{what} can be written by others (ANYTORCH_TRUST_CACHE=1 loads it anyway)" if others else ""


def _owner_of_new(folder: Path) -> int | None:
    """Who owns a file that this process makes in a folder; None if it cannot make one."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError as exc:
        log.debug("no file can be made in %s: %s", folder, exc)
        return None


def _groups() -> set[int]:
    """The groups whose members may put a library there: root's, and this process's own."""
    return {0, os.getegid(), *os.getgroups()}


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()
