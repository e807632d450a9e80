"""Huawei Ascend NPUs: device nodes, and the versions of driver and CANN toolkit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from anytorch.probe.facts import Ascend, Gpu
from anytorch.probe.tree import Tree

HOME = "/usr/local/Ascend"
# "version=8.3.RC2" in ascend_toolkit_install.info; the driver's version.info writes "Version="
VERSION = r"(?im)^\s*version\s*=\s*\[?([\w.\-]+)"


def read_ascend(tree: Tree, env: Mapping[str, str]) -> Ascend:
    named = env.get("ASCEND_TOOLKIT_HOME") or env.get("ASCEND_HOME_PATH")
    # CANN 8 installs itself below ascend-toolkit, newer ones below cann.
    places = [named] if named else [f"{HOME}/ascend-toolkit/latest", f"{HOME}/cann"]
    toolkit = next((place for place in places if tree.is_folder(place)), None)
    versions = [f"{toolkit}/{machine}-linux/ascend_toolkit_install.info" for machine in ("aarch64", "x86_64")]
    versions += [f"{toolkit}/version.cfg", f"{toolkit}/version.info"]
    return Ascend(
        driver=_version(tree, [f"{HOME}/driver/version.info"]),
        toolkit=_version(tree, versions) if toolkit else None,
        toolkit_path=toolkit,
    )


def _version(tree: Tree, paths: list[str]) -> str | None:
    for path in paths:
        text = tree.text(path)
        match = re.search(VERSION, text) if text else None
        if match:
            return match.group(1)[:100]
    return None


def add_ascend(tree: Tree, gpus: list[Gpu]) -> list[Gpu]:
    """Give each /dev/davinciN to the Nth NPU on the PCI bus; nodes beyond them (no PCI in a sandbox) stand alone."""
    indices = sorted(
        int(n[7:]) for n in tree.names("/dev") if n.startswith("davinci") and n[7:].isdecimal() and len(n) < 11
    )
    places = [i for i, gpu in enumerate(gpus) if gpu.vendor == "huawei"]
    merged = list(gpus)
    for index in indices:
        if index < len(places):
            known = merged[places[index]]
            merged[places[index]] = replace(known, index=index, sources=(*known.sources, "dev"))
        else:
            merged.append(Gpu(vendor="huawei", index=index, sources=("dev",)))
    return merged
