"""Fine-tuning: what is optimised is what forecasts compute, and a run does what its plan says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from anytorch.errors import AnytorchError, InputError, UsageError
from anytorch.forecast.model import Kronos, KronosTokenizer
from anytorch.forecast.training import TrainingPlan, finetune_predictor, finetune_tokenizer, loop
from anytorch.forecast.training.finetune import PredictorObjective, TokenizerObjective, as_generated, merged, with_lora
from anytorch.forecast.training.loop import learning_rate, order_of
from anytorch.quant.lora import LoRALinear
from anytorch.train import World, number, own_device


@pytest.fixture
def model(model_config: dict[str, Any]) -> Kronos:
    torch.manual_seed(1)
    return Kronos(**model_config).eval()


@pytest.fixture
def tokenizer(tokenizer_config: dict[str, Any]) -> KronosTokenizer:
    torch.manual_seed(2)
    return KronosTokenizer(**tokenizer_config).eval()


def apart(one: torch.nn.Module, other: torch.nn.Module, start: torch.nn.Module) -> float:
    """How far two trained models are from each other, against how far training has moved them."""
    first, second, begun = (torch.cat([p.flatten() for p in m.parameters()]).detach() for m in (one, other, start))
    return float((first - second).norm() / (first - begun).norm())


def random_tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    stamps = torch.stack([torch.randint(0, size, (2, rows), generator=made) for size in (60, 24, 7, 32, 13)], dim=-1)
    return (*(torch.randint(0, 16, (2, rows), generator=made) for _ in range(2)), stamps)


def test_training_computes_what_generation_will(model: Kronos) -> None:
    """Row t of one pass is the generation step after row t: its s1 logits, and its s2 logits given the s1 that came."""
    s1, s2, stamps = random_tokens(9)
    with torch.no_grad():
        first, second = as_generated(model, s1, s2, stamps)
        for row in range(8):
            upto = slice(0, row + 1)
            logits, context = model.decode_s1(s1[:, upto], s2[:, upto], stamps[:, upto])
            torch.testing.assert_close(first[:, row], logits[:, -1], atol=1e-5, rtol=1e-5)
            known = model.decode_s2(context, s1[:, row + 1 : row + 2])
            torch.testing.assert_close(second[:, row], known[:, -1], atol=1e-5, rtol=1e-5)


def test_validation_does_not_see_the_future(model: Kronos, tokenizer: KronosTokenizer) -> None:
    """The original's eval-mode s2 path does: its logits of early rows change with later ones."""
    s1, s2, stamps = random_tokens(9)
    later1, later2 = s1.clone(), s2.clone()
    later1[:, 6:], later2[:, 6:] = (s1[:, 6:] + 3) % 16, (s2[:, 6:] + 5) % 16
    with torch.no_grad():
        ours, theirs = (as_generated(model, a, b, stamps)[1][:, :5] for a, b in ((s1, s2), (later1, later2)))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        published = [
            model(a[:, :-1], b[:, :-1], stamps[:, :-1], use_teacher_forcing=True, s1_targets=a[:, 1:])[1][:, :5]
            for a, b in ((s1, s2), (later1, later2))
        ]
    assert (published[0] - published[1]).abs().max() > 1e-3
    assert PredictorObjective(model, tokenizer).train().tokenizer.training is False


def test_the_tokenizers_loss_is_the_published_one(tokenizer: KronosTokenizer) -> None:
    values = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0))
    loss, parts = TokenizerObjective(tokenizer, World(torch.device("cpu")))(values, torch.zeros(3, 7, 5))
    (coarse, whole), codes, _, _ = tokenizer(values)
    want = ((coarse - values).square().mean() + (whole - values).square().mean() + codes) / 2
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(parts["codes"], codes)


def test_from_data_to_a_model_that_loads(
    market: Any, shape: dict[str, Any], tokenizer_config: Any, model_config: Any, tmp_path: Path
) -> None:
    before = torch.get_rng_state()
    seen: list[tuple[int, int]] = []
    first = finetune_tokenizer(
        market,
        output=tmp_path / "tok",
        tokenizer=tokenizer_config,
        progress=lambda done, total, what: seen.append((done, total)),
        **{**shape, "steps_per_epoch": 30},
    )
    assert first.first_loss is not None and first.best_loss < 0.8 * first.first_loss
    assert seen[-1] == (30, 30)
    second = finetune_predictor(
        market,
        output=tmp_path / "model",
        model=model_config,
        tokenizer=first.folder,
        **{**shape, "steps_per_epoch": 30, "evaluate_every": 10},
    )
    assert second.first_loss is not None and second.best_loss < second.first_loss
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers are the caller's"
    loaded = Kronos.from_pretrained(second.folder)
    assert loaded.config == model_config
    assert sorted(p.name for p in first.folder.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in second.folder.iterdir()) == [
        *("anytorch.json", "config.json", "model.safetensors", "tokenizer")
    ]
    summary = json.loads((tmp_path / "model" / "summary.json").read_text())
    assert summary["kind"] == "model" and summary["data"]["windows"]["train"] > 0
    assert [entry["step"] for entry in second.history if "validation" in entry] == [0, 10, 20, 30]
    assert (tmp_path / "model" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    # What was validated is what was saved.
    run = finetune_predictor(
        market,
        output=tmp_path / "again",
        model=second.folder,
        tokenizer=first.folder,
        **{**shape, "steps_per_epoch": 1},
    )
    assert run.first_loss == pytest.approx(second.best_loss, abs=1e-6)


def test_the_published_objective(
    market: Any, shape: dict[str, Any], tokenizer: Any, model_config: Any, tmp_path: Path
) -> None:
    done = finetune_predictor(
        market,
        output=tmp_path,
        model=model_config,
        tokenizer=tokenizer,
        objective="published",
        **{**shape, "steps_per_epoch": 25},
    )
    assert done.first_loss is not None and done.best_loss < done.first_loss
    with pytest.raises(UsageError, match="use one of generation, published"):
        finetune_predictor(
            market, output=tmp_path / "x", model=model_config, tokenizer=tokenizer, objective="other", **shape
        )


def test_pieces_of_a_step_add_up_to_the_step(
    market: Any, shape: dict[str, Any], tokenizer: Any, model_config: Any, tmp_path: Path
) -> None:
    # AdamW divides by the gradient's own size. Where the true gradient is 0 (the bias of a key) that would blow up the
    # last bit of a sum; its epsilon decides what counts as nothing.
    shape = {**shape, "epsilon": 1e-4}
    states = []
    for name, change in (
        ("whole", {"batch_size": 8}),
        ("pieces", {"batch_size": 2, "accumulate": 4}),
        ("other", {"batch_size": 8, "seed": 5}),
    ):
        torch.manual_seed(0)
        done = finetune_predictor(
            market, output=tmp_path / name, model=Kronos(**model_config), tokenizer=tokenizer, **{**shape, **change}
        )
        states.append(Kronos.from_pretrained(done.folder))
    torch.manual_seed(0)
    start = Kronos(**model_config)
    assert apart(states[0], states[1], start) < 1e-4
    assert apart(states[0], states[2], start) > 0.1, "the measure tells different runs apart"


def test_it_stops_when_nothing_improves(
    market: Any, shape: dict[str, Any], tokenizer: Any, model_config: Any, tmp_path: Path
) -> None:
    done = finetune_predictor(
        market,
        output=tmp_path,
        model=model_config,
        tokenizer=tokenizer,
        **{**shape, "learning_rate": 1e-12, "evaluate_every": 1, "patience": 2, "clip_norm": 1e-9, "seed": 3},
    )
    assert done.stopped_early and done.steps < 8 and done.best_step < done.steps


def test_a_loss_that_is_no_number_is_an_error(
    market: Any, shape: dict[str, Any], tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(AnytorchError, match="training has diverged"):
        finetune_predictor(market, output=tmp_path, model=model, tokenizer=tokenizer, **shape)


@pytest.mark.parametrize("other", [False, True])
def test_a_step_that_cannot_be_repeated_to_the_bit_is_taken_and_told(
    other: bool,
    market: Any,
    shape: dict[str, Any],
    tokenizer: Any,
    model_config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A device without an algorithm in a fixed order for one operation is no reason not to train; other errors are."""
    inside: list[bool] = []

    @contextmanager
    def strict(device: torch.device) -> Iterator[None]:
        inside.append(True)
        raise RuntimeError("out of luck" if other else "sum_by_chance does not have a deterministic implementation\n…")
        yield

    monkeypatch.setattr(loop, "repeatable", strict)
    train = partial(finetune_predictor, market, output=tmp_path, model=model_config, tokenizer=tokenizer, **shape)
    if other:
        with pytest.raises(RuntimeError, match="out of luck"):
            train()
        return
    with caplog.at_level("WARNING", "anytorch"):
        assert train().steps == 8
    assert len(inside) == 1 and "may end with slightly different weights: sum_by_chance" in caplog.text


# --- LoRA ------------------------------------------------------------------------------------------------------------


def test_lora_starts_from_the_model_and_merges_into_it(model: Kronos) -> None:
    s1, s2, stamps = random_tokens(6)
    before = model.decode_s1(s1, s2, stamps)[0]
    names = list(model.state_dict())
    with_lora(model, TrainingPlan(lora_rank=2))
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    assert 0 < trained < sum(value.numel() for value in model.parameters()) / 2
    torch.testing.assert_close(model.decode_s1(s1, s2, stamps)[0], before, atol=0, rtol=0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.lora_b.normal_()
    changed = model.decode_s1(s1, s2, stamps)[0]
    assert (changed - before).abs().max() > 1e-2
    whole = merged(model)
    assert list(whole.state_dict()) == names
    torch.testing.assert_close(whole.decode_s1(s1, s2, stamps)[0], changed, atol=1e-4, rtol=1e-4)
    assert any(isinstance(module, LoRALinear) for module in model.modules()), "the model itself is left alone"


def test_lora_leaves_the_weights_it_stands_on(
    market: Any, shape: dict[str, Any], tokenizer: Any, model: Kronos, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "start")
    done = finetune_predictor(
        market,
        output=tmp_path / "run",
        model=tmp_path / "start",
        tokenizer=tokenizer,
        **{**shape, "lora_rank": 2, "steps_per_epoch": 12},
    )
    assert done.first_loss is not None and done.best_loss < done.first_loss
    start, end = (Kronos.from_pretrained(folder).state_dict() for folder in (tmp_path / "start", done.folder))
    assert torch.equal(start["embedding.emb_s1.weight"], end["embedding.emb_s1.weight"])
    assert not torch.equal(start["transformer.0.ffn.w1.weight"], end["transformer.0.ffn.w1.weight"])


# --- plans and mistakes ----------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 1000, 1.0, 0.1) for step in range(1001)]
    assert rates[0] == pytest.approx(0.1) and rates[100] == pytest.approx(1.0) and rates[1000] < 1e-4
    assert rates[:101] == sorted(rates[:101]) and rates[100:] == sorted(rates[100:], reverse=True)


def test_every_epoch_visits_every_window_in_an_order_of_its_own() -> None:
    first, second = order_of(0, 50, 7), order_of(1, 50, 7)
    assert sorted(first) == sorted(second) == list(range(50))
    assert list(first) != list(second) and list(first) == list(order_of(0, 50, 7))


def test_mistakes(market: Any, shape: dict[str, Any], tokenizer: Any, model_config: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'batch_size'"):
        finetune_predictor(market, output=tmp_path, model=model_config, tokenizer=tokenizer, batchsize=3)
    with pytest.raises(InputError, match="fewer than one step of 65536"):
        finetune_predictor(
            market, output=tmp_path, model=model_config, tokenizer=tokenizer, **{**shape, "batch_size": 65_536}
        )
    with pytest.raises(UsageError, match="they do not match"):
        wrong = {**model_config, "s2_bits": 5}
        finetune_predictor(market, output=tmp_path, model=wrong, tokenizer=tokenizer, **shape)
    with pytest.raises(
        AnytorchError, match="the dictionary for a new model lacks s1_bits, s2_bits, n_layers"
    ) as caught:
        finetune_predictor(market, output=tmp_path, model={"d_model": 32}, tokenizer=tokenizer)
    assert "all arguments of Kronos must be there" in str(caught.value)
    with pytest.raises(UsageError, match="Kronos has no argument 'width'"):
        finetune_predictor(market, output=tmp_path, model={**model_config, "width": 3}, tokenizer=tokenizer)
    with pytest.raises(UsageError, match="max_context is '8', not a whole number"):
        finetune_predictor(market, output=tmp_path, model=model_config, tokenizer=tokenizer, max_context="8")
    with pytest.raises(UsageError, match="resume='always': use True, False or"):
        finetune_predictor(market, output=tmp_path, model=model_config, tokenizer=tokenizer, resume="always")
    with pytest.raises(UsageError, match="epochs=0"):
        TrainingPlan(epochs=0)
    with pytest.raises(UsageError, match="learning_rate"):
        TrainingPlan(learning_rate=0)


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE='two' is not a number"):
        number("WORLD_SIZE", 1)
    assert own_device("cpu", 3).type == "cpu"


def test_each_process_takes_the_card_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for a machine that has two cards."""
    from types import SimpleNamespace

    from anytorch import train
    from anytorch.errors import DeviceIndexError, DeviceUnavailable

    def resolve(request: str | None, strict: bool = False) -> Any:
        index = int((request or "").partition(":")[2] or 0)
        if index > 1:
            raise DeviceIndexError("there are 2 cards")
        return SimpleNamespace(device=torch.device("meta", index), chosen=SimpleNamespace(backend="card"))

    chosen: list[int] = []
    monkeypatch.setattr(train, "resolve", resolve)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    assert own_device("auto", 1) == torch.device("meta", 1) and chosen == [1]
    with pytest.raises(UsageError, match="names one card"):
        own_device("card:1", 0)
    assert own_device("auto", 2) == torch.device("meta", 0) and chosen == [1, 0]  # the third shares the first one's
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    with pytest.raises(DeviceUnavailable, match="process 2 of this machine has no card"):
        own_device("auto", 2)


def test_a_run_that_was_killed_before_its_first_save_leaves_no_trace(
    market: Any, shape: dict[str, Any], tokenizer: Any, model_config: Any, tmp_path: Path
) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 2, "loss": 9.0}\n{"step": 4, "lo')
    done = finetune_predictor(
        market, output=tmp_path, model=model_config, tokenizer=tokenizer, **{**shape, "steps_per_epoch": 2}
    )
    assert [entry["step"] for entry in done.history] == [0, 2, 2] and done.resumed_from == 0
    assert all(entry.get("loss") != 9.0 for entry in done.history)


def test_the_modules_handed_in_stay_as_they_are(
    market: Any, shape: dict[str, Any], tokenizer: Any, model: Kronos, tmp_path: Path
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = finetune_predictor(
        market, output=tmp_path, model=model, tokenizer=tokenizer, **{**shape, "steps_per_epoch": 2, "lora_rank": 2}
    )
    assert done.steps == 2 and not model.training
    assert before.keys() == model.state_dict().keys(), "no adapters"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in (*model.parameters(), *tokenizer.parameters()))


def test_another_run_is_forgotten_where_that_is_asked_for(
    market: Any, shape: dict[str, Any], tokenizer: Any, model_config: Any, tmp_path: Path, caplog: Any
) -> None:
    short = {**shape, "steps_per_epoch": 2}
    begin = partial(finetune_predictor, market, output=tmp_path, model=model_config, tokenizer=tokenizer)
    begin(**short)
    with pytest.raises(InputError, match="holds a run with another plan"):
        begin(**{**short, "batch_size": 4})
    assert begin(**short, resume="same").resumed_from == 2 and not caplog.text
    done = begin(**{**short, "batch_size": 4}, resume="same")
    assert done.resumed_from == 0 and done.steps == 2
    assert (
        "another plan, other data or another model: the earlier run is discarded, and training starts over"
        in caplog.text
    )


def test_tiny_and_the_short_names(market: Any, shape: dict[str, Any], tmp_path: Path) -> None:
    """The names that load_predictor takes are those to train from."""
    short = {**shape, "steps_per_epoch": 1, "validation_windows": 4}
    one = finetune_tokenizer(market, output=tmp_path / "t", tokenizer="tiny", **short)
    two = finetune_predictor(market, output=tmp_path / "m", model="tiny", tokenizer=one.folder, **short)
    three = finetune_predictor(market, output=tmp_path / "n", model="tiny", tokenizer="tiny", **short)
    assert all((done.folder / "model.safetensors").is_file() for done in (one, two, three))
    with pytest.raises(
        AnytorchError, match="NeoQuasar/Kronos-small"
    ):  # there is no network here: it knew where to look
        finetune_predictor(
            market, output=tmp_path / "o", model="kronos-small", tokenizer="kronos-tokenizer-base", **short
        )


def test_prices_that_are_a_flat_line_to_the_model(
    shape: dict[str, Any], tokenizer: Any, model_config: Any, tmp_path: Path, caplog: Any
) -> None:
    from anytorch.forecast.candles.generate import sample_candles

    coin = sample_candles(300, seed=2)
    train = partial(finetune_predictor, model=model_config, tokenizer=tokenizer, **{**shape, "steps_per_epoch": 1})
    train(coin, output=tmp_path / "usual")
    assert not caplog.text
    prices = ["open", "high", "low", "close"]
    train(coin.assign(**{name: coin[name] * 1e-8 for name in prices}), output=tmp_path / "small")
    assert "columns open, high, low, close: the values vary by only" in caplog.text
    assert "give them in a smaller unit, in training and in forecasts" in caplog.text
