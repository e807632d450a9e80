"""Reading a machine's files: every reader goes through a `Tree`, so that a recorded folder can stand in for "/".

Nothing here raises or blocks on bad input. What is missing, too odd or not allowed comes back as None or (); what was
there but could not be read is remembered in `Tree.problems`.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Mapping

KIB = 1024
SMALL = 64 * KIB  # of one sysfs or /proc file
LARGE = 8 * 1024 * KIB  # of /proc/cpuinfo on a large server, of pci.ids
MAX_ENTRIES = 50_000  # of one folder
MAX_PROBLEMS = 50


def clean(text: str) -> str:
    """`text` without lone surrogates, which a file name or variable may hold and JSON in UTF-8 may not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def whole(text: str | None, base: int = 10, *, high: int = 2**64) -> int | None:
    """A whole number from 0 up to `high`, or None. Unlike `int` it never raises and never returns a monster."""
    if text is None or len(text) > 64:
        return None
    try:
        number = int(text.strip(), base)
    except ValueError:
        return None
    return number if 0 <= number <= high else None


def fields(text: str | None, separator: str = ":") -> dict[str, str]:
    """The first value of each "key : value" line; lines without one are left out."""
    found: dict[str, str] = {}
    for line in (text or "").splitlines():
        key, _, value = line.partition(separator)
        if value.strip():
            found.setdefault(key.strip(), value.strip())
    return found


def cpu_list(text: str | None, *, high: int = 65_536) -> frozenset[int]:
    """The kernel's list format: "0-3,8,10-11" is {0, 1, 2, 3, 8, 10, 11}. What makes no sense is left out."""
    numbers: set[int] = set()
    last_seen = -1  # the kernel writes them in rising order; holding it to that bounds the work
    for part in (text or "").strip().split(","):
        first, dash, last = part.partition("-")
        low, top = whole(first, high=high), whole(last, high=high) if dash else whole(first, high=high)
        if low is not None and top is not None and last_seen < low <= top:
            numbers.update(range(low, top + 1))
            last_seen = top
    return frozenset(numbers)


class Tree:
    """The files of one machine below `root`. A link that leads out of a recorded root is treated as absent."""

    def __init__(self, root: str | os.PathLike[str] = "/", access: Callable[[str, int], bool] = os.access) -> None:
        self.root = os.fspath(root)
        self.real = self.root == "/"
        self.problems: list[str] = []
        self._access = access
        self._real_root = "" if self.real else os.path.realpath(self.root)
        self.library_cache: bytes | None = None  # /etc/ld.so.cache, kept by `find_library`

    def problem(self, text: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(clean(text))

    def path(self, name: str) -> str | None:
        """Where the file `name` ("/proc/cpuinfo") really is, or None if that would be outside the root."""
        if "\0" in name:
            return None
        if self.real:
            return name
        inside = os.path.join(self._real_root, os.path.splitdrive(name)[1].lstrip("/\\"))  # noqa: PTH118
        resolved = os.path.realpath(inside)
        return inside if resolved == self._real_root or resolved.startswith(self._real_root + os.sep) else None

    def status(self, name: str) -> os.stat_result | None:
        path = self.path(name)
        if path is None:
            return None
        try:
            return os.stat(path)  # noqa: PTH116
        except (OSError, ValueError):
            return None

    def exists(self, name: str) -> bool:
        return self.status(name) is not None

    def is_file(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISREG(status.st_mode)

    def is_folder(self, name: str) -> bool:
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def allows(self, name: str, mode: int) -> bool:
        """True if this process may read (os.R_OK) or write (os.W_OK) the path."""
        path = self.path(name)
        return path is not None and self._access(path, mode)

    def data(self, name: str, limit: int = SMALL) -> bytes | None:
        """The first `limit` bytes of a regular file. Pipes, sockets and device nodes are never opened."""
        path = self.path(name)
        if path is None:
            return None
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
                return None
            # O_NONBLOCK: should it have become a pipe since, opening it must not wait for a writer.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as exc:
            self.problem(f"cannot read {name}: {exc.strerror}")
            return None
        try:
            pieces = []
            left = limit
            while left > 0 and (piece := os.read(handle, min(left, 256 * KIB))):
                pieces.append(piece)  # files of /proc come in pieces
                left -= len(piece)
            return b"".join(pieces)
        except OSError as exc:
            # Many sysfs attributes answer "no data" or "not supported" by an error; that is their way to say None.
            self.problem(f"cannot read {name}: {exc.strerror}")
            return None
        finally:
            os.close(handle)

    def text(self, name: str, limit: int = SMALL) -> str | None:
        data = self.data(name, limit)
        return None if data is None else data.decode("utf-8", "replace")

    def word(self, name: str) -> str | None:
        """A one-line file without the white space around it; None when it is empty."""
        return (self.text(name) or "").strip("\0 \t\r\n") or None

    def number(self, name: str, base: int = 10) -> int | None:
        return whole(self.text(name), base)

    def names(self, name: str) -> list[str]:
        """The sorted entries of a folder, [] if there is none."""
        path = self.path(name)
        if path is None:
            return []
        found: list[str] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if len(found) >= MAX_ENTRIES:
                        self.problem(f"{name} has more than {MAX_ENTRIES} entries; the rest was left out")
                        break
                    found.append(entry.name)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return []
        except OSError as exc:
            self.problem(f"cannot list {name}: {exc.strerror}")
        return sorted(text for text in found if clean(text) == text)

    def link_name(self, name: str) -> str | None:
        """The last part of what a symbolic link points to: the driver of /sys/bus/pci/devices/…/driver."""
        path = self.path(os.path.dirname(name))  # noqa: PTH120  (the link itself may lead out of a partial recording)
        if path is None:
            return None
        try:
            target = os.readlink(os.path.join(path, os.path.basename(name)))  # noqa: PTH115, PTH118, PTH119
        except (OSError, ValueError):
            return None
        return clean(os.path.basename(target)) or None  # noqa: PTH119


# --- where the dynamic loader would find a library, without loading it ------------------------------------------------

# `ctypes.util.find_library` starts ldconfig and gcc; this reads the same cache the loader reads.

LINUX_FOLDERS = ("/lib/{triplet}", "/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
DARWIN_FOLDERS = ("/usr/local/lib", "/opt/homebrew/lib", "/usr/lib")


def find_library(tree: Tree, env: Mapping[str, str], name: str, *, system: str = "Linux", arch: str = "") -> str | None:
    """The path the loader would take for `name` ("libcuda.so.1"), or None.

    Linux: LD_LIBRARY_PATH, then /etc/ld.so.cache, then the standard folders, as ld.so(8) says.
    """
    if system == "Windows":
        folder = env.get("SystemRoot") or env.get("SYSTEMROOT") or "C:\\Windows"
        path = f"{folder}\\System32\\{name}"
        return path if tree.is_file(path) else None
    variable = "DYLD_LIBRARY_PATH" if system == "Darwin" else "LD_LIBRARY_PATH"
    # In LD_LIBRARY_PATH both ":" and ";" separate; an empty part means the working folder, which we do not search.
    candidates = [posixpath.join(part, name) for part in env.get(variable, "").replace(";", ":").split(":") if part]
    if system == "Darwin":
        candidates += [f"{folder}/{name}" for folder in DARWIN_FOLDERS]
    else:
        candidates += _in_cache(tree, name)
        triplet = f"{arch or 'x86_64'}-linux-gnu"
        candidates += [f"{folder.format(triplet=triplet)}/{name}" for folder in LINUX_FOLDERS]
    return next((path for path in candidates if tree.is_file(path)), None)


def _in_cache(tree: Tree, name: str) -> list[str]:
    """The paths ld.so.cache holds for `name`: its string table is full paths, each ended by a zero byte."""
    if tree.library_cache is None:
        tree.library_cache = tree.data("/etc/ld.so.cache", LARGE) or b""
    cache, wanted = tree.library_cache, b"/" + name.encode("utf-8", "replace") + b"\0"
    found: list[str] = []
    at = cache.find(wanted)
    while at >= 0 and len(found) < 16:
        start = cache.rfind(b"\0", max(0, at - 4096), at) + 1
        path = cache[start : at + len(wanted) - 1]
        if path.startswith(b"/"):
            found.append(path.decode("utf-8", "replace"))
        at = cache.find(wanted, at + 1)
    return found
