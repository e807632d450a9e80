"""Installed distributions that matter to a device, from the names of their folders; and the torch wheel among them.

importlib.metadata would cost 60 ms; the folder names and entry_points.txt hold all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anytorch.probe.facts import EntryPoint, Packages, TorchWheel
from anytorch.probe.tree import Tree

RELEVANT = {
    *("accelerate", "amdsmi", "anytorch", "bitsandbytes", "intel-extension-for-pytorch", "jax", "numpy"),
    *("nvidia-ml-py", "onednn", "oneccl-bind-pt", "openvino", "pynvml", "pyopencl", "pytorch-triton"),
    *("pytorch-triton-rocm", "pytorch-triton-xpu", "tbb", "torch", "torch-directml", "torch-mlu", "torch-musa"),
    *("torch-npu", "torch-webgpu", "torch-xla", "torchao", "torchaudio", "torchvision", "triton", "triton-rocm"),
    *("triton-windows", "triton-xpu", "wgpu", "xformers"),
}
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


# --- the torch wheel that would be imported, read as text: importing torch takes two seconds, or fails ----------------

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
