"""The documented names: `auto_configure_backend` and `BackendOptimizer`, as the document uses them."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yirage as yr
from anytorch_compat import advice as quick
from anytorch_compat import optimizer as module
from anytorch_compat.optimizer import BackendOptimizer

import anytorch
from anytorch.devices.choose import devices
from anytorch.devices.tune.store import Tuned
from anytorch.devices.types import Candidate, Caps, State
from anytorch.errors import ConfigError, DeviceFallbackWarning
from anytorch.probe.facts import Cpu

pytest.importorskip("torch")


def test_the_documented_configuration_samples(capsys: pytest.CaptureFixture[str]) -> None:
    # seeds/2-yirage.md, "advanced": as written
    config = yr.auto_configure_backend()
    print("Optimal config:", config)
    optimizer = yr.BackendOptimizer()
    optimizer.print_system_info()
    out = capsys.readouterr().out
    assert "Optimal config:" in out and "devices, best first:" in out and "cpu" in out
    for key in (
        "backend",
        "device_name",
        "threads",
        "dtype",
        "autocast_dtype",
        "matmul_precision",
        "batch_size",
        "memory",
    ):
        assert key in config
    assert config["threads"] >= 1 and config["batch_size"] >= 1 and config["source"] == "facts"
    json.dumps(config, allow_nan=False)


def test_the_documented_save_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    has_cuda = any(d.torch_type == "cuda" and d.state is State.USABLE for d in devices(tried="needed"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # seeds/2-yirage.md, "configuration": as written
        optimizer = yr.BackendOptimizer()
        optimizer.save_config("optimal_config.json", backend="cuda")
        config = optimizer.load_config("optimal_config.json")
    fallbacks = [w for w in caught if issubclass(w.category, DeviceFallbackWarning)]
    assert len(fallbacks) == (0 if has_cuda else 1) == len(caught)
    assert config["requested"] == "cuda" and config["fell_back"] is (not has_cuda)
    if not has_cuda:
        assert config["backend"] == "cpu" and "cuda" in config["warning"] and "Using cpu" in str(fallbacks[0].message)
    assert config == json.loads(Path("optimal_config.json").read_text())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"backend": 3, "format": 1}', '{"backend": "cpu"}', "\x00"])
def test_a_damaged_configuration_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        BackendOptimizer().load_config(path)
    assert path.read_text() == content


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        BackendOptimizer().load_config(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        BackendOptimizer().save_config(tmp_path / "file" / "c.json", backend="cpu")


def test_a_configuration_of_another_machine_is_loaded_with_a_warning(tmp_path: Path) -> None:
    optimizer = BackendOptimizer()
    path = optimizer.save_config(tmp_path / "c.json", backend="cpu")
    data = json.loads(path.read_text())
    data["machine"]["torch"], data["machine_key"] = "2.7.0+none", "0" * 16
    path.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match=r"another machine.*torch was 2\.7\.0\+none"):
        assert optimizer.load_config(path)["backend"] == "cpu"


def test_optimize_measures_and_stores_only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(module, "tune", lambda backend, **options: calls.append((backend, options)) or "the plan")
    monkeypatch.setattr(module, "apply", lambda plan: calls.append(plan))
    assert BackendOptimizer().optimize("cpu", duration_s=1.0) == "the plan"
    assert calls == [("cpu", {"duration_s": 1.0, "progress": None})]
    BackendOptimizer().optimize("cpu", apply_plan=True)
    assert calls[-1] == "the plan"


CPU = Cpu("x", "y", logical=16, physical=8, affinity=None, quota=None)


@pytest.mark.parametrize(
    ("free", "on_host", "batch"),
    [(139 * 2**30, False, 256), (2 * 2**30, False, 4), (None, False, 1), (64 * 2**30, True, 32), (0, True, 1)],
)
def test_the_batch_hint_fits_the_memory(free: int | None, on_host: bool, batch: int) -> None:
    assert quick.batch_hint(free, on_host, CPU) == batch
    assert batch == 1 or batch * quick.SAMPLE_NBYTES <= (free or 0) / 4


def test_measurements_come_before_facts_and_settings_before_both() -> None:
    caps = Caps(("float32", "bfloat16"), ("float32", "bfloat16"), "bfloat16", peak_tflops={"tf32": 494.7})
    card = Candidate("cuda", "cuda", 0, "NVIDIA H200", State.USABLE, 700, free=2**37, total=2**37, caps=caps)
    plain = quick.advice(card, caps, CPU, None)
    assert plain["autocast_dtype"] == "bfloat16" and plain["matmul_precision"] == "high" and plain["threads"] == 8
    tuned = Tuned("cuda:0", "NVIDIA H200", "2026-11-15", {}, 32, "float32", {}, "k")
    measured = quick.advice(card, caps, CPU, tuned)
    assert measured["autocast_dtype"] is None and measured["dtype"] == "float32" and measured["batch_size"] == 32
    assert measured["source"] == "measured 2026-11-15"
    host = dataclasses.replace(card, backend="cpu", torch_type="cpu")
    with anytorch.use(cpu_dtype="bfloat16", threads=3, matmul_precision="highest"):
        by_hand = quick.advice(host, caps, CPU, tuned)
    assert by_hand["autocast_dtype"] == "bfloat16" and by_hand["threads"] == 3
    assert by_hand["matmul_precision"] == "highest"
