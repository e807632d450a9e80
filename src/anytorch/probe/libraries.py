"""Where the dynamic loader would find a library, without loading it.

`ctypes.util.find_library` starts ldconfig and gcc; this reads the same cache the loader reads.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from anytorch.probe.tree import LARGE, Tree

LINUX_FOLDERS = (
    "/lib/{triplet}",
    "/usr/lib/{triplet}",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
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
