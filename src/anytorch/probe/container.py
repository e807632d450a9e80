"""Detect containers, their kind, and WSL."""

from __future__ import annotations

from collections.abc import Mapping

from anytorch.probe.libraries import find_library
from anytorch.probe.tree import Tree

WSL_LIBRARIES = "/usr/lib/wsl/lib"


def read_container(tree: Tree, env: Mapping[str, str]) -> str | None:
    """ "kubernetes", "docker", "podman", "lxc", "apptainer", …; None outside a container."""
    if env.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if env.get("APPTAINER_CONTAINER") or env.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if tree.exists("/run/.containerenv"):
        return "podman"
    if tree.exists("/.dockerenv"):
        return "docker"
    # systemd's convention (systemd.io/CONTAINER_INTERFACE): the manager says its name in $container.
    named = env.get("container") or tree.word("/run/systemd/container")
    if named:
        return named[:40]
    groups = tree.text("/proc/self/cgroup") or ""
    for mark, kind in (("kubepods", "kubernetes"), ("libpod", "podman"), ("docker", "docker"), ("/lxc", "lxc")):
        if mark in groups:
            return kind
    return None


def read_wsl(tree: Tree) -> bool:
    """Linux below Windows: the paravirtual GPU node, or Microsoft's kernel ("5.15.167.4-microsoft-standard-WSL2")."""
    return tree.exists("/dev/dxg") or "microsoft" in (tree.word("/proc/sys/kernel/osrelease") or "").lower()


def wsl_libraries_first(tree: Tree, env: Mapping[str, str], *, arch: str = "") -> bool | None:
    """Would the loader take libcuda from Windows' driver? None: it would find none at all."""
    found = find_library(tree, env, "libcuda.so.1", arch=arch)
    return None if found is None else found.startswith(WSL_LIBRARIES + "/")
