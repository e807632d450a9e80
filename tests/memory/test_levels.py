"""The levels of a machine: budgets given or taken from what is free, speeds measured once and cached; and the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import anytorch
from anytorch.cache import Store
from anytorch.cli.main import main
from anytorch.errors import UsageError
from anytorch.memory import levels
from anytorch.memory.levels import create_tiers
from anytorch.memory.types import Speeds


def test_the_package_is_still_the_question() -> None:
    use = anytorch.memory("cpu")
    assert use.total is not None and use.total > 0
    assert callable(anytorch.memory.fit) and "fit" in anytorch.memory.__all__
    with pytest.raises(AttributeError, match="nonsense"):
        anytorch.memory.nonsense  # noqa: B018


def test_two_levels_or_three(tmp_path: Path) -> None:
    two = create_tiers("cpu", device_budget="1GB", disk=tmp_path, speeds=Speeds(1, 2))
    assert [level.kind for level in two.levels] == ["device", "disk"] and two.shared
    assert two.device.capacity == 2**30 and two.levels[1].read_gb_per_s == 2
    three = create_tiers("cpu", device_budget="1GB", host_budget="2GB", disk=tmp_path, speeds=Speeds(1, 2))
    assert [level.kind for level in three.levels] == ["device", "host", "disk"] and not three.shared
    assert not three.levels[1].pinned, "the CPU gains nothing by it"
    alone = create_tiers("cpu", host_budget="1GB", disk=False, speeds=Speeds())
    assert [level.kind for level in alone.levels] == ["device"]
    free = create_tiers("cpu", disk=tmp_path, speeds=Speeds())
    assert 0 < free.device.capacity < (anytorch.memory("cpu").total or 0)
    with pytest.raises(UsageError, match="device_budget"):
        create_tiers("cpu", device_budget="much", disk=False)


def test_the_device_itself_has_a_measured_bandwidth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LINK_NBYTES", 2**20)
    plain = create_tiers("cpu", device_budget="1GB", disk=False, measure=False)
    assert plain.device.read_gb_per_s is None  # no plan needs it, so none waits for it
    measured = create_tiers("cpu", device_budget="1GB", disk=False, measure=False, device_bandwidth=True)
    assert measured.device.read_gb_per_s is not None and measured.device.read_gb_per_s > 0.01
    again = create_tiers("cpu", device_budget="1GB", disk=False, measure=False, device_bandwidth=True)
    assert again.device.read_gb_per_s == measured.device.read_gb_per_s  # remembered


def test_nobody_knows_how_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.devices.types import MemoryUse

    monkeypatch.setattr(levels, "memory", lambda device: MemoryUse())
    with pytest.raises(UsageError, match="is unknown") as caught:
        create_tiers("cpu", disk=False)
    assert 'device_budget="8GB"' in caught.value.hint


def test_measurements_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "DISK_NBYTES", 2**20)
    monkeypatch.setattr(levels, "LINK_NBYTES", 2**20)
    found = levels.disk_speed(tmp_path / "new" / "folder")
    assert found.read_gb_per_s and found.write_gb_per_s
    assert found.read_gb_per_s > 0 and found.write_gb_per_s > 0
    assert levels.link_speed(torch.device("cpu"))
    assert len(Store("tiers").entries()) == 2
    monkeypatch.setattr(levels, "_disk", lambda folder: pytest.fail("measured again"))
    assert levels.disk_speed(tmp_path) == found
    assert not list((tmp_path / "new" / "folder").iterdir()), "nothing is left behind"


def test_nothing_is_written_beside_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LARGE", 2**20)
    save_file({"a": torch.zeros(10**6)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(levels, "disk_speed", lambda folder: pytest.fail("wrote into the model's folder"))
    found = create_tiers("cpu", device_budget="1GB", disk=tmp_path)
    assert found.levels[1].read_gb_per_s and found.levels[1].write_gb_per_s is None


def test_a_disk_that_cannot_be_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert levels.disk_speed(tmp_path / "file" / "x") == levels.DiskSpeed(None, None)
    assert levels.file_speed(tmp_path / "absent") == levels.DiskSpeed(None, None)


@pytest.mark.parametrize(("direct", "buffered", "chosen"), [(3.0, 3.5, True), (3.0, 4.0, False), (8.0, 4.0, True)])
def test_a_disk_is_read_the_way_that_measured_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: float, buffered: float, chosen: bool
) -> None:
    monkeypatch.setattr(levels, "read_rates", lambda pieces, buffer: [direct, buffered])
    monkeypatch.setattr(levels, "DISK_NBYTES", 2**20)
    monkeypatch.setattr(levels, "LARGE", 2**20)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(10**6)}, folder / "model.safetensors")
    for place in (tmp_path / "disk", folder):
        disk = create_tiers("cpu", device_budget="1GB", disk=place).levels[1]
        assert disk.direct is chosen and disk.read_gb_per_s == (direct if chosen else buffered)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    x = torch.randn(2, 64)
    want = model(x)
    anytorch.memory.fit(model, "cpu", device_budget="40KB", disk=tmp_path / "disk")
    handle = anytorch.memory.fitted(model)
    assert handle.reader.direct is chosen and torch.equal(model(x), want)
    assert all(file.direct is chosen for (_, asked), file in handle.reader._files.items() if asked is chosen)


def test_both_ways_of_reading_are_measured(tmp_path: Path) -> None:
    from anytorch.memory.buffers import host_buffer
    from anytorch.memory.images import Piece

    (tmp_path / "data").write_bytes(bytes(range(256)) * 8192)
    buffer = host_buffer(2**21)
    rates = levels.read_rates([Piece(str(tmp_path / "data"), 0, 2**21, 0)], buffer)
    assert len(rates) == 2 and min(rates) > 0
    assert buffer[:256].tolist() == list(range(256))


def test_tiers_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(levels, "DISK_NBYTES", 2**20)
    assert main(["tiers", "--device", "cpu", "--disk", str(tmp_path), "--refresh"]) == 0
    assert "levels of memory" in capsys.readouterr().out
    assert main(["--json", "tiers", "--device", "cpu", "--disk", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["shared"] is True and [level["kind"] for level in told["levels"]] == ["device", "disk"]


def test_fit_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, vocab_size=50
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    command = ["fit", str(tmp_path / "model"), "--device", "cpu", "--device-budget", "400KB"]
    assert main([*command, "--plot", str(tmp_path / "plan.svg")]) == 0
    said = capsys.readouterr().out
    assert "streams per pass" in said and "anytorch.memory.load(" in said and (tmp_path / "plan.svg").exists()
    assert main(["--json", *command]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["resident_nbytes"] + told["ring_nbytes"] <= 400 * 1024 and told["disk_nbytes"] > 0
    assert main(["fit", str(tmp_path / "absent"), "--device", "cpu"]) == 2
    assert main([*command[:-1], "1KB"]) == 1
    assert "smallest device budget" in capsys.readouterr().err
