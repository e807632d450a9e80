"""`anytorch info`: answers whatever is broken, from files alone, at the price it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytorch.cli.commands import info
from anytorch.cli.main import main
from anytorch.probe import snapshot

SOURCES = Path(__file__).parents[2] / "src"
KEYS = {
    "anytorch",
    "machine",
    "cpu",
    "memory",
    "gpus",
    "nvidia",
    "ascend",
    "graphics",
    "torch",
    "packages",
    "env",
    "tried",
    "devices",
    "backends",
    "plugin_errors",
    "reasons",
    "expected",
    "expected_why",
    "settings",
    "settings_file",
    "cache_folder",
    "problems",
}


def test_the_document_has_the_documented_keys(cli: Callable[..., Any]) -> None:
    document = cli("--json", "info").document
    assert set(document) == KEYS
    page = (SOURCES.parent / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert not [key for key in KEYS | {"probe", "why"} if f"`{key}`" not in page]
    assert document["problems"] == [] and document["tried"] is False
    assert document["cpu"]["usable"] >= 1
    cpu = next(device for device in document["devices"] if device["id"] == "cpu")
    assert cpu["state"] == "seen, not tried"
    names = [backend["name"] for backend in document["backends"]]
    assert names == sorted(
        names, key=lambda name: -next(b["priority"] for b in document["backends"] if b["name"] == name)
    )
    for backend in document["backends"]:
        assert backend["devices"] or backend["reason"], "a back end that is not here says why"
        assert backend["support"]["precisions"]


def test_for_people(cli: Callable[..., Any]) -> None:
    answer = cli("info")
    assert answer.status == 0
    for word in ("machine", "torch", "CPU", "memory", "GPUs", "back end", "auto (from default)", "seen, not tried"):
        assert word in answer.out
    assert "\033" not in answer.out, "no colours in a pipe"


def test_why_explains_and_shows_the_support(cli: Callable[..., Any]) -> None:
    answer = cli("info", "--why")
    assert "asked for: auto" in answer.out and "quantizations" in answer.out
    assert "asked for: auto" in cli("--json", "info", "--why").document["why"]


# --- whatever is broken ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [b"backend = ", b"\xff\xfe", b"settings = 3\n", b'[settings]\nthreads = "many"\n', None]
)
def test_a_broken_settings_file_is_a_problem_not_a_failure(
    damage: bytes | None, settings_file: Path, cli: Callable[..., Any]
) -> None:
    if damage is None:
        settings_file.mkdir()
    else:
        settings_file.write_bytes(damage)
    answer = cli("--json", "info")
    assert answer.status == 0
    assert len(answer.document["problems"]) == 1 and str(settings_file) in answer.document["problems"][0]
    assert answer.document["settings"]["threads"] == {"value": None, "source": "default"}
    assert [device["id"] for device in answer.document["devices"]]
    assert settings_file.is_dir() if damage is None else settings_file.read_bytes() == damage
    words = cli("info")
    assert words.status == 0 and str(settings_file) in words.err


def test_broken_variables_are_problems(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_LOG_LEVEL", "LOUD")
    monkeypatch.setenv("ANYTORCH_PROBE_TIMEOUT", "soon")
    document = cli("--json", "info").document
    assert len(document["problems"]) == 2
    assert document["settings"]["log_level"]["value"] == "WARNING"


def test_an_unknown_configured_back_end_does_not_stop_why(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYTORCH_BACKEND", "gpu9000")
    answer = cli("--json", "info", "--why")
    assert answer.status == 0
    assert "asked for: auto" in answer.document["why"], "the default stands in"
    assert "gpu9000" in answer.document["problems"][0]


def test_would_use_follows_the_configured_back_end(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, settings_file: Path, cpu_wheel: None
) -> None:
    best = cli("--json", "info").document
    assert best["expected"] and best["expected_why"] == ""
    monkeypatch.setenv("ANYTORCH_BACKEND", "cpu")
    assert cli("--json", "info").document["expected"] == "cpu"
    monkeypatch.setenv("ANYTORCH_BACKEND", "mps")
    document = cli("--json", "info").document
    assert document["expected"] == "cpu"
    assert "mps (from ANYTORCH_BACKEND) cannot be used: no Apple GPU (MPS) was found" in document["expected_why"]
    assert "would use  cpu; mps (from ANYTORCH_BACKEND)" in cli("info").out
    monkeypatch.setenv("ANYTORCH_STRICT", "1")
    assert cli("--json", "info").document["expected"] is None
    monkeypatch.delenv("ANYTORCH_BACKEND")
    settings_file.write_text("[settings]\nbackend = 'cpu:9'\n")
    document = cli("--json", "info").document
    assert document["expected"] is None and "available: cpu" in document["expected_why"]
    assert document["devices"] and document["problems"] == []


@pytest.mark.parametrize("part", ["snapshot", "hardware_json", "devices_json"])
def test_a_bug_in_one_part_leaves_the_others(
    part: str, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(info, part, broken)
    answer = cli("--json", "info")
    assert answer.status == 0
    assert set(answer.document) >= {"machine", "devices", "settings", "problems"}
    assert "ZeroDivisionError: division by zero" in answer.document["problems"][0]
    assert cli("info").status == 0


JUNK = st.one_of(st.binary(max_size=64), st.text(max_size=64).map(str.encode))
TREE = st.dictionaries(
    st.sampled_from(
        [
            "proc/cpuinfo",
            "proc/meminfo",
            "proc/self/cgroup",
            "proc/self/mountinfo",
            "proc/driver/nvidia/version",
            "sys/module/nvidia/version",
            "sys/fs/cgroup/cpu.max",
            "sys/fs/cgroup/memory.max",
            "sys/devices/cpu_atom/cpus",
            "sys/bus/pci/devices/0000:00:06.0/class",
            "sys/bus/pci/devices/0000:00:06.0/vendor",
            "sys/bus/pci/devices/0000:00:06.0/device",
            "sys/class/kfd/kfd/topology/nodes/1/properties",
            "usr/share/vulkan/icd.d/a.json",
            "dev/kfd",
            "dev/davinci0",
            "dev/nvidiactl",
        ]
    ),
    JUNK,
    max_size=17,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=TREE)
def test_fuzzed_machines(
    tree: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import json

    root = tmp_path_factory.mktemp("root")
    for name, content in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr(info, "snapshot", lambda: snapshot(root))
    for arguments in (["--json", "info", "--why"], ["info"]):
        capsys.readouterr()
        assert main(arguments) == 0
        out = capsys.readouterr().out
        if "--json" in arguments:
            document = json.loads(out)
            assert document["machine"] is not None
            assert "cpu" in [device["id"] for device in document["devices"]], document["problems"]


# --- without torch, with a broken one, with a hanging one -----------------------------------------------------------


def fake_torch(folder: Path, body: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\nxpu = None\n")
    (folder / "torch" / "__init__.py").write_text(body)
    return folder


def test_a_torch_that_does_not_import(tmp_path: Path, process: Callable[..., Any]) -> None:
    # The message of a torch whose library is damaged, as the dynamic loader words it.
    broken = fake_torch(tmp_path / "path", "raise ImportError('libtorch_cpu.so: file too short')\n")
    env = {"PYTHONPATH": f"{broken}{os.pathsep}{SOURCES}"}
    assert process("--json", "info", env=env).document["torch"]["version"] == "2.13.0+cpu"
    probed = process("--json", "info", "--probe", env=env)
    assert probed.status == 0
    assert "file too short" in probed.document["probe"]["import_error"]
    assert {device["state"] for device in probed.document["devices"]} == {"unusable"}
    doctor = process("--json", "doctor", env=env)
    assert doctor.status == 1
    assert "file too short" in doctor.document["torch"]["import_error"]
    tested = process("--json", "test", "cpu", env=env)
    assert tested.status == 1
    assert tested.document["passed"] is False and tested.document["devices"][0]["result"] == "failed"


def test_no_torch_at_all(process: Callable[..., Any], tmp_path: Path) -> None:
    # -S leaves site-packages out: an interpreter with our sources and nothing else.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "anytorch", "--json", "info", "--why"],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    import json

    document = json.loads(done.stdout)
    assert document["torch"] is None and document["expected"] is None
    assert [reason["code"] for reason in document["reasons"] if reason["level"] == "error"] == ["torch-missing"]
    absent = [backend for backend in document["backends"] if backend["state"] == "absent"]
    assert absent and all(b["reason"] == f"no {b['title']} was found here" and not b["fix"] for b in absent)
    words = subprocess.run(
        [sys.executable, "-S", "-m", "anytorch", "info"],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert words.stdout.count("torch is not installed") == 1
    for arguments, status in ((["doctor"], 1), (["test"], 1), (["doctor", "--no-probe"], 1), (["demo"], 1)):
        done = subprocess.run(
            [sys.executable, "-S", "-m", "anytorch", *arguments],
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, (arguments, done.stderr)
        assert "pip install" in done.stdout + done.stderr and "Traceback" not in done.stderr
        assert arguments[0] != "doctor" or "usable devices: none" in done.stdout


def test_a_hanging_child_ends_with_its_time_limit(tmp_path: Path, process: Callable[..., Any]) -> None:
    hanging = fake_torch(tmp_path / "path", "import time\ntime.sleep(600)\n")
    env = {"PYTHONPATH": f"{hanging}{os.pathsep}{SOURCES}", "ANYTORCH_PROBE_TIMEOUT": "1"}
    answer = process("--json", "info", "--probe", env=env)
    assert answer.status == 0
    codes = {report["code"] for report in answer.document["probe"]["backends"].values()}
    assert codes == {"timed-out"}


@pytest.mark.long
def test_probe_tries_the_devices(cli: Callable[..., Any]) -> None:
    first = cli("--json", "info", "--probe").document
    assert first["tried"] is True and first["probe"]["cached"] is False
    assert next(d for d in first["devices"] if d["id"] == "cpu")["state"] == "usable"
    assert cli("--json", "info", "--probe").document["probe"]["cached"] is True
    assert cli("--json", "info", "--refresh").document["probe"]["cached"] is False
    assert "tried in a child process" in cli("info", "--probe").out


def plugin(folder: Path, body: str) -> Path:
    """A third-party back end, installed as a wheel would install it."""
    (folder / "noisy-1.0.dist-info").mkdir(parents=True)
    (folder / "noisy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\n")
    (folder / "noisy-1.0.dist-info" / "entry_points.txt").write_text("[anytorch.backends]\nnoisy = noisy:Backend\n")
    (folder / "noisy.py").write_text(body)
    return folder


@pytest.mark.parametrize(
    "body", ["print('hello')\nBackend = object\n", "import sys\nsys.exit('no licence')\n", "1/0\n"]
)
def test_a_plugin_that_prints_exits_or_raises(body: str, tmp_path: Path, process: Callable[..., Any]) -> None:
    path = plugin(tmp_path / "plugin", body)
    answer = process("--json", "info", env={"PYTHONPATH": f"{path}{os.pathsep}{SOURCES}"})
    assert answer.status == 0
    document = answer.document  # whatever the plug-in printed is not in it
    assert "noisy" in document.get("plugin_errors", {}) or "no licence" in document["problems"][0]


# --- what it costs --------------------------------------------------------------------------------------------------

SLOW = (
    "torch",
    "numpy",
    "rich",
    "wgpu",
    "tomli_w",
    "matplotlib",
    "importlib.metadata",
    "subprocess",
    "tempfile",
    "logging",
    "platform",
    "shutil",
    "difflib",
    "hashlib",
    "anytorch.devices.try_out",
    "anytorch.devices.exercise",
    "anytorch.devices.bench",
)


@pytest.mark.parametrize("arguments", [["info"], ["--json", "info"]])
def test_info_imports_nothing_slow(arguments: list[str]) -> None:
    code = f"import sys; from anytorch.cli.main import main; main({arguments!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "anytorch.cli.commands.info" in loaded
    assert not loaded & set(SLOW)
    others = {name for name in loaded if name.startswith("anytorch.cli.commands.")} - {"anytorch.cli.commands.info"}
    assert not others


def test_seen_cards_are_listed_with_the_fix(nvml_stub: Any, process: Callable[..., Any]) -> None:
    document = process("--json", "info", env=nvml_stub.env()).document
    assert [gpu["uuid"] for gpu in document["gpus"]] == [nvml_stub.h200.uuid, nvml_stub.second_h200.uuid]
    cuda = next(backend for backend in document["backends"] if backend["name"] == "cuda")
    assert cuda["devices"] == ["cuda:0", "cuda:1"] and cuda["state"] == "unusable"
    assert cuda["code"] == "cpu-only-wheel" and "--index-url" in cuda["fix"]
    assert not document["expected"].startswith("cuda")
    text = process("info", env=nvml_stub.env()).out
    assert "NVIDIA H200" in text and "fix: " in text
