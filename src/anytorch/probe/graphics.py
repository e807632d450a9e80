"""Drivers a GPU path without a vendor toolkit needs: Vulkan, OpenCL and Level Zero, from their files."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping

from anytorch.probe.facts import Graphics, Icd
from anytorch.probe.tree import Tree, find_library

# Names of the loaders and of Intel's Level Zero driver: (Linux, macOS, Windows).
VULKAN = {
    "Linux": ("libvulkan.so.1",),
    "Darwin": ("libvulkan.1.dylib", "libMoltenVK.dylib"),
    "Windows": ("vulkan-1.dll",),
}
OPENCL = {"Linux": ("libOpenCL.so.1",), "Darwin": (), "Windows": ("OpenCL.dll",)}
LEVEL_ZERO = {"Linux": ("libze_loader.so.1",), "Darwin": (), "Windows": ("ze_loader.dll",)}
LEVEL_ZERO_DRIVER = {
    "Linux": ("libze_intel_gpu.so.1", "libze_intel_gpu.so"),
    "Darwin": (),
    "Windows": ("ze_intel_gpu64.dll",),
}
MOST = 100
SOFTWARE = ("lvp_icd", "lavapipe", "swiftshader", "libvulkan_lvp", "vk_swiftshader")


def is_software_icd(icd: Icd) -> bool:
    """True if this Vulkan driver draws on the CPU and must not be taken for a GPU."""
    text = f"{posixpath.basename(icd.path)} {icd.library or ''}".lower()
    return any(mark in text for mark in SOFTWARE)


def read_graphics(tree: Tree, env: Mapping[str, str], *, system: str = "Linux", arch: str = "") -> Graphics:
    def first(names: Mapping[str, tuple[str, ...]]) -> str | None:
        found = (find_library(tree, env, name, system=system, arch=arch) for name in names.get(system, ()))
        return next((path for path in found if path), None)

    return Graphics(
        vulkan_loader=first(VULKAN),
        vulkan_icds=tuple(_vulkan_icds(tree, env, system, arch))[:MOST] if system != "Windows" else (),
        opencl_loader=first(OPENCL),
        opencl_icds=tuple(_opencl_icds(tree, env, system, arch))[:MOST] if system != "Windows" else (),
        level_zero_loader=first(LEVEL_ZERO),
        level_zero_driver=first(LEVEL_ZERO_DRIVER),
    )


def _split(text: str | None) -> list[str]:
    return [part for part in (text or "").split(":") if part]


def vulkan_folders(env: Mapping[str, str], system: str = "Linux") -> list[str]:
    """Where the Vulkan loader looks for driver files, in its order (LoaderDriverInterface.md, "Driver Discovery")."""
    home = env.get("HOME", "")
    bases = [env.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else "")]
    bases += _split(env.get("XDG_CONFIG_DIRS")) or ["/etc/xdg"]
    bases += ["/usr/local/etc", "/etc"]
    bases += [env.get("XDG_DATA_HOME") or (f"{home}/.local/share" if home else "")]
    bases += _split(env.get("XDG_DATA_DIRS")) or ["/usr/local/share", "/usr/share"]
    if system == "Darwin":
        bases.append("/opt/homebrew/share")
    return list(dict.fromkeys(f"{base.rstrip('/')}/vulkan/icd.d" for base in bases if base))


def _manifests(tree: Tree, paths: list[str]) -> Iterator[str]:
    """The driver files that `paths` name; a folder stands for the .json files in it."""
    for path in paths:
        if tree.is_folder(path):
            yield from (f"{path.rstrip('/')}/{name}" for name in tree.names(path) if name.endswith(".json"))
        elif tree.is_file(path):
            yield path


def _vulkan_icds(tree: Tree, env: Mapping[str, str], system: str, arch: str) -> Iterator[Icd]:
    # VK_DRIVER_FILES replaces the search and wins over its older name; VK_ADD_DRIVER_FILES comes before the search.
    forced = env.get("VK_DRIVER_FILES") or env.get("VK_ICD_FILENAMES")
    places = _split(forced) if forced else _split(env.get("VK_ADD_DRIVER_FILES")) + vulkan_folders(env, system)
    for path in dict.fromkeys(_manifests(tree, places)):
        library = _manifest_library(tree, path)
        if library is None:
            yield Icd(path, None, None)
        elif "/" not in library:
            yield Icd(path, library, find_library(tree, env, library, system=system, arch=arch) is not None)
        else:  # relative paths count from the file's own folder
            yield Icd(path, library, tree.is_file(posixpath.normpath(posixpath.join(posixpath.dirname(path), library))))


def _manifest_library(tree: Tree, path: str) -> str | None:
    # These files hold little else, and the json module would cost 12 ms. Paths with JSON escapes do not occur here.
    after = (tree.text(path) or "").partition('"library_path"')[2].lstrip()
    library, quote, _ = after.removeprefix(":").lstrip().removeprefix('"').partition('"')
    if not quote or not library or len(library) > 4096:
        tree.problem(f"{path} names no Vulkan driver library")
        return None
    return library


def _opencl_icds(tree: Tree, env: Mapping[str, str], system: str, arch: str) -> Iterator[Icd]:
    folder = (env.get("OCL_ICD_VENDORS") or env.get("OPENCL_VENDOR_PATH") or "/etc/OpenCL/vendors").rstrip("/")
    files = [f"{folder}/{name}" for name in tree.names(folder) if name.endswith(".icd")]
    for path in files:
        library = ((tree.text(path) or "").strip().splitlines() or [""])[0][:4096] or None
        yield Icd(path, library, None if library is None else _exists(tree, env, library, system, arch))
    for library in _split(env.get("OCL_ICD_FILENAMES")):
        yield Icd("OCL_ICD_FILENAMES", library[:4096], _exists(tree, env, library, system, arch))


def _exists(tree: Tree, env: Mapping[str, str], library: str, system: str, arch: str) -> bool:
    if "/" in library:
        return tree.is_file(library)
    return find_library(tree, env, library, system=system, arch=arch) is not None
