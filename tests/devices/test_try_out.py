"""The child process: whatever it does, the parent learns what it can and goes on."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anytorch import settings
from anytorch.cache import Store
from anytorch.devices import registry, try_out
from anytorch.devices.types import BackendReport
from anytorch.probe import snapshot


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a back end called `odd` whose try_out() has the given body."""

    def install(body: str) -> None:
        folder = tmp_path / "plugin"
        info = folder / "odd_backend-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-backend\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[anytorch.backends]\nodd = odd_backend:Odd\n")
        source = """
            import os, sys, time
            from anytorch.devices.base import TorchBackend

            class Odd(TorchBackend):
                name = torch_type = "odd"
                title = "an odd device"
                priority = 650

                def try_out(self):
                    {body}
        """
        (folder / "odd_backend.py").write_text(textwrap.dedent(source).replace("{body}", body))
        monkeypatch.syspath_prepend(folder)
        registry._plugins.cache_clear()

    yield install
    registry._plugins.cache_clear()
    sys.modules.pop("odd_backend", None)


def test_the_cpu_is_tried_for_real() -> None:
    report = try_out.run_children(["cpu"])
    assert report.version is not None and not report.import_error
    (device,) = report.backends["cpu"].devices
    assert [check["name"] for check in device.facts["checks"]] == ["allocate", "copy", "matmul", "backward"]
    assert report.facts["threads"] >= 1


def test_a_crash_is_blamed_on_the_back_end_that_crashed(plugin: Callable[[str], None]) -> None:
    plugin("os.kill(os.getpid(), 11)")
    report = try_out.run_children(["odd", "cpu"])
    assert report.backends["odd"].code == "crashed"
    assert "signal 11" in report.backends["odd"].error
    assert report.backends["cpu"].devices, "the rest must still be tried"


@pytest.mark.long
def test_a_hang_ends_at_the_limit_and_leaves_no_process(plugin: Callable[[str], None], tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    plugin(f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    began = time.monotonic()
    assert try_out.run_children(["cpu"]).backends["cpu"].devices
    usual_s = time.monotonic() - began  # of what comes before the hang, on this machine as it is now
    for limit_s in (1 + 2 * usual_s, 20 + 8 * usual_s):  # again where the machine has become busy meanwhile
        report = try_out.run_children(["cpu", "odd"], timeout_s=limit_s)
        if mark.exists():
            break
    assert report.backends["cpu"].devices, "what was found before the hang is kept"
    assert report.backends["odd"].code == "timed-out"
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_an_exception_is_kept_word_for_word(plugin: Callable[[str], None]) -> None:
    plugin("raise ValueError('the moon is full') from OSError('libodd.so.1: cannot open')")
    report = try_out.run_children(["odd"])
    found = report.backends["odd"]
    assert (found.code, found.devices) == ("failed", ())
    assert found.error == "ValueError: the moon is full ← OSError: libodd.so.1: cannot open"
    assert "Traceback (most recent call last)" in found.facts["traceback"]


def test_noise_on_the_childs_output_is_no_harm(plugin: Callable[[str], None]) -> None:
    plugin("print('x' * 300000); sys.stderr.write('y' * 300000); raise SystemExit(3)")
    report = try_out.run_children(["odd", "cpu"])
    assert report.backends["odd"].code == "crashed"
    assert "exit status 3" in report.backends["odd"].error
    assert report.backends["cpu"].devices


def test_a_plug_in_that_breaks_import_torch_is_found_out(
    broken_torch_plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(broken_torch_plugin)
    report = try_out.run_children(["cpu", "npu"])
    assert "Failed to load the backend extension: torch_npu" in report.autoload_error
    assert "libhccl.so" in report.autoload_error
    assert not report.import_error
    assert report.backends["cpu"].devices, "torch works with autoload off"
    assert "libhccl.so" in report.backends["npu"].error, "and the plug-in's own words are kept"


def test_a_torch_that_cannot_be_imported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libtorch_cpu.so: undefined symbol')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    report = try_out.run_children()
    assert "undefined symbol" in report.import_error
    assert report.version is None


def test_the_report_is_remembered_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def counted() -> try_out.TorchReport:
        runs.append(time.monotonic())
        return try_out.TorchReport("2.13.0", backends={"cpu": BackendReport("cpu")})

    monkeypatch.setattr(try_out, "run_children", counted)
    machine = snapshot()
    assert try_out.try_out(machine).cached is False
    assert try_out.try_out(machine).cached is True
    assert try_out.try_out(machine, refresh=True).cached is False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert try_out.try_out(snapshot()).cached is False
    assert len(runs) == 3


def test_only_what_a_device_depends_on_is_tried_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = try_out.cache_key(snapshot())
    for variable, value in (
        ("ANYTORCH_LOG_LEVEL", "DEBUG"),
        ("ANYTORCH_MEASURE_S", "0.5"),
        ("ANYTORCH_BACKEND", "mps"),
    ):
        monkeypatch.setenv(variable, value)
    (tmp_path / "another.toml").write_text("[settings]\nstrict = true\n")
    monkeypatch.setenv("ANYTORCH_CONFIG", str(tmp_path / "another.toml"))
    assert try_out.cache_key(snapshot()) == before
    (tmp_path / "adapter.toml").write_text('[settings]\nwebgpu_adapter = "llvmpipe"\n')
    monkeypatch.setenv("ANYTORCH_CONFIG", str(tmp_path / "adapter.toml"))
    by_file = try_out.cache_key(snapshot())
    monkeypatch.setenv("ANYTORCH_THREADS", "1")
    assert len({before, by_file, try_out.cache_key(snapshot())}) == 3


@pytest.mark.parametrize("code", ["crashed", "timed-out"])
def test_a_bad_moment_is_not_remembered(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    report = try_out.TorchReport("2.13.0", backends={"xpu": BackendReport("xpu", code=code)})
    monkeypatch.setattr(try_out, "run_children", lambda: report)
    try_out.try_out(snapshot())
    assert Store("devices").entries() == {}


def test_a_damaged_cache_is_not_used_and_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_out, "run_children", lambda: try_out.TorchReport("2.13.0"))
    path = settings.cache_folder() / "devices.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{broken")
    assert try_out.try_out(snapshot()).version == "2.13.0"
    assert path.read_bytes() == b"{broken"


def test_an_entry_of_another_shape_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_out, "run_children", lambda: try_out.TorchReport("2.13.0"))
    machine = snapshot()
    Store("devices").put(try_out.cache_key(machine), {"backends": {"cpu": {"surprise": 1}}})
    assert try_out.try_out(machine).cached is False


@pytest.mark.long
def test_a_report_survives_the_way_through_json() -> None:
    from anytorch.probe.facts import as_json

    report = try_out.run_children(["cpu", "webgpu"])
    assert try_out.report_from_json(as_json(report)) == report
