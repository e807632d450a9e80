"""What we wrote and a disk may damage, or somebody else hands on: settings, caches, journals, checkpoints, graphs."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from functools import cache
from typing import Any
from unittest import mock

import torch

from anytorch import settings
from anytorch.cache import Store
from anytorch.cli.commands import config as config_command
from anytorch.cli.settings import check_settings_file
from anytorch.devices.bench import results
from anytorch.devices.try_out import report_from_json
from anytorch.devices.tune import store as tuning
from anytorch.devices.types import Candidate
from anytorch.errors import CacheError, ConfigError, GraphError, ModelError, UnknownDevice, UsageError
from anytorch.files import parse_json
from anytorch.forecast.training import store as training
from anytorch.graph import records
from anytorch.graph.capture import KernelGraph
from anytorch.graph.ir import Graph
from anytorch.measured import store as measured
from anytorch.measured.machine import identity, key_of
from anytorch.memory import manifest, resume
from anytorch.memory.sizes import parse_nbytes
from anytorch.probe.collect import collect
from anytorch.serve import graphs
from anytorch.text.embed.files_journal import Journal, finished_rows, partial_folder
from tests.fuzz.kit import scratch, target

TOML = ("[settings]\n", "[tuned.cpu]\n", "[tuned.cpu.settings]\n", "=", '"', "true", "nan", "inf", "1e400", "1979-05-27",
        "[", "{", *(f"{name} = " for name in settings.SETTINGS), "9" * 400, "0x7f", "'6GiB'", "\n")  # fmt: skip


@target("settings", "text", errors=(ConfigError,), words=TOML)
def settings_file(data: bytes) -> None:
    """A settings file is settings within their ranges, or a ConfigError."""
    path = scratch.file("config.toml", data)
    found = settings.read_settings_file(path)
    check_settings_file(found, path)
    for name, value in found.get("settings", {}).items():
        settings.parse_setting(name, value)


@cache
def machine() -> dict[str, Any]:
    return identity()


@target(
    "tuned",
    "text",
    errors=(ConfigError,),
    words=(*TOML, 'key = "KEY"\n', "batch_size = ", "device = ", "measured", "machine"),
)
def tuned_tables(data: bytes) -> None:
    """What was tuned is trusted or not, or the settings file is refused; KEY stands for this machine's own key."""
    path = scratch.file("config.toml", data.replace(b"KEY", key_of(machine()).encode()))
    candidate = Candidate("cpu", "cpu", 0, "CPU", "usable", 0)
    with settings.use(config_file=str(path)), mock.patch.object(tuning, "identity", machine):
        found = tuning._tuned(candidate)
        assert found is None or isinstance(found.settings, dict)
        for name in tuning.SETTINGS:
            tuning.trusted_setting(name)


@target("device_report", "json", errors=(TypeError, ValueError, AttributeError, KeyError))
def device_report(data: bytes) -> None:
    """A cached report of tried devices is one, or raises what `try_devices` catches to try them again."""
    report = report_from_json(parse_json(data))
    assert all(isinstance(one.devices, tuple) for one in report.backends.values())


@target("settings_json", "json", errors=(ConfigError,))
def settings_json(data: bytes) -> None:
    """The same, as `anytorch config load FILE.json` reads it."""
    path = scratch.file("config.json", data)
    found = config_command.read_json(path)
    check_settings_file(found, path)
    for name, value in found.get("settings", {}).items():
        config_command.as_json(settings.parse_setting(name, value))


@target(
    "sizes",
    "text",
    errors=(UsageError,),
    words=("GiB", "MB", "1e400", "inf", "nan", "-", "_", " ", "0x", "9" * 400, "١"),
)
def sizes(data: bytes) -> None:
    """A size is a number of bytes below 2**60, or refused; as JSON has it, too."""
    text = data.decode("utf-8", "replace")
    try:
        value = parse_json(text)
    except ValueError:
        value = text
    for given in (text, value):
        assert 0 <= parse_nbytes(given) < 2**60
        settings.parse_setting("webgpu_memory", given)


@target("cache", "json", errors=(CacheError,))
def cache_file(data: bytes) -> None:
    """A cache's file is a dictionary of entries, or a CacheError, and is then left as it was."""
    path = scratch.file("devices.json", data)
    store = Store("devices", path.parent)
    try:
        store.entries()
    except CacheError:
        assert path.read_bytes() == data
        raise
    store.put("a", 1)
    assert store.get("a") == 1


@target("verdict", "json", errors=())
def verdict(data: bytes) -> None:
    """A stored measurement is read and can be explained and shown, or is measured again."""
    found = measured._read(scratch.file("v.json", data))
    if found is not None:
        found.explain()
        graphs.choice_of(found)
        written = json.dumps(found.as_json())
        again = measured._read(scratch.file("v.json", written.encode()))
        assert again is not None and json.dumps(again.as_json()) == written


@target("record", "json", errors=())
def record(data: bytes) -> None:
    """The record of a kernel graph is read and can be shown, or counts as missing."""
    path = scratch.file("r.json", data)
    try:
        key = records.Record.from_json(json.loads(data)).key
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        key = "r"
    found = records._read(path.rename(path.with_name(f"{key}.json")))
    if found is not None:
        graphs.whole(found)


@target("graph", "json", errors=(GraphError, UnknownDevice))
def graph(data: bytes) -> None:
    """The text of a kernel graph is a graph that is written and read back the same, or refused."""
    path = scratch.file("graph.json", data)
    made = KernelGraph.from_json(path)
    again = Graph.from_json(json.loads(json.dumps(made.graph.to_json())))
    assert again.key == made.graph.key and str(again)


@target("benchmark", "json", errors=(UsageError,))
def benchmark(data: bytes) -> None:
    """A report of measurements is one that can be compared, or refused."""
    report = results.load(scratch.file("results.json", data))
    results.relative_to_cpu(report)
    for device in report.devices:
        results.disturbed_share(device.rows)


@target("journal", "folder", errors=(UsageError,))
def journal(data: bytes) -> None:
    """The journal of an unfinished run is resumed from what is whole, or refused; its rows are counted without an error."""
    goal = scratch.empty() / "out.parquet"
    folder = partial_folder(goal)
    folder.mkdir()
    (folder / "journal.json").write_bytes(data)
    (folder / "part-000000.parquet").write_bytes(b"12345678")
    assert finished_rows(goal) >= 0
    with Journal(goal, {"source": {"size": 1}}, resume=True) as run:
        assert run.rows >= 0 and len(run.parts) <= 1


@target("manifest", "folder", errors=())
def sums(data: bytes) -> None:
    """What is wrong with a folder is said in words, whatever its list of sums holds."""
    folder = scratch.folder(data, (manifest.MANIFEST, "a.bin", "sub/b.bin"))
    assert isinstance(manifest.problem_of(folder, ("a.bin",)), str)


@target("tier_checkpoint", "folder", errors=(ModelError,))
def tier_checkpoint(data: bytes) -> None:
    """The description of a training checkpoint is verified, or what is wrong with it is said."""
    folder = scratch.folder(data, (resume.META, "model.json"))
    if len(data) % 2:
        manifest.write_manifest(folder)  # as if it had been written like this
    found, why = resume.read_verified(folder)
    assert (found is None) == bool(why)


@target("training_state", errors=(ModelError,), longest=2048)
def training_state(data: bytes) -> None:
    """The state of a fine-tuning run is a dictionary, or refused. The input is the pickle in torch's archive."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        for name, content in (
            ("data.pkl", data),
            ("byteorder", b"little"),
            ("data/0", b"\0" * 64),
            ("version", b"3\n"),
        ):
            archive.writestr(f"archive/{name}", content)
    path = scratch.file("state.pt", body.getvalue())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = training.read_state(path, torch.device("cpu"), mmap=len(data) % 2 == 0)
    assert isinstance(found, dict)


@target(
    "training_log",
    "text",
    errors=(),
    words=('{"step": 1, "loss": 2}', '{"step": null}', "\n", '"step"', "[", "1e999", "{}"),
)
def training_log(data: bytes) -> None:
    """The log of a fine-tuning run is read as far as it is whole, and cut at a step."""
    folder = scratch.empty()
    run = training.RunFolder(folder)
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.log.write_bytes(data)
    assert all(isinstance(entry, dict) for entry in run.entries())
    run.keep_log_until(1)


PROBED = (
    "proc/cpuinfo", "proc/meminfo", "proc/self/cgroup", "proc/mounts", "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max",
    "proc/driver/nvidia/version", "etc/os-release", "proc/version", "sys/bus/pci/devices/0000:01:00.0/vendor",
    "sys/bus/pci/devices/0000:01:00.0/class", "sys/bus/pci/devices/0000:01:00.0/device",
    "sys/bus/pci/devices/0000:01:00.0/resource", "sys/class/kfd/kfd/topology/nodes/1/properties", "site/torch/version.py",
    "site/torch-2.7.dist-info/METADATA",
    "usr/share/vulkan/icd.d/a.json", "sys/devices/system/cpu/online", "proc/sys/kernel/arch",
)  # fmt: skip


@target("probe", "folder", errors=())
def probe(data: bytes) -> None:
    """What a machine is, from files of any content: never an error, and no reader gives up on one."""
    folder = scratch.folder(data, PROBED)
    found = collect(folder, {"PATH": "/bin"}, sys_path=["/site"], system="Linux")
    assert not [one for one in found.problems if "failed:" in one], found.problems
