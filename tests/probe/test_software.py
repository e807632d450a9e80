"""Containers, device nodes, graphics drivers, the torch wheel and installed packages, from recorded trees."""

from __future__ import annotations

from typing import Any

import pytest

from anytorch.probe import snapshot
from anytorch.probe.facts import EntryPoint, Icd
from anytorch.probe.graphics import is_software_icd, vulkan_folders
from anytorch.probe.pci import read_nodes
from anytorch.probe.tree import Tree, find_library


@pytest.mark.parametrize(
    ("files", "env", "kind"),
    [
        ({"/.dockerenv": ""}, {}, "docker"),  # both machines of this project have it, 2026-11-15
        ({"/run/.containerenv": ""}, {}, "podman"),  # podman-run(1): the file exists in every container
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "kubernetes"),  # Kubernetes docs, Service
        ({}, {"container": "lxc"}, "lxc"),  # systemd.io/CONTAINER_INTERFACE
        ({}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({"/proc/self/cgroup": "11:memory:/kubepods/burstable/pod1\n"}, {}, "kubernetes"),
        ({"/proc/self/cgroup": "0::/\n"}, {}, None),
    ],
)
def test_containers(build: Any, files: dict[str, str], env: dict[str, str], kind: str | None) -> None:
    assert snapshot(build({"/etc/": "", **files}), env).machine.container == kind


def test_wsl_and_whose_libcuda_comes_first(build: Any) -> None:
    # Kernel name: microsoft/WSL release notes. WSL's libraries live in /usr/lib/wsl/lib, which its
    # /etc/ld.so.conf.d/ld.wsl.conf adds to the loader's cache; the cache holds paths ended by a zero byte.
    root = build(
        {
            "/proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n",
            "/dev/dxg": "",
            "/usr/lib/wsl/lib/libcuda.so.1": b"\x7fELF",
            "/etc/ld.so.cache": b"glibc-ld.so.cache1.1\0\0libcuda.so.1\0/usr/lib/wsl/lib/libcuda.so.1\0",
        }
    )
    hardware = snapshot(root)
    assert hardware.machine.wsl and hardware.machine.wsl_libraries_first is True
    assert hardware.nvidia.libcuda == "/usr/lib/wsl/lib/libcuda.so.1"
    assert hardware.node("/dev/dxg") is not None
    build({"/opt/driver/libcuda.so.1": b"\x7fELF"})
    other = snapshot(root, {"LD_LIBRARY_PATH": "/opt/driver"})
    assert other.machine.wsl_libraries_first is False and other.nvidia.libcuda == "/opt/driver/libcuda.so.1"


def test_the_loader_finds_what_the_h200_machine_has(build: Any) -> None:
    # Paths in that machine's ld.so.cache, and its LD_LIBRARY_PATH, recorded 2026-11-15.
    cache = (
        b"\0/lib/libnvidia-ml.so.1\0/usr/local/nvidia/lib64/libnvidia-ml.so.1\0/usr/local/nvidia/lib64/libcuda.so.1\0"
    )
    tree = Tree(build({"/etc/ld.so.cache": cache, "/usr/local/nvidia/lib64/libnvidia-ml.so.1": b"\x7fELF"}))
    assert find_library(tree, {}, "libnvidia-ml.so.1") == "/usr/local/nvidia/lib64/libnvidia-ml.so.1"
    assert find_library(tree, {}, "libcuda.so.1") is None  # in the cache, but the file is gone
    assert find_library(tree, {}, "nvidia-ml.so.1") is None


def test_nodes_say_who_may_use_them(build: Any) -> None:
    root = build(
        {"/dev/kfd": "", "/dev/dri/renderD128": "", "/dev/dri/card0": "", "/dev/nvidia10": "", "/dev/nvidia2": ""}
    )
    build({"/etc/group": f"root:x:0:\nrender:x:{(root / 'dev/kfd').stat().st_gid}:me\n"})
    denied = Tree(root, access=lambda path, mode: not path.endswith("kfd"))
    nodes = {node.path: node for node in read_nodes(denied)}
    assert list(nodes) == ["/dev/dri/renderD128", "/dev/kfd", "/dev/nvidia2", "/dev/nvidia10"]
    assert not nodes["/dev/kfd"].readable and not nodes["/dev/kfd"].writable
    assert nodes["/dev/dri/renderD128"].readable and nodes["/dev/dri/renderD128"].writable
    expected = "root" if nodes["/dev/kfd"].gid == 0 else "render"
    assert nodes["/dev/kfd"].group == expected


# Verbatim from Debian 12's mesa-vulkan-drivers on the development machine.
LAVAPIPE = """{
    "ICD": {
        "api_version": "1.1.230",
        "library_path": "/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so"
    },
    "file_format_version": "1.0.0"
}"""
RADEON = LAVAPIPE.replace("1.1.230", "1.3.230").replace("libvulkan_lvp", "libvulkan_radeon")
ICDS = "/usr/share/vulkan/icd.d"


def test_only_a_software_vulkan_driver(build: Any) -> None:
    root = build(
        {
            f"{ICDS}/lvp_icd.x86_64.json": LAVAPIPE,
            "/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so": b"\x7fELF",
            "/lib/x86_64-linux-gnu/libvulkan.so.1": b"\x7fELF",
            "/proc/sys/kernel/arch": "x86_64\n",
        }
    )
    graphics = snapshot(root).graphics
    assert graphics.vulkan_loader == "/lib/x86_64-linux-gnu/libvulkan.so.1"
    (icd,) = graphics.vulkan_icds
    assert icd.found and is_software_icd(icd)
    assert not is_software_icd(Icd(f"{ICDS}/radeon_icd.x86_64.json", "/usr/lib/libvulkan_radeon.so", True))


def test_vulkan_variables_replace_or_add(build: Any) -> None:
    # Their meaning: Vulkan-Loader docs, LoaderDriverInterface.md.
    root = build(
        {
            f"{ICDS}/lvp_icd.x86_64.json": LAVAPIPE,
            "/opt/a.json": RADEON,
            "/opt/more/b.json": '{"ICD": {"library_path": "../lib/libb.so"}}',
            "/opt/lib/libb.so": b"\x7fELF",
            "/opt/c.json": '{"ICD": {"library_path": "libc_driver.so"}}',
            "/lib/libc_driver.so": b"\x7fELF",
            "/opt/broken.json": "{",
        }
    )

    def paths(**env: str) -> list[str]:
        return [icd.path for icd in snapshot(root, env).graphics.vulkan_icds]

    assert paths() == [f"{ICDS}/lvp_icd.x86_64.json"]
    assert paths(VK_ICD_FILENAMES="/opt/a.json") == ["/opt/a.json"]
    assert paths(VK_DRIVER_FILES="/opt/more", VK_ICD_FILENAMES="/opt/a.json") == ["/opt/more/b.json"]
    assert paths(VK_ADD_DRIVER_FILES="/opt/a.json:/none.json") == ["/opt/a.json", f"{ICDS}/lvp_icd.x86_64.json"]
    assert paths(XDG_DATA_DIRS="/nowhere") == []
    env = {"VK_DRIVER_FILES": "/opt/a.json:/opt/more/b.json:/opt/c.json:/opt/broken.json"}
    hardware = snapshot(root, env)
    assert [icd.found for icd in hardware.graphics.vulkan_icds] == [False, True, True, None]
    assert any("/opt/broken.json" in problem for problem in hardware.problems)


def test_vulkan_folders_follow_the_users_home() -> None:
    assert vulkan_folders({"HOME": "/home/me"})[0] == "/home/me/.config/vulkan/icd.d"
    assert "/usr/share/vulkan/icd.d" in vulkan_folders({})


def test_opencl_and_level_zero(build: Any) -> None:
    # pocl.icd and OCL_ICD_FILENAMES verbatim from the H200 machine, 2026-11-15.
    root = build(
        {
            "/etc/OpenCL/vendors/pocl.icd": "libpocl.so.2.12.0",
            "/usr/lib/libpocl.so.2.12.0": b"\x7fELF",
            "/usr/lib/libOpenCL.so.1": b"\x7fELF",
            "/usr/lib/libze_loader.so.1": b"\x7fELF",
        }
    )
    graphics = snapshot(root, {"OCL_ICD_FILENAMES": "libpocl.so.2:libnvidia-opencl.so.1"}).graphics
    assert graphics.opencl_loader == "/usr/lib/libOpenCL.so.1"
    assert graphics.opencl_icds == (
        Icd("/etc/OpenCL/vendors/pocl.icd", "libpocl.so.2.12.0", True),
        Icd("OCL_ICD_FILENAMES", "libpocl.so.2", False),
        Icd("OCL_ICD_FILENAMES", "libnvidia-opencl.so.1", False),
    )
    assert graphics.level_zero_loader == "/usr/lib/libze_loader.so.1" and graphics.level_zero_driver is None
    assert graphics.level_zero_code is None


def test_a_level_zero_loader_that_is_none(build: Any) -> None:
    graphics = snapshot(build({"/dev/": ""}), {"ANYTORCH_LEVEL_ZERO_LIBRARY": "/nowhere.so"}).graphics
    assert (graphics.level_zero_code, graphics.level_zero_devices) == (None, None)


HEAD = (
    "from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']\n"
)
# Verbatim: the development machine's torch 2.13.0+cpu and the H200 machine's 2.11.0+cu130, read 2026-11-15.
CPU = HEAD + "__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = None\n"
CPU += "git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'\nhip: Optional[str] = None\n"
CPU += "rocm: Optional[str] = None\nxpu: Optional[str] = None\n"
CUDA = HEAD + "__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\n"
CUDA += "git_version = '70d99e998b4955e0049d13a98d77ae1b14db1f45'\nhip: Optional[str] = None\n"
CUDA += "rocm: Optional[str] = None\nxpu: Optional[str] = None\n"
# The same file with the value a ROCm build writes (a HIP version as hipcc gives it, ROCm/pytorch pull 2983) and the
# eight digits of the compiler's date an XPU build writes (pytorch/pytorch pull 139466).
ROCM = CPU.replace("2.13.0+cpu", "2.13.0+rocm7.1").replace(
    "hip: Optional[str] = None", "hip: Optional[str] = '7.1.25421'"
)
XPU = CPU.replace("2.13.0+cpu", "2.13.0+xpu").replace("xpu: Optional[str] = None", "xpu: Optional[str] = '20250302'")


@pytest.mark.parametrize(
    ("text", "version", "kind"),
    [
        (CPU, "2.13.0+cpu", "cpu"),
        (CUDA, "2.11.0+cu130", "cuda"),
        (ROCM, "2.13.0+rocm7.1", "rocm"),
        (XPU, "2.13.0+xpu", "xpu"),
    ],
)
def test_the_kind_of_a_wheel(build: Any, text: str, version: str, kind: str) -> None:
    root = build({"/site/torch/version.py": text})
    wheel = snapshot(root, sys_path=["/nothing", "/site"]).torch
    assert wheel is not None
    assert (wheel.version, wheel.kind, wheel.path, wheel.others) == (version, kind, "/site/torch", ())


def test_two_torches_and_one_seen_by_two_paths(build: Any) -> None:
    root = build({"/b/torch/version.py": CUDA, "/a/lib/torch/version.py": CPU, "/a/lib64": "-> lib"})
    wheel = snapshot(root, sys_path=["/a/lib", "/a/lib64", "/b", "/b"]).torch
    assert wheel is not None
    assert (wheel.version, wheel.others) == ("2.13.0+cpu", ("/b/torch",))


def test_no_torch_and_a_damaged_one(build: Any) -> None:
    root = build({"/site/torch/version.py": b"\xff\x00garbage"})
    assert snapshot(root, sys_path=["/elsewhere"]).torch is None
    hardware = snapshot(root, sys_path=["/site"])
    assert hardware.torch is not None and hardware.torch.version == "unknown"
    assert any("version.py" in problem for problem in hardware.problems)


def test_packages_and_entry_points(build: Any) -> None:
    # torch_npu's entry points as its wheel has them (research page, section 1.2).
    npu = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n\n[torch_dynamo_backends]\nnpu = torch_npu:x\n"
    root = build(
        {
            "/site/torch-2.13.0+cpu.dist-info/METADATA": "",
            "/site/torch_npu-2.13.0.dist-info/entry_points.txt": npu,
            "/site/nvidia_ml_py-13.615.71.dist-info/": "",
            "/site/pynvml-13.0.1.dist-info/": "",
            "/site/Intel_Extension.for_PyTorch-2.8.0.dist-info/": "",
            "/site/requests-2.34.2.dist-info/": "",
            "/site/torchvision.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n",
            "/site/anytorch-0.1.dist-info/entry_points.txt": "[anytorch.backends]\n; none\ncpu = a.b:C [x]\nbroken\n",
            "/later/torch-2.0.0.dist-info/": "",
        }
    )
    packages = snapshot(root, sys_path=["/site", "/site/", "/later"]).packages
    assert packages.versions == {
        "anytorch": "0.1",
        "intel-extension-for-pytorch": "2.8.0",
        "nvidia-ml-py": "13.615.71",
        "pynvml": "13.0.1",
        "torch": "2.13.0+cpu",
        "torch-npu": "2.13.0",
        "torchvision": "0.28.0",
    }
    assert packages.entry_points == (
        EntryPoint("anytorch.backends", "cpu", "a.b:C", "anytorch"),
        EntryPoint("torch.backends", "torch_npu", "torch_npu:_autoload", "torch-npu"),
    )


def test_packages_agree_with_importlib_metadata() -> None:
    import importlib.metadata

    found = snapshot().packages
    assert "torch" in found.versions or not list(importlib.metadata.distributions(name="torch"))
    for name, version in found.versions.items():
        assert importlib.metadata.version(name) == version
    groups = ("torch.backends", "anytorch.backends")
    expected = {(e.group, e.name, e.value) for g in groups for e in importlib.metadata.entry_points(group=g)}
    assert {(e.group, e.name, e.value) for e in found.entry_points} == expected


def test_only_variables_that_steer_devices_are_kept(build: Any) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "", "VK_ICD_FILENAMES": "/x", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "s"}
    assert snapshot(build({"/dev/": ""}), env).env == {"CUDA_VISIBLE_DEVICES": "", "VK_ICD_FILENAMES": "/x"}
    assert snapshot(build({}), None).env == {}
