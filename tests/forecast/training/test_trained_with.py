"""A fine-tuned folder knows its tokenizer and its context: it loads with no more than its path, wherever it is moved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from anytorch._version import __version__
from anytorch.errors import InputError, ModelError, UsageError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.checkpoints import FILE, TrainedWith, choose_checkpoint, load_predictor, read_trained_with
from anytorch.forecast.model import Kronos, KronosTokenizer
from anytorch.forecast.model.pretrained import tiny_folder
from anytorch.forecast.training import TrainingPlan, finetune_predictor
from anytorch.forecast.training.finetune import chosen


@pytest.fixture
def tokenizer(tokenizer_config: dict[str, Any]) -> KronosTokenizer:
    torch.manual_seed(2)
    return KronosTokenizer(**tokenizer_config).eval()


@pytest.fixture
def quick(shape: dict[str, Any]) -> dict[str, Any]:
    return {**shape, "steps_per_epoch": 2}


def told_by(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / FILE).read_text())
    assert isinstance(found, dict)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_all_a_forecast_needs(
    market: Any, quick: dict[str, Any], tokenizer: KronosTokenizer, model_config: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / "tok")
    done = finetune_predictor(
        market, output=tmp_path / "run", model=model_config, tokenizer=tmp_path / "tok", max_context=40, **quick
    )
    assert told_by(done.folder) == {
        "tokenizer": "tokenizer", "max_context": 40, "lookback": 12, "horizon": 4, "anytorch": __version__
    }  # fmt: skip
    shutil.rmtree(tmp_path / "tok")  # what it was trained from may go …
    moved = tmp_path / "elsewhere" / "model"
    moved.parent.mkdir()
    done.folder.rename(moved)  # … and the folder may move
    predictor = load_predictor(moved, device="cpu")
    assert predictor.max_context == 40
    for name, value in tokenizer.state_dict().items():
        assert torch.equal(predictor.tokenizer.state_dict()[name], value), name
    ahead = predictor.predict(sample_candles(30, seed=1), pred_len=3, seed=1, verbose=False)
    assert len(ahead) == 3


def test_the_published_files_are_what_they_were(
    market: Any, quick: dict[str, Any], tokenizer: KronosTokenizer, model_config: Any, tmp_path: Path
) -> None:
    done = finetune_predictor(market, output=tmp_path / "run", model=model_config, tokenizer=tokenizer, **quick)
    found = contents(done.folder)
    Kronos.from_pretrained(done.folder).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain" / "tokenizer")
    assert found.pop(FILE)
    assert found == contents(tmp_path / "plain")
    assert json.loads(found["config.json"]) == model_config, "the constructor's arguments, and nothing more"


def test_what_is_given_counts_more(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"tokenizer": "tokenizer", "max_context": 40}))
    mine = choose_checkpoint(tmp_path, "tiny")  # the one it names is not there, and nobody asks for it
    assert (mine.tokenizer, mine.max_context) == (str(tiny_folder("tokenizer")), 40)
    (tmp_path / "tokenizer").mkdir()
    assert choose_checkpoint(tmp_path, None, 30) == choose_checkpoint(tmp_path, tmp_path / "tokenizer", 30)
    assert choose_checkpoint(tmp_path).max_context == 40


def test_a_folder_that_says_nothing_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(ModelError, match="does not say which tokenizer"):
        choose_checkpoint(tmp_path)
    assert choose_checkpoint(tmp_path, "tiny").max_context == 512


@pytest.mark.parametrize("name", ["tiny", "kronos-tokenizer-base", "NeoQuasar/Kronos-Tokenizer-base"])
def test_the_tokenizer_may_be_a_name(tmp_path: Path, name: str) -> None:
    (tmp_path / FILE).write_text(json.dumps({"tokenizer": name, "max_context": 40, "of a later version": [1]}))
    found = choose_checkpoint(tmp_path).tokenizer
    assert found == (str(tiny_folder("tokenizer")) if name == "tiny" else name)


@pytest.mark.parametrize("where", ["tokenizer", "../tok", "/not/there/tok"])
def test_a_tokenizer_that_is_gone(tmp_path: Path, where: str) -> None:
    (tmp_path / FILE).write_text(json.dumps({"tokenizer": where, "max_context": 40}))
    with pytest.raises(ModelError) as caught:
        load_predictor(tmp_path, device="cpu")
    said = str(caught.value)
    assert str(tmp_path) in said and repr(where) in said and f"there is no folder {tmp_path / where}" in said
    assert "--tokenizer" in caught.value.hint


def test_a_path_beside_the_folder(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for folder in (model, tmp_path / "tok"):
        folder.mkdir()
    for named in ("../tok", str(tmp_path / "tok")):
        (model / FILE).write_text(json.dumps({"tokenizer": named, "max_context": 40}))
        assert Path(choose_checkpoint(model).tokenizer).resolve() == (tmp_path / "tok").resolve()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "its tokenizer is None"),
        ('{"tokenizer": " ", "max_context": 40}', "its tokenizer is ' '"),
        ('{"tokenizer": "tiny"}', "its max_context is None"),
        ('{"tokenizer": "tiny", "max_context": true}', "its max_context is True"),
        ('{"tokenizer": "tiny", "max_context": 1}', "its max_context is 1"),
    ],
)
def test_a_file_that_cannot_be_meant_so(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ModelError, match=FILE) as caught:
        choose_checkpoint(tmp_path)
    assert said in str(caught.value)


def test_how_many_rows_a_window_may_have(tmp_path: Path, tokenizer: KronosTokenizer, model_config: Any) -> None:
    short, long = TrainingPlan(lookback=90, horizon=10), TrainingPlan(lookback=500, horizon=100)
    context = {"tiny": 128, str(tiny_folder("model")): 128, "kronos-mini": 2048, "kronos-small": 512}
    for name, rows in context.items():
        assert chosen(name, None, None, short)[2] == rows
        assert chosen(name, tokenizer, None, short)[1:] == (tokenizer, rows)
    assert chosen("tiny", None, None, long)[2] == 600, "it has seen windows as long as that"
    assert chosen("tiny", None, 64, long)[2] == 64
    for unknown in (model_config, Kronos(**model_config)):
        assert chosen(unknown, tokenizer, None, short)[2] == 100
        assert chosen(unknown, "tiny", 64, short)[1:] == (str(tiny_folder("tokenizer")), 64)
        with pytest.raises(UsageError, match="name the tokenizer"):
            chosen(unknown, None, None, short)
    with pytest.raises(UsageError, match="at least 2 rows"):
        chosen(model_config, tokenizer, 1, short)


def test_fine_tuning_goes_on_from_a_folder_alone(
    market: Any, quick: dict[str, Any], tokenizer: KronosTokenizer, model_config: Any, tmp_path: Path
) -> None:
    first = finetune_predictor(
        market, output=tmp_path / "a", model=model_config, tokenizer=tokenizer, max_context=50, **quick
    )
    second = finetune_predictor(market, output=tmp_path / "b", model=first.folder, **quick)
    assert second.first_loss == pytest.approx(first.best_loss, abs=1e-6)
    assert told_by(second.folder) == told_by(first.folder)


def test_a_new_run_in_the_same_folder_has_its_own_tokenizer(
    market: Any, quick: dict[str, Any], tokenizer_config: Any, model_config: Any, tmp_path: Path
) -> None:
    for seed, context in ((1, 40), (2, 50)):
        torch.manual_seed(seed)
        given = KronosTokenizer(**tokenizer_config).eval()
        done = finetune_predictor(
            market, output=tmp_path, model=model_config, tokenizer=given, max_context=context, resume=False, **quick
        )
        loaded = load_predictor(done.folder, device="cpu")
        assert loaded.max_context == context
        assert torch.equal(loaded.tokenizer.embed.weight, given.embed.weight)


def test_killed_between_its_files_the_folder_says_nothing(
    market: Any,
    quick: dict[str, Any],
    tokenizer: KronosTokenizer,
    model_config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Old weights with a new tokenizer, or the reverse, would forecast nonsense without a word."""
    job = {"output": tmp_path, "model": model_config, "tokenizer": tokenizer, **quick}
    done = finetune_predictor(market, **job)
    save = KronosTokenizer.save_pretrained

    def killed(self: KronosTokenizer, folder: str | Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(KronosTokenizer, "save_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune_predictor(market, resume=False, **job)
    assert read_trained_with(done.folder) is None
    monkeypatch.setattr(KronosTokenizer, "save_pretrained", save)
    finetune_predictor(market, **job)
    assert read_trained_with(done.folder) == TrainedWith("tokenizer", 16, 12, 4, __version__)


def test_a_run_of_an_older_version_is_completed_when_it_goes_on(
    market: Any, quick: dict[str, Any], tokenizer: KronosTokenizer, model_config: Any, tmp_path: Path
) -> None:
    job = {"output": tmp_path, "model": model_config, "tokenizer": tokenizer, **quick}
    done = finetune_predictor(market, **job)
    before, state = contents(done.folder), (tmp_path / "last.pt").read_bytes()
    (done.folder / FILE).unlink()
    shutil.rmtree(done.folder / "tokenizer")
    again = finetune_predictor(market, **job)
    assert again.resumed_from == again.steps == done.steps, "the same run, though its context is told anew"
    assert contents(done.folder) == before and (tmp_path / "last.pt").read_bytes() == state
    finetune_predictor(market, max_context=99, **job)
    assert told_by(done.folder)["max_context"] == 99
    with pytest.raises(InputError, match="another plan"):
        finetune_predictor(market, **{**job, "lookback": 13})
