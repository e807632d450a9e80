"""`anytorch forecast` and `anytorch finetune` on the tiny checkpoint that comes with the package."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from anytorch.cli.forecast_answer import forecast_table, short, shorter
from anytorch.cli.main import main
from anytorch.forecast.candles.generate import sample_candles, sample_market


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "abc.csv"
    frame = sample_candles(150, seed=9).rename(columns={"timestamps": "Date", "volume": "Vol", "amount": "Turnover"})
    frame.to_csv(path, index=False)
    return path


def test_sample_works_at_once(cli: Callable[..., Any], tmp_path: Path) -> None:
    """The whole command of the documentation: a table, a file and a picture, with nothing to download."""
    plot, output = tmp_path / "out.png", tmp_path / "out.csv"
    told = cli(
        *("forecast", "--sample", "--horizon", "12", "--samples", "4", "--quantiles", "0.1,0.5,0.9", "--seed", "1"),
        *("--plot", str(plot), "--output", str(output), "--device", "cpu", "--holdout"),
    )
    assert told.status == 0, told.err
    assert plot.read_bytes()[:4] == b"\x89PNG" and plot.stat().st_size > 20_000
    frame = pd.read_csv(output, parse_dates=["timestamps"])
    assert len(frame) == 12 and {"close", "close_q0.1", "close_q0.9", "volume_q0.5"} <= set(frame.columns)
    assert (frame["close_q0.1"] <= frame["close_q0.5"]).all() and (frame["close_q0.5"] <= frame["close_q0.9"]).all()
    assert (frame["volume"] >= 0).all() and frame["timestamps"].is_monotonic_increasing
    assert "mean absolute error" in told.out and "4 paths of tiny on cpu" in told.out
    assert "synthetic candles" in told.err and "frequency: 5 minutes" in told.err


def test_in_a_terminal_of_40_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time, the mean and the fan, each on a line of its own bar; what has no room is said."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert main(["forecast", "--sample", "--seed", "1", "--samples", "2", "--device", "cpu"]) == 0
    lines = terminal.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, lines)) <= 40
    head = lines.index("time          (mean)    (10%)    (90%)")
    assert lines[head - 1].split() == ["close"] * 3
    bars = [line.split() for line in lines[head + 2 : head + 15]]
    assert bars.pop(6) == ["…"] and [bar[0] for bar in bars] == ["01-11"] * 12
    assert [len(bar) for bar in bars] == [5] * 12 and bars[0][1] == "14:00" and bars[-1][1] == "15:55"
    assert all(float(low) <= float(high) for _, _, _, low, high in bars)
    assert "  not shown: close (50%), volume (mean)" in lines


def bars_of(times: list[str], value: float = 101.25, levels: tuple[float, ...] = (0.1, 0.5, 0.9)) -> dict[str, Any]:
    rows = [{"timestamp": time, "close": value, "volume": 12345.6} for time in times]
    return {"forecast": rows, "quantiles": {f"{level:g}": rows for level in levels}}


def test_which_columns_a_terminal_has_room_for() -> None:
    levels = [0.05, 0.25, 0.5, 0.75, 0.95]
    one = bars_of(["2024-01-11 14:00:00", "2024-01-11 14:05:00"], levels=tuple(levels))
    whole = ["time", *("close (mean)", "close (5%)", "close (25%)", "close (50%)", "close (75%)", "close (95%)")]
    whole.append("volume (mean)")
    for room, times, shown in (
        (None, "2024-01-11 14:00:00", whole),
        (500, "2024-01-11 14:00:00", whole),
        (76, "2024-01-11 14:00:00", whole),
        (75, "2024-01-11 14:00", whole),
        (70, "01-11 14:00", whole),
        (64, "2024-01-11 14:00", whole[:7]),
        (62, "01-11 14:00", whole[:7]),
        (40, "2024-01-11 14:00", [*whole[:3], whole[6]]),
        (39, "01-11 14:00", [*whole[:3], whole[6]]),
        (30, "01-11 14:00", [whole[0], whole[2], whole[6]]),
        (25, "2024-01-11 14:00", whole[:2]),
        (1, "01-11 14:00", whole[:2]),
    ):
        columns, rows, left_out = forecast_table(one, levels, room)
        assert columns == shown and rows[0][0] == times, room
        assert sorted([*columns, *left_out]) == sorted(whole) and all(len(row) == len(columns) for row in rows)
    rare = bars_of(["2024-01-11 14:00:00"], levels=(0.07, 0.995, 0.999))
    titles = ["time", "close (mean)", "close (7%)", "close (99.5%)", "close (99.9%)", "volume (mean)"]
    assert forecast_table(rare, [0.07, 0.995, 0.999], None)[0] == titles
    assert forecast_table(bars_of(["2024-01-11 14:00:00"], levels=()), [], 27)[0] == ["time", "close (mean)"]


@pytest.mark.parametrize(
    ("times", "without_seconds", "without_year"),
    [
        (["2024-01-11 14:00:00", "2024-01-11 15:00:00"], ["2024-01-11 14:00", "2024-01-11 15:00"], "01-11 14:00"),
        (["2024-01-11 00:00:00", "2024-01-12 00:00:00"], ["2024-01-11", "2024-01-12"], "01-11"),
        (["2024-12-31 00:00:00", "2025-01-01 00:00:00"], ["2024-12-31", "2025-01-01"], "12-31"),
        (["2024-12-31 00:00:00", "2025-12-31 00:00:00"], ["2024-12-31", "2025-12-31"], "2024-12-31"),
        (["2024-01-11 14:00:30", "2024-01-11 14:01:00"], ["2024-01-11 14:00:30", "2024-01-11 14:01:00"], "01-11 14:00:30"),
        (["2024-01-11 14:00:00+00:00"], ["2024-01-11 14:00"], "01-11 14:00"),
        (
            ["2024-03-30 14:00:00+01:00", "2024-03-31 14:00:00+02:00"],
            ["2024-03-30 14:00:00+01:00", "2024-03-31 14:00:00+02:00"],
            "03-30 14:00:00+01:00",
        ),
    ],
)  # fmt: skip
def test_times_are_shortened_without_losing_anything(
    times: list[str], without_seconds: list[str], without_year: str
) -> None:
    assert short(times) == without_seconds and shorter(times)[0] == without_year


def test_a_file_as_a_document(cli: Callable[..., Any], csv: Path) -> None:
    arguments = ("forecast", str(csv), "--horizon", "5", "--samples", "3", "--device", "cpu", "--seed", "7", "--json")
    told = cli(*arguments)
    assert told.status == 0, told.err
    (one,) = told.document["series"]
    assert one["name"] == "abc" and len(one["forecast"]) == 5 and list(one["quantiles"]) == ["0.1", "0.5", "0.9"]
    assert any("volume = 'Vol'" in note for note in one["guessed"]) and "volume = 'Vol'" in told.err
    last = pd.read_csv(csv)["Date"].iloc[-1]
    assert one["last"]["timestamp"] == last and one["forecast"][0]["timestamp"] > last
    assert cli(*arguments).document == told.document, "the same seed gives the same forecast"
    other = cli(*arguments[:-2], "8", "--json").document
    assert other["series"][0]["forecast"] != one["forecast"]


def test_prices_of_a_millionth_keep_their_digits(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Counted in their own unit, and written by digits: six decimals would be one digit."""
    frame = sample_candles(150, seed=9)
    prices = ["open", "high", "low", "close"]
    frame[prices] *= 1e-8
    frame.to_csv(tmp_path / "coin.csv", index=False)
    told = cli("forecast", str(tmp_path / "coin.csv"), "--horizon", "4", "--seed", "1", "--device", "cpu", "--json")
    document = json.loads(told.out)
    closes = [row["close"] for row in document["series"][0]["forecast"]]
    last = document["series"][0]["last"]["close"]
    assert len(set(closes)) == 4 and all(0.8 < close / last < 1.25 for close in closes) and document["warnings"] == []


def test_how_it_was_made_is_told(cli: Callable[..., Any], csv: Path) -> None:
    asked = ("forecast", str(csv), "--horizon", "2", "--samples", "2", "--seed", "1", "--device", "cpu")
    plain = cli(*asked)
    assert "2 paths of tiny on cpu\n" in plain.out
    told = cli(*asked, "--top-k", "3", "--rolling", "evict", "--dtype", "bfloat16")
    assert "2 paths of tiny on cpu, top_k 3, rolling evict, dtype bfloat16" in told.out
    document = json.loads(cli(*asked, "--top-p", "0.9", "--json").out)
    drawn = {name: document[name] for name in ("temperature", "top_k", "top_p", "rolling", "dtype", "quantization")}
    assert drawn == {
        "temperature": 1.0, "top_k": 0, "top_p": 0.9, "rolling": "exact", "dtype": "float32", "quantization": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "forecast {}.csv",
        "forecast --sample --output {}.csv",
        "forecast --sample --model {}",
        "finetune predictor --data {}",
    ],
)
def test_a_name_that_no_file_can_have(cli: Callable[..., Any], command: str, tmp_path: Path) -> None:
    more = ["--output", str(tmp_path / "run")] if "finetune" in command else []
    told = cli(*command.format("a" * 300).split(), *more)
    assert told.status in (1, 2) and "a name may have at most 255 characters" in told.err and "bug" not in told.err


def test_a_short_history_is_said(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    sample_candles(5, seed=9).to_csv(path, index=False)
    told = cli("forecast", str(path), "--horizon", "2", "--samples", "1", "--device", "cpu", "--json")
    assert told.status == 0, told.err
    assert "few: only 5 rows of history" in told.err and "only 5 rows" in told.document["warnings"][0]
    told = cli("forecast", str(path), "--horizon", "1", "--samples", "1", "--device", "cpu")
    assert told.status == 0 and "1 path of tiny on cpu" in told.out


def test_standard_input(cli: Callable[..., Any], csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(csv.read_bytes())

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr("sys.stdin", Stdin())
    told = cli("forecast", "-", "--horizon", "3", "--samples", "2", "--device", "cpu", "--json")
    assert told.status == 0 and len(told.document["series"][0]["forecast"]) == 3


def test_many_instruments_and_one_of_them(cli: Callable[..., Any], tmp_path: Path) -> None:
    path, output = tmp_path / "all.csv", tmp_path / "out.parquet"
    stacked = pd.concat([f.assign(symbol=n) for n, f in sample_market(3, 60, freq="1D").items()])
    stacked.to_csv(path, index=False)
    common = ("--horizon", "4", "--samples", "2", "--device", "cpu")
    assert cli("forecast", str(path), *common, "--output", str(output)).status == 0
    frame = pd.read_parquet(output)
    assert list(frame["symbol"].unique()) == ["SYM000", "SYM001", "SYM002"] and len(frame) == 12
    told = cli("forecast", str(path), *common, "--symbol", "SYM001", "--json")
    assert [one["name"] for one in told.document["series"]] == ["SYM001"]
    told = cli("forecast", str(path), *common, "--symbol", "SYM01")
    assert told.status == 2 and "did you mean 'SYM0" in told.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one file of candles, or --sample"),
        (["x.csv", "--sample"], "not both"),
        (["nothing.csv"], "cannot read"),
        (["--sample", "--quantiles", "0.1,high"], "numbers from 0 to 1"),
        (["--sample", "--quantiles", "1.5"], "numbers from 0 to 1"),
        (["--sample", "--horizon", "0"], "use a whole number from 1"),
        (["--sample", "--plot", "out.jpg"], "must end in .png or .svg"),
        (["--sample", "--output", "out.xlsx"], "must end in .csv, .parquet or .json"),
        (["--sample", "--output", "nowhere/out.csv"], "there is no folder"),
        (["--sample", "--model", "foo"], "unknown model 'foo'"),
        (["--sample", "--model", ""], "unknown model ''"),
        (["--sample", "--model", "kronos-smal"], "did you mean 'kronos-small'?"),
        (["--sample", "--model", "not-there", "--tokenizer", "tiny"], "not one of tiny, kronos-mini, kronos-small"),
        (["--sample", "--model", "runs/gone"], "'runs/gone' is not a folder here, and it is unknown which tokenizer"),
        (["--sample", "--model", "runs/a/b"], "unknown model 'runs/a/b'"),
        (["--sample", "--tokenizer", "foo"], "unknown tokenizer 'foo'"),
        (["--sample", "--context", "1"], "from 2 to"),
        (["--sample", "--holdout", "--horizon", "900"], "has 600 usable rows"),
    ],
)
def test_mistakes(cli: Callable[..., Any], arguments: list[str], said: str) -> None:
    told = cli("forecast", *arguments)
    assert told.status == 2 and said in told.err and not told.out


def test_what_is_wrong_in_the_file(cli: Callable[..., Any], csv: Path) -> None:
    frame = pd.read_csv(csv)
    frame.loc[40, "close"] = np.nan
    frame.to_csv(csv, index=False)
    told = cli("forecast", str(csv), "--device", "cpu")
    assert told.status == 2 and "abc.csv, line 42, column 'close'" in told.err and "--repair" in told.err
    told = cli("forecast", str(csv), "--device", "cpu", "--repair", "--horizon", "2", "--samples", "2")
    assert told.status == 0 and "repaired: abc.csv, line 42, column 'close'" in told.err


def test_finetune_and_forecast_with_the_result(cli: Callable[..., Any], tmp_path: Path) -> None:
    """From a file to a fine-tuned model to its forecast, and on after a stop."""
    data = tmp_path / "data"
    data.mkdir()
    for name, frame in sample_market(2, 420, seed=3).items():
        frame.to_csv(data / f"{name}.csv", index=False)
    common = [
        *("--data", str(data), "--device", "cpu", "--lookback", "16", "--horizon", "4", "--epochs", "1"),
        *("--steps-per-epoch", "3", "--batch-size", "4", "--learning-rate", "1e-3", "--save-every", "1"),
    ]
    told = cli("finetune", "tokenizer", *common, "--output", str(tmp_path / "tok"), "--json")
    assert told.status == 0, told.err
    assert told.document["steps"] == 3 and "2 series, 840 rows" in told.err
    tokenizer = told.document["folder"]
    told = cli(
        *("finetune", "predictor", *common, "--tokenizer", tokenizer, "--output", str(tmp_path / "model")),
        *("--lora-rank", "2"),
    )
    assert told.status == 0, told.err
    assert "best weights" in told.out and "before" in told.out
    model = tmp_path / "model" / "best_model"
    assert told.err.rstrip().endswith(f"next: anytorch forecast FILE --model {model}"), "and nothing to remember"
    again = cli("finetune", "predictor", *common, "--tokenizer", tokenizer, "--output", str(tmp_path / "model"))
    assert again.status == 2 and "another plan" in again.err and "--restart" in again.err
    asked = ("forecast", str(data / "SYM000.csv"), "--device", "cpu", "--horizon", "3", "--samples", "2", "--json")
    asked = (*asked, "--seed", "1", "--model", str(model))
    done = cli(*asked)
    assert done.status == 0, done.err
    (one,) = done.document["series"]
    assert len(one["forecast"]) == 3 and one["lookback"] == 125, "the tiny model's window is 128 rows"
    assert cli(*asked, "--tokenizer", tokenizer, "--context", "128").document == done.document
    given = cli(*asked, "--context", "64")
    assert given.status == 0 and given.document["series"][0]["lookback"] == 61, "what is given counts more"
    shutil.rmtree(model / "tokenizer")
    gone = cli(*asked)
    assert gone.status == 2 and f"there is no folder {model / 'tokenizer'}" in gone.err and "--tokenizer" in gone.err
    assert cli(*asked, "--tokenizer", tokenizer).document == done.document
    summary = json.loads((tmp_path / "model" / "summary.json").read_text())
    assert summary["plan"]["lora_rank"] == 2


CONFIG = """
data: {{data_path: {data}, lookback_window: 16, predict_window: 4, max_context: 64, clip: 5.0,
        train_ratio: 0.8, val_ratio: 0.1, test_ratio: 0.1, sample_stride: 3}}
training: {{tokenizer_epochs: 1, basemodel_epochs: 2, batch_size: 100, log_interval: 1, num_workers: 6, seed: 42,
            tokenizer_learning_rate: 2e-4, predictor_learning_rate: 4e-5, adam_beta1: 0.8, adam_beta2: 0.9}}
model_paths: {{exp_name: try, base_path: {folder}, base_save_path: "", finetuned_tokenizer: "",
               basemodel_save_name: predictor}}
experiment: {{name: try, use_comet: false, train_tokenizer: true, skip_existing: true, pre_trained_predictor: false}}
device: {{use_cuda: false, device_id: 0}}
"""


@pytest.mark.slow
def test_finetune_with_the_published_file_of_settings(cli: Callable[..., Any], tmp_path: Path) -> None:
    (frame,) = sample_market(1, 420, seed=3).values()
    frame.to_csv(tmp_path / "prices.csv", index=False)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(data=tmp_path / "prices.csv", folder=tmp_path / "out"))
    told = cli("finetune", "both", "--config", str(config))
    assert told.status == 0, told.err
    assert "not used: data.sample_stride" in told.err and "max_context" not in told.err
    tokenizer, model = (
        json.loads((tmp_path / "out" / "try" / name / "summary.json").read_text())
        for name in ("tokenizer", "predictor")
    )
    assert tokenizer["plan"]["epochs"] == 1 and tokenizer["plan"]["learning_rate"] == 2e-4
    plan = model["plan"]
    assert (plan["epochs"], plan["batch_size"], plan["lookback"], plan["seed"]) == (2, 100, 16, 42)
    assert plan["betas"] == [0.8, 0.9] and tokenizer["plan"]["betas"] == [0.9, 0.999]
    assert model["first_loss"] > 4.5, "from new weights, as the file says"
    said = json.loads((tmp_path / "out" / "try" / "predictor" / "best_model" / "anytorch.json").read_text())
    assert (said["max_context"], said["lookback"], said["horizon"]) == (64, 16, 4)
    again = cli("finetune", "both", "--config", str(config), "--json")
    assert again.status == 0 and again.err.count("exists and is kept") == 2
    assert again.document == {"tokenizer": None, "predictor": None}
    other = cli("finetune", "predictor", "--config", str(config), "--output", str(tmp_path / "b"), "--epochs", "1")
    assert other.status == 0, other.err
    summary = json.loads((tmp_path / "b" / "predictor" / "summary.json").read_text())
    assert summary["plan"]["epochs"] == 1, "what is said beside the file counts more"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("val_ratio: 0.1", "val_ratio: 0.3"), "add up to 1.2"),
        (("batch_size: 100", "batch_size: many"), "training.batch_size is 'many', not a number"),
        (("batch_size: 100", "batch_size: 2.5"), "not a whole number"),
        (("skip_existing: true", "skip_existing: 1"), "not true or false"),
        (("data_path", "path"), "data.data_path is missing"),
        (("data: {", "data: [{"), "is not YAML"),
    ],
)
def test_mistakes_in_the_file_of_settings(
    cli: Callable[..., Any], tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(data="prices.csv", folder=tmp_path).replace(*change))
    told = cli("finetune", "both", "--config", str(config))
    assert told.status == 2 and said in told.err


def test_from_scratch(cli: Callable[..., Any], tmp_path: Path) -> None:
    told = cli(
        *("finetune", "predictor", "--sample", "--from-scratch", "--output", str(tmp_path), "--device", "cpu"),
        *("--lookback", "16", "--horizon", "4", "--epochs", "1", "--steps-per-epoch", "1", "--batch-size", "2"),
        *("--validation-windows", "8", "--json"),
    )
    assert told.status == 0, told.err
    assert told.document["first_loss"] > 4.5  # new weights know nothing: about ln 256


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tokenizer", "--output", "x"], "name files with --data, or use --sample"),
        (["tokenizer", "--sample", "--data", "a.csv", "--output", "x"], "not both"),
        (["all", "--sample", "--output", "x"], "invalid choice"),
        (["both", "--sample", "--output", "x"], "--config"),
        (["both", "--config", "not-there.yaml"], "not-there.yaml cannot be read"),
        (["tokenizer", "--sample"], "--output"),
        (["predictor", "--sample", "--output", "x", "--batch-size", "0"], "--batch-size 0"),
        (["predictor", "--sample", "--output", "x", "--context", "1"], "from 2 to"),
        (["predictor", "--sample", "--output", "x", "--objective", "luck"], "use one of generation, published"),
    ],
)
def test_finetune_mistakes(
    cli: Callable[..., Any], arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = cli("finetune", *arguments)
    assert told.status == 2 and said in told.err
