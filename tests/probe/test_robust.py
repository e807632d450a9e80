"""Whatever is broken below the root: the probe answers, in plain JSON, without waiting and without raising."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware, as_json
from anytorch.probe.tree import Tree

NODES = "sys/class/kfd/kfd/topology/nodes"
PCI = "sys/bus/pci/devices"
# Every file some reader opens, once.
FILES = (
    "proc/cpuinfo",
    "proc/meminfo",
    "proc/self/cgroup",
    "proc/self/mountinfo",
    "proc/self/status",
    "proc/sys/kernel/arch",
    "proc/sys/kernel/osrelease",
    "proc/sys/kernel/random/boot_id",
    "proc/driver/nvidia/version",
    "proc/driver/nvidia/gpus/0000:00:06.0/information",
    "sys/module/nvidia/version",
    "sys/devices/system/cpu/online",
    "sys/devices/system/cpu/cpu0/topology/core_cpus_list",
    "sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
    "sys/devices/system/cpu/cpu0/cpu_capacity",
    "sys/devices/cpu_core/cpus",
    "sys/devices/cpu_atom/cpus",
    "sys/fs/cgroup/cpu.max",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.current",
    "sys/fs/cgroup/memory.stat",
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
    "sys/fs/cgroup/memory/memory.usage_in_bytes",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us",
    f"{NODES}/1/properties",
    f"{PCI}/0000:00:06.0/class",
    f"{PCI}/0000:00:06.0/vendor",
    f"{PCI}/0000:00:06.0/device",
    f"{PCI}/0000:00:06.0/boot_vga",
    f"{PCI}/0000:00:06.0/mem_info_vram_total",
    f"{PCI}/0000:00:06.0/mem_info_vram_used",
    f"{PCI}/0000:00:06.0/product_name",
    "usr/share/misc/pci.ids",
    "usr/local/Ascend/driver/version.info",
    "usr/local/Ascend/ascend-toolkit/latest/version.cfg",
    "usr/share/vulkan/icd.d/a.json",
    "etc/OpenCL/vendors/a.icd",
    "etc/ld.so.cache",
    "etc/group",
    "dev/nvidia0",
    "dev/davinci0",
    "run/systemd/container",
    "site/torch/version.py",
    "site/torch-1.dist-info/entry_points.txt",
    "site/torchvision.egg-info/PKG-INFO",
    "System/Library/CoreServices/SystemVersion.plist",
)
ENV = {"HOME": "/root", "LD_LIBRARY_PATH": "/usr/lib"}


def look(root: Path, **options: Any) -> Hardware:
    hardware = snapshot(root, ENV, sys_path=["/site"], **options)
    # UTF-8 refuses lone surrogates, allow_nan=False refuses NaN and infinity: what a strict JSON reader would refuse.
    json.dumps(as_json(hardware), allow_nan=False, ensure_ascii=False).encode("utf-8")
    return hardware


def fill(root: Path, make: Callable[[Path], object]) -> Path:
    for name in FILES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
    return root


# Text that looks like what the readers expect, so that the fuzzer gets past the first check; and plain bytes.
WORDS = [b"0", b"1", b"-1", b"0x030000", b"0x10de", b"0x1002", b"0x19e5", b"0x120000", b"max", b"100000", b"4294967296"]
WORDS += [b"9" * 30, b"0-7", b"0-65536", b"simd_count 4\n", b"gfx_target_version 99999999999\n", b"location_id 70000\n"]
WORDS += [
    b"unique_id 18446744073709551616\n",
    b"processor\t: 0\n",
    b"flags\t: lm \xff\n",
    b"0::/../..\n",
    b"4:memory:/\n",
]
WORDS += [
    b" - cgroup2 x rw\n",
    b"1 2 3 / /sys/fs/cgroup rw",
    b"MemTotal: 18446744073709551615 kB\n",
    b"Cpus_allowed_list: 1-",
]
WORDS += [
    b'"library_path": "',
    b'"',
    b"\x00",
    b"\xed\xa0\x80",
    b"\n",
    b"[torch.backends]\n",
    b"a = b\n",
    b"__version__ = '",
]
WORDS += [b"NaN", b"1e400", b"inf", b"\n10de  x\n\t2335  ", b"<key>ProductVersion</key><string>"]
content = st.one_of(st.binary(max_size=40), st.lists(st.sampled_from(WORDS), max_size=6).map(b"".join))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(contents=st.lists(content, min_size=len(FILES), max_size=len(FILES)), mac=st.booleans())
def test_random_bytes_in_every_file(tmp_path: Path, contents: list[bytes], mac: bool) -> None:
    root = tmp_path / "fuzzed"
    shutil.rmtree(root, ignore_errors=True)
    queue = iter(contents)
    fill(root, lambda path: path.write_bytes(next(queue)))
    hardware = look(
        root, system="Darwin" if mac else "Linux", sysctl=lambda name: contents[0].decode("utf-8", "replace")
    )
    assert hardware.cpu.usable >= 1 and hardware.cpu.good_threads >= 1
    assert not [problem for problem in hardware.problems if "failed" in problem], hardware.problems


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),  # opening one for reading would wait for a writer
        lambda path: path.symlink_to(path.name),  # a link to itself
        lambda path: path.symlink_to("/etc/passwd"),  # out of the root
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 3_000_000),
        lambda path: path.write_bytes(b"0-65536," * 100_000),
        lambda path: path.write_bytes(b"[" * 100_000),
    ],
    ids=["folder", "fifo", "loop", "outside", "endless", "empty", "binary", "ranges", "nested"],
)
def test_things_that_are_no_proper_files(tmp_path: Path, make: Callable[[Path], object]) -> None:
    hardware = look(fill(tmp_path / "root", make))
    assert not [problem for problem in hardware.problems if "failed" in problem], hardware.problems
    assert "root:" not in json.dumps(as_json(hardware))  # nothing of the real /etc/passwd


def test_a_pipe_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    tree = Tree(tmp_path)
    monkeypatch.setattr(os, "open", lambda *arguments: pytest.fail("opened"))
    assert tree.data("/pipe") is None and tree.exists("/pipe") and not tree.is_file("/pipe")


def test_what_may_not_be_read_becomes_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By a patched open, since these tests may run as root, whom no permission stops.
    root = fill(tmp_path / "root", lambda path: path.write_bytes(b"1"))
    real_open = os.open

    def refuse(path: Any, *arguments: Any) -> int:
        if str(path).startswith(str(root)):
            raise PermissionError(13, "Permission denied")
        return real_open(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    hardware = look(root)
    assert "cannot read /proc/cpuinfo: Permission denied" in hardware.problems
    assert hardware.memory.total is None and hardware.cpu.model is None and hardware.torch is None


def test_a_reader_that_fails_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.probe import collect

    def broken(*arguments: Any, **options: Any) -> None:
        raise RecursionError("a fault of ours")

    for name in ("read_cgroup", "read_cpu", "read_nvidia", "read_pci", "read_nodes", "read_graphics", "read_packages"):
        monkeypatch.setattr(collect, name, broken)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    hardware = snapshot(tmp_path)
    assert hardware.memory.total == 1024
    assert sum("RecursionError: a fault of ours" in problem for problem in hardware.problems) == 7


@pytest.mark.parametrize("root", ["/nowhere/at/all", "", "relative/nowhere"])
def test_a_root_that_is_not_there(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hardware = snapshot(root)
    assert hardware.gpus == () and hardware.memory.total is None and hardware.cpu.logical == 1


def test_odd_names_and_variables(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/dev/nvidia\xff0")).touch()
    env = {"LD_LIBRARY_PATH": "/\udcff:\0:" + "x" * 5000, "VK_\udcff": "\udcfe", "CUDA_VISIBLE_DEVICES": "\udcff"}
    hardware = snapshot(tmp_path, env, sys_path=["\udcff", "\0", "", "x" * 5000])
    json.dumps(as_json(hardware), ensure_ascii=False).encode("utf-8")
    assert hardware.nodes == () and hardware.env["CUDA_VISIBLE_DEVICES"] == "?"


def test_the_tree_stays_inside_its_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("secret")
    (root / "up").symlink_to("../secret")
    (root / "folder").symlink_to("..")
    (root / "inside").write_text("fine")
    (root / "again").symlink_to("inside")
    tree = Tree(root)
    assert tree.text("/up") is None and tree.text("/folder/secret") is None and tree.text("/../secret") is None
    assert tree.names("/folder") == [] and not tree.exists("/up")
    assert tree.text("/again") == "fine"


def test_this_machine() -> None:
    hardware = snapshot()
    json.dumps(as_json(hardware), allow_nan=False)
    assert hardware.cpu.logical >= 1 and hardware.machine.python
    if hardware.machine.system == "Linux":
        assert hardware.memory.total and hardware.cpu.affinity == len(os.sched_getaffinity(0))


def test_the_probe_imports_nothing_heavy(run_python: Any) -> None:
    code = """
import sys
from anytorch.probe import snapshot
assert "anytorch.probe.collect" not in sys.modules, "importing the package should cost nothing"
snapshot()
snapshot("/nowhere")
heavy = ("torch", "numpy", "subprocess", "importlib.metadata", "platform", "tempfile", "logging", "json", "plistlib")
print([name for name in heavy if name in sys.modules])
"""
    assert run_python(code).stdout.strip() == "[]"
