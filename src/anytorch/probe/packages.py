"""Installed distributions that matter to a device, from the names of their folders.

importlib.metadata would cost 60 ms; the folder names and entry_points.txt hold all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anytorch.probe.facts import EntryPoint, Packages
from anytorch.probe.tree import Tree

RELEVANT = frozenset(
    (
        "accelerate",
        "amdsmi",
        "anytorch",
        "bitsandbytes",
        "intel-extension-for-pytorch",
        "jax",
        "numpy",
        "nvidia-ml-py",
        "onednn",
        "oneccl-bind-pt",
        "openvino",
        "pynvml",
        "pyopencl",
        "pytorch-triton",
        "pytorch-triton-rocm",
        "pytorch-triton-xpu",
        "tbb",
        "torch",
        "torch-directml",
        "torch-mlu",
        "torch-musa",
        "torch-npu",
        "torch-webgpu",
        "torch-xla",
        "torchao",
        "torchaudio",
        "torchvision",
        "triton",
        "triton-rocm",
        "triton-windows",
        "triton-xpu",
        "wgpu",
        "xformers",
    )
)
GROUPS = ("torch.backends", "anytorch.backends")
MOST_ENTRY_POINTS = 200


def normalise(name: str) -> str:
    """A distribution's name as PyPI compares it: "Torch_NPU" is "torch-npu"."""
    name = name.replace("_", "-").replace(".", "-").lower()
    while "--" in name:
        name = name.replace("--", "-")
    return name


def read_packages(tree: Tree, sys_path: Sequence[str]) -> Packages:
    """Along `sys_path` the first distribution of a name wins, as it does for an import."""
    versions: dict[str, str] = {}
    entry_points: list[EntryPoint] = []
    seen: set[str] = set()
    for entry in dict.fromkeys(path.rstrip("/") or "." for path in sys_path):
        for folder in tree.names(entry):
            stem, dot, kind = folder.rpartition(".")
            if not dot or kind not in ("dist-info", "egg-info"):
                continue
            name, _, version = stem.partition("-")
            if kind == "egg-info":
                version = version.partition("-")[0]  # "name-1.0-py3.11.egg-info"
            name = normalise(name)
            if name in seen:
                continue
            seen.add(name)
            if name in RELEVANT:
                versions[name] = version or _egg_version(tree, f"{entry}/{folder}") or "unknown"
            text = tree.text(f"{entry}/{folder}/entry_points.txt", 256 * 1024)
            if text and ".backends" in text:
                entry_points += _entry_points(text, name)
    return Packages(dict(sorted(versions.items())), tuple(entry_points[:MOST_ENTRY_POINTS]))


def _egg_version(tree: Tree, folder: str) -> str | None:
    for line in (tree.text(f"{folder}/PKG-INFO") or "").splitlines():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()[:100] or None
    return None


def _entry_points(text: str, distribution: str) -> Iterator[EntryPoint]:
    group = ""
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group in GROUPS and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            # "torch_npu:_autoload [extra]": what stands in brackets are extras, which nothing uses any more
            yield EntryPoint(group, name.strip(), value.partition("[")[0].strip(), distribution)
