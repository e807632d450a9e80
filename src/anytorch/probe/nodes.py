"""The device nodes compute needs, whether we may use them, and which group owns them."""

from __future__ import annotations

import os

from anytorch.probe.facts import Node
from anytorch.probe.tree import Tree, whole

WHOLE = (
    "nvidiactl",
    "nvidia-uvm",
    "nvidia-uvm-tools",
    "nvidia-modeset",
    "nvidia-nvswitchctl",
    "kfd",
    "dxg",
    "davinci_manager",
    "hisi_hdc",
    "devmm_svm",
)
NUMBERED = ("nvidia", "davinci")
MOST = 512


def read_nodes(tree: Tree) -> tuple[Node, ...]:
    paths = [f"/dev/{name}" for name in tree.names("/dev") if name in WHOLE or _numbered(name, NUMBERED)]
    paths += [f"/dev/dri/{name}" for name in tree.names("/dev/dri") if _numbered(name, ("renderD",))]
    paths.sort(key=_by_number)
    groups = _groups(tree) if paths else {}
    nodes = []
    for path in paths[:MOST]:
        status = tree.status(path)
        if status is not None:
            gid = status.st_gid
            nodes.append(Node(path, tree.allows(path, os.R_OK), tree.allows(path, os.W_OK), groups.get(gid), gid))
    return tuple(nodes)


def _numbered(name: str, stems: tuple[str, ...]) -> bool:
    return any(name.startswith(stem) and name[len(stem) :].isdecimal() for stem in stems)


def _by_number(path: str) -> tuple[str, int]:
    """nvidia2 before nvidia10."""
    stem = path.rstrip("0123456789")
    return stem, whole(path[len(stem) :]) or 0


def _groups(tree: Tree) -> dict[int, str]:
    """Names of groups, from the tree's own /etc/group (a container's differs from its host's)."""
    found: dict[int, str] = {}
    for line in (tree.text("/etc/group", 1024 * 1024) or "").splitlines():
        fields = line.split(":")
        gid = whole(fields[2]) if len(fields) > 2 else None
        if gid is not None:
            found.setdefault(gid, fields[0][:100])
    return found
