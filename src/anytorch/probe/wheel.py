"""The torch wheel this Python would import, read as text: importing torch takes two seconds, or fails."""

from __future__ import annotations

from collections.abc import Sequence

from anytorch.probe.facts import TorchWheel
from anytorch.probe.tree import Tree

NAMES = ("__version__", "cuda", "hip", "xpu")


def read_wheel(tree: Tree, sys_path: Sequence[str]) -> TorchWheel | None:
    """The first torch along `sys_path`; the folders of further ones are its `others`."""
    found: list[tuple[str, str]] = []  # (folder, text)
    seen: set[object] = set()
    for entry in sys_path:
        path = f"{entry or '.'}/torch/version.py".replace("//", "/")
        status = tree.status(path)
        # lib64 is often a link to lib: the same file twice is one install. Windows may give no inode: go by path then.
        identity = (status.st_dev, status.st_ino) if status is not None and status.st_ino else path
        if status is None or identity in seen:
            continue
        seen.add(identity)
        text = tree.text(path)
        if text is not None:
            found.append((path.removesuffix("/version.py"), text))
    if not found:
        return None
    folder, text = found[0]
    values = _assignments(text)
    if "__version__" not in values:
        tree.problem(f"{folder}/version.py does not state a version")
    return TorchWheel(
        version=values.get("__version__") or "unknown",
        path=folder,
        cuda=values.get("cuda") or None,
        hip=values.get("hip") or None,
        xpu=values.get("xpu") or None,
        others=tuple(other for other, _ in found[1:]),
    )


def _assignments(text: str) -> dict[str, str]:
    """The names given a text: lines such as "cuda: Optional[str] = '13.0'"; older wheels write "cuda = '11.8'"."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        left, equals, right = line.partition("=")
        name, value = left.partition(":")[0].rstrip(), right.strip()
        if equals and name in NAMES and len(value) > 2 and value[0] in "'\"" and value[-1] == value[0]:
            values[name] = value[1:-1][:100]
    return values
