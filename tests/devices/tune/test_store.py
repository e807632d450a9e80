"""Storing a plan beside everything else in the settings file, and refusing it on another machine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anytorch import settings
from anytorch.devices.tune import store
from anytorch.devices.tune.store import Item, TunePlan, apply, trusted_setting, tuned_for, use_tuned
from anytorch.errors import ConfigError
from anytorch.measured.machine import identity, key_of, machine_key, what_changed
from anytorch.measured.verdict import Trial
from anytorch.probe import snapshot
from anytorch.probe.facts import Gpu


def item(setting: str, default: str | int, chosen: str | int) -> Item:
    options = (Trial(str(default), 2.0, 0.1, 9, 1e-6), Trial(str(chosen), 1.0, 0.1, 9))
    return Item(setting, "work", default, chosen, 1.0 if default == chosen else 2.0, "why", options)


def plan(*items: Item, device: str = "cpu", uuid: str | None = None) -> TunePlan:
    facts = identity()
    return TunePlan(
        device, device.split(":")[0], "x", uuid, items, key_of(facts), facts, "2026-11-15T00:00:00+00:00", "0.1.0", 1.0
    )


THREADS = item("threads", 2, 1)
ALL = (THREADS, item("cpu_dtype", "bfloat16", "float32"), item("matmul_precision", "highest", "high"))


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    store._told.clear()
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = identity()
    monkeypatch.setattr(store, "identity", lambda: {**here, "torch": "2.14.0+cpu"})


def test_what_is_stored_is_read_back() -> None:
    path = apply(plan(*ALL, item("batch_size", 1, 8)))
    assert path == settings.settings_file()
    assert settings.read_settings_file()["settings"] == {
        "threads": 1,
        "cpu_dtype": "float32",
        "matmul_precision": "high",
    }
    tuned = tuned_for("cpu")
    assert tuned is not None
    assert tuned.settings == {"threads": 1, "cpu_dtype": "float32", "matmul_precision": "high"}
    assert tuned.batch_size == 8 and tuned.autocast_dtype == "float32" and tuned.key == machine_key()
    assert tuned.measured["threads"]["milliseconds"] == {"2": 2000.0, "1": 1000.0}
    assert tuned.measured["threads"]["gain"] == 2.0


def test_everything_else_in_the_file_stays() -> None:
    settings.write_settings_file(
        {"settings": {"backend": "cpu", "threads": 7}, "tuned": {"GPU-1": {"key": "k"}}, "mine": {"a": [1, 2]}}
    )
    apply(plan(THREADS))
    data = settings.read_settings_file()
    assert data["settings"] == {"backend": "cpu", "threads": 1}
    assert data["mine"] == {"a": [1, 2]} and data["tuned"]["GPU-1"] == {"key": "k"}


def test_a_default_that_is_kept_is_not_written_and_takes_an_earlier_value_of_ours_out() -> None:
    apply(plan(*ALL))
    data = settings.read_settings_file()
    settings.write_settings_file({**data, "settings": {**data["settings"], "matmul_precision": "medium"}})  # by hand
    apply(plan(item("threads", 2, 2), item("cpu_dtype", "bfloat16", "float32")))
    assert settings.read_settings_file()["settings"] == {"cpu_dtype": "float32", "matmul_precision": "medium"}


def test_a_card_is_stored_under_its_uuid() -> None:
    apply(plan(item("batch_size", 1, 64), device="cuda:1", uuid="GPU-5e0a"))
    assert settings.read_settings_file()["tuned"]["GPU-5e0a"]["device"] == "cuda:1"


def test_use_puts_it_in_force() -> None:
    import torch

    apply(plan(*ALL))
    used = use_tuned("cpu")
    assert used.values == {"threads": 1, "cpu_dtype": "float32", "matmul_precision": "high"} and not used.ignored
    assert torch.get_num_threads() == 1 and torch.get_float32_matmul_precision() == "high"


def test_another_machine_is_refused_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    apply(plan(*ALL))
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    on_another_machine(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="anytorch"):
        assert tuned_for("cpu") is None
        assert tuned_for("cpu") is None
    (record,) = caplog.records
    assert "torch was" in record.getMessage() and "is 2.14.0+cpu" in record.getMessage()
    used = use_tuned("cpu")
    assert used.values == {} and set(used.ignored) == {"threads", "cpu_dtype", "matmul_precision"}
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before
    assert trusted_setting("cpu_dtype") == settings.Value(None, "default")


def test_what_was_set_by_hand_or_by_the_environment_always_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    apply(plan(*ALL))
    data = settings.read_settings_file()
    settings.write_settings_file({**data, "settings": {**data["settings"], "matmul_precision": "medium"}})
    monkeypatch.setenv("ANYTORCH_THREADS", "1")
    on_another_machine(monkeypatch)
    used = use_tuned("cpu")
    assert used.values == {"threads": 1, "matmul_precision": "medium"} and set(used.ignored) == {"cpu_dtype"}
    with settings.use(cpu_dtype="float32"):
        assert trusted_setting("cpu_dtype").value == "float32"


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "many", [1], {}])
def test_a_batch_that_is_no_number_is_named(value: object) -> None:
    apply(plan(*ALL, item("batch_size", 1, 8)))
    data = settings.read_settings_file()
    data["tuned"]["cpu"]["batch_size"] = value
    settings.write_settings_file(data)
    with pytest.raises(ConfigError, match=r"\[tuned\.'cpu'\] is invalid"):
        tuned_for("cpu")


def test_nothing_stored_changes_nothing() -> None:
    assert tuned_for("cpu") is None
    used = use_tuned("cpu")
    assert used.values == {} and used.ignored == {} and used.tuned is None
    assert not settings.settings_file().exists()


@pytest.mark.parametrize(
    "content",
    [
        "[settings\n",
        'tuned = "yes"\n',
        "[tuned]\ncpu = 3\n",
        f'[tuned.cpu]\nkey = "{"K" * 4}"\n',
    ],
    ids=["no TOML", "no table", "no table for the device", "no facts"],
)
def test_a_damaged_file_is_said_and_left_as_it_was(content: str) -> None:
    path = settings.settings_file()
    content = content.replace("KKKK", machine_key())
    path.write_text(content)
    with pytest.raises(ConfigError):
        tuned_for("cpu")
    if "key" not in content:
        with pytest.raises(ConfigError):
            apply(plan(THREADS))
    assert path.read_text() == content


def test_the_key_changes_with_what_matters_and_with_nothing_else(tmp_path: Path) -> None:
    here = snapshot()
    changes: list[dict[str, Any]] = [
        {"cpu": dataclasses.replace(here.cpu, model="another")},
        {"cpu": dataclasses.replace(here.cpu, logical=here.cpu.logical + 2)},
        {"cpu": dataclasses.replace(here.cpu, quota=0.5, logical=8, affinity=8)},
        {"gpus": (*here.gpus, Gpu("nvidia", "NVIDIA H200", uuid="GPU-1"))},
        {"nvidia": dataclasses.replace(here.nvidia, driver="580.159.04")},
        {"torch": None},
    ]
    keys = {machine_key(dataclasses.replace(here, **change)) for change in changes}
    assert len(keys | {machine_key(here)}) == len(changes) + 1
    later = dataclasses.replace(
        here,
        memory=dataclasses.replace(here.memory, available=1),
        machine=dataclasses.replace(here.machine, boot_id="another", release="next"),
    )
    assert machine_key(later) == machine_key(here)


def test_what_changed_is_said_in_words() -> None:
    assert (
        what_changed({"torch": "2.12.0", "cpu": "x"}, {"torch": "2.13.0", "cpu": "x"}) == "torch was 2.12.0, is 2.13.0"
    )
    assert "unknown" in what_changed({}, {"cpu": "x"})
