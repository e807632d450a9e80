"""Folders in the published layout: read, written, and refused with the file and the keys named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytorch.errors import AnytorchError, ModelError, UsageError
from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer


@pytest.fixture
def copied(golden: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()  # not copytree: the originals may be read-only, and so would be their copies
    for path in golden.folder("a", "model").iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


@pytest.mark.parametrize(("cls", "part"), [(Kronos, "model"), (KronosTokenizer, "tokenizer")])
@pytest.mark.parametrize("config", ["a", "b"])
def test_round_trip(cls: Any, part: str, config: str, golden: Any, tmp_path: Path) -> None:
    source = golden.folder(config, part)
    module = cls.from_pretrained(source)
    assert not module.training and not any(inner.training for inner in module.modules())
    saved = module.save_pretrained(tmp_path / "new" / part)
    assert json.loads((saved / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    before, after = load_file(source / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype, name
        torch.testing.assert_close(before[name], after[name], rtol=1e-6, atol=0)


def test_parameters_stay_trainable(golden: Any) -> None:
    model = Kronos.from_pretrained(golden.folder("b", "model"))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"time_emb.{name}_embed.emb.weight" for name in ("minute", "hour", "weekday", "day", "month")}


def test_computed_buffers_need_not_be_there(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    save_file({name: value for name, value in state.items() if "inv_freq" not in name}, copied / "model.safetensors")
    assert Kronos.from_pretrained(copied).transformer[0].self_attn.rotary.inv_freq[0] == 1.0


@pytest.mark.parametrize("name", ["mini", "small", "base"])
def test_published_sizes(name: str) -> None:
    """The parameter counts that the published model card gives."""
    checkpoint = PUBLISHED[f"kronos-{name}"]
    with torch.device("meta"):
        model, tokenizer = Kronos(**checkpoint.config), KronosTokenizer(**checkpoint.tokenizer_config)
    wanted = {"mini": 4_108_032, "small": 24_741_376, "base": 102_310_592}[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == wanted
    assert sum(parameter.numel() for parameter in tokenizer.parameters()) == 3_958_042


def test_missing_unknown_and_misshapen_keys_are_named(copied: Path) -> None:
    state = load_file(copied / "model.safetensors")
    del state["norm.weight"]
    state["nonsense"] = torch.zeros(2)
    state["head.proj_s1.bias"] = torch.zeros(3)
    save_file(state, copied / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        Kronos.from_pretrained(copied)
    text = str(caught.value)
    assert "model.safetensors" in text and "missing norm.weight" in text and "unknown nonsense" in text
    assert "head.proj_s1.bias is [3] and should be [16]" in text


def test_a_tokenizer_is_not_a_model(golden: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="this is the configuration of a Kronos tokenizer, not of a model"):
        Kronos.from_pretrained(golden.folder("a", "tokenizer"))
    golden.tokenizer("a").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds a Kronos tokenizer; saving a model there would overwrite it"):
        golden.model("a").save_pretrained(tmp_path)


NASTY: tuple[Any, ...] = (
    -1, 0, 10**9, 2**31, 2**63, 10**400, 0.5, 1e400, -1e400, float("nan"), True, "7", [], {}, None,
)  # fmt: skip


@pytest.mark.parametrize(("cls", "part"), [(Kronos, "model"), (KronosTokenizer, "tokenizer")])
def test_any_number_of_a_config_is_a_model_or_our_error(cls: Any, part: str, golden: Any, tmp_path: Path) -> None:
    """A billion layers, a billion bits: refused before anything is built, not after all memory is gone."""
    source = golden.folder("a", part)
    shutil.copyfile(source / "model.safetensors", tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    refused = 0
    for name in config:
        for value in NASTY:
            (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
            try:
                cls.from_pretrained(tmp_path)
            except AnytorchError as exc:
                refused += 1
                assert len(str(exc)) < 2000
    assert refused > 8 * len(config)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="is not JSON: it is nested too deeply"):
        cls.from_pretrained(tmp_path)


def test_a_file_cut_short_after_loading_changes_nothing(copied: Path) -> None:
    """Its tensors were mapped: whoever replaced the file in place ended the process with SIGBUS."""
    model = Kronos.from_pretrained(copied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    os.truncate(copied / "model.safetensors", 100)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_folders_that_are_none(tmp_path: Path, copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        Kronos.from_pretrained(copied)
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors; it holds config\.json"):
        Kronos.from_pretrained(copied)
    (copied / "model.safetensors").touch()
    (copied / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        Kronos.from_pretrained(copied)
    (copied / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        Kronos.from_pretrained(copied)
    with pytest.raises(ModelError, match=r"unknown model .*deeper': not a folder here, .*kronos-small"):
        Kronos.from_pretrained(tmp_path / "nowhere" / "deeper")
    for empty in ("", " "):
        with pytest.raises(ModelError, match=r"unknown tokenizer .*tiny, kronos-tokenizer-base") as caught:
            KronosTokenizer.from_pretrained(empty)
        assert "kronos-small" not in caught.value.message
    with pytest.raises(ModelError, match="is a file, and a model is a folder"):
        Kronos.from_pretrained(copied / "config.json")


def test_a_hub_name_without_a_network(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="was not downloaded before") as caught:
        Kronos.from_pretrained("kronos-small", local_files_only=True, cache_dir=tmp_path)
    said = caught.value.hint
    assert "hf download NeoQuasar/Kronos-small --local-dir Kronos-small && " in said
    assert "hf download NeoQuasar/Kronos-Tokenizer-base --local-dir Kronos-Tokenizer-base" in said
    assert "--model Kronos-small --tokenizer Kronos-Tokenizer-base" in said and "--context" not in said
    with pytest.raises(ModelError, match="was not downloaded before") as caught:
        Kronos.from_pretrained("kronos-mini", local_files_only=True, cache_dir=tmp_path)
    assert "--tokenizer Kronos-Tokenizer-2k --context 2048" in caught.value.hint
    with pytest.raises(ModelError, match="was not downloaded before") as caught:
        KronosTokenizer.from_pretrained("somebody/some-tokenizer", local_files_only=True, cache_dir=tmp_path)
    assert "hf download somebody/some-tokenizer --local-dir some-tokenizer;" in caught.value.hint


def test_impossible_shapes() -> None:
    config = {**PUBLISHED["kronos-mini"].config, "d_model": 20, "n_heads": 5}
    with pytest.raises(UsageError, match="d_model 20 must be a multiple of 2 × 4 heads"):
        Kronos(**config)
    with pytest.raises(UsageError, match="group_size 3 does not divide"):
        KronosTokenizer(**{**PUBLISHED["kronos-mini"].tokenizer_config, "group_size": 3})


def test_a_padding_mask_is_refused(golden: Any) -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(UsageError, match="padding_mask is not supported"):
        golden.model("a")(ids, ids, padding_mask=torch.ones(1, 3))
    with pytest.raises(UsageError, match="needs s1_targets"):
        golden.model("a")(ids, ids, use_teacher_forcing=True)


def test_the_names_of_the_hub_s_own_loader(golden: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_pretrained` and `save_pretrained` by the argument names that programs of the original use."""
    folder = golden.folder("a", "model")
    model = Kronos.from_pretrained(
        pretrained_model_name_or_path=str(folder), force_download=True, map_location="cpu", strict=True
    )
    assert (model.save_pretrained(save_directory=tmp_path / "saved") / "model.safetensors").is_file()
    told: dict[str, Any] = {}

    class Hub:
        def __init__(self, token: str | None = None) -> None:
            told["token"] = token

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            told["made"] = options
            return type("Made", (), {"repo_id": f"me/{repo_id}"})()

        def upload_folder(self, repo_id: str, folder_path: Path, **options: Any) -> str:
            told["files"] = sorted(path.name for path in Path(folder_path).iterdir())
            told["sent"] = options
            return f"https://hub/{repo_id}"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert model.push_to_hub("mine", private=True, token="secret", commit_message="new") == "https://hub/me/mine"
    assert told["files"] == ["config.json", "model.safetensors"] and told["token"] == "secret"
    assert told["made"] == {"private": True, "exist_ok": True} and told["sent"]["commit_message"] == "new"
    told.clear()
    model.save_pretrained(tmp_path / "again", push_to_hub=True)
    assert told["files"] == ["config.json", "model.safetensors"]
    with pytest.raises(UsageError, match="save_pretrained has no argument 'privat'"):
        model.save_pretrained(tmp_path / "no", privat=True)


def test_force_download_reaches_the_hub(monkeypatch: pytest.MonkeyPatch, golden: Any) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(golden.folder("a", "model"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    Kronos.from_pretrained("kronos-small", force_download=True, revision="main")
    assert asked["name"] == "NeoQuasar/Kronos-small" and asked["force_download"] and asked["revision"] == "main"
    with pytest.raises(ModelError, match="not of a tokenizer"):  # the fake hub has but this one folder
        KronosTokenizer.from_pretrained("Kronos-Mini")
    assert asked["name"] == "NeoQuasar/Kronos-Tokenizer-2k", "the tokenizer of the pair"


def test_changes_of_the_configuration(golden: Any) -> None:
    model = Kronos.from_pretrained(golden.folder("a", "model"), attn_dropout_p=0.5)
    assert (
        model.attn_dropout_p == model.transformer[0].self_attn.attn_dropout_p == model.config["attn_dropout_p"] == 0.5
    )
    with pytest.raises(UsageError, match="no argument 'attn_dropout'\nhint: did you mean 'attn_dropout_p'"):
        Kronos.from_pretrained(golden.folder("a", "model"), attn_dropout=0.5)


def test_what_is_missing_may_be_drawn_anew(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = load_file(copied / "model.safetensors")
    wanted = state["norm.weight"]
    del state["head.proj_s2.bias"]
    save_file({**state, "nonsense": torch.zeros(2)}, copied / "model.safetensors")
    model = Kronos.from_pretrained(copied, strict=False)
    assert "drawn anew: head.proj_s2.bias; left out: nonsense" in caplog.text
    assert torch.equal(model.norm.weight, wanted) and (model.head.proj_s2.bias == 0).all()
    assert not any(value.is_meta for value in model.state_dict().values())
    with pytest.raises(ModelError, match=r"missing head\.proj_s2\.bias"):
        Kronos.from_pretrained(copied)


@pytest.mark.parametrize(("cls", "bits"), [(Kronos, 8), (KronosTokenizer, 8)])
def test_tiny_by_its_name(cls: Any, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cls.from_pretrained("tiny").s1_bits == bits
    (tmp_path / "tiny").mkdir()  # a folder of that name is what is meant
    with pytest.raises(ModelError, match=r"tiny has no config\.json"):
        cls.from_pretrained("tiny")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("s1_bits", "ten", "config.json: s1_bits is 'ten', not a whole number"),
        ("n_layers", 2.5, "n_layers is 2.5, not a whole number"),
        ("d_model", True, "d_model is True, not a whole number"),
        ("ffn_dropout_p", None, "ffn_dropout_p is None, not a number"),
        ("ffn_dropout_p", 1.5, "ffn_dropout_p is 1.5; use a number from 0 to 1"),
        ("learn_te", "yes", "learn_te is 'yes', not true or false"),
    ],
)
def test_values_that_are_none(key: str, value: Any, words: str, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=words):
        Kronos.from_pretrained(copied)


def test_a_name_that_is_no_name() -> None:
    with pytest.raises(ModelError, match="the name of a tokenizer must be a path or a str, not a dict"):
        KronosTokenizer.from_pretrained({"d_model": 32})
