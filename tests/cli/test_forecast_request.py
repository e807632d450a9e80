"""What `anytorch forecast` refuses before it works, and how it behaves when the work is long or cannot be written."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from anytorch.cli.main import main
from anytorch.cli.output import Pace, duration
from anytorch.forecast.candles.generate import sample_candles, sample_market
from anytorch.forecast.predictor import KronosPredictor

QUICK = ("--horizon", "2", "--samples", "2", "--device", "cpu")


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "abc.csv"
    sample_candles(80, seed=9).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("option", ["--output", "--plot"])
@pytest.mark.parametrize("spelling", ["itself", "around", "link", "hard link", "source is a link", "standard input"])
def test_the_file_that_is_read_is_not_overwritten(
    cli: Callable[..., Any], csv: Path, monkeypatch: pytest.MonkeyPatch, option: str, spelling: str
) -> None:
    other = csv.with_name("other.csv" if option == "--output" else "other.png")
    source, target = str(csv), str(other)
    if spelling in ("itself", "around"):
        target = str(csv) if spelling == "itself" else str(csv.parent / "x" / ".." / csv.name)
        (csv.parent / "x").mkdir()
        if option == "--plot":  # the ending is refused first; nothing is drawn over a table
            target = target.removesuffix(".csv") + ".png"
            source = str(csv.rename(csv.with_suffix(".png")))
    elif spelling == "hard link":
        other.hardlink_to(csv)
    elif spelling == "source is a link":
        csv.rename(other)
        csv.symlink_to(other)
    else:
        other.symlink_to(csv.name)
    if spelling == "standard input":
        before, handle = os.dup(0), os.open(csv, os.O_RDONLY)
        os.dup2(handle, 0)
        source = "-"
    body = Path(target).read_bytes()
    told = cli("forecast", source, option, target, *QUICK)
    if spelling == "standard input":
        os.dup2(before, 0)
        os.close(before)
        os.close(handle)
    assert told.status == 2 and f"{option} {target}: that is the input file" in told.err
    assert Path(target).read_bytes() == body and not told.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quantiles", ""], "--quantiles '': use numbers from 0 to 1"),
        (["--quantiles", " , "], "use numbers from 0 to 1"),
        (["--quantiles", "nan"], "use numbers from 0 to 1"),
        (["--samples", "100000000"], "--samples 100000000: use a whole number from 1 to 10,000"),
        (["--samples", "0"], "--samples 0: use a whole number"),
        (["--horizon", "1000000000"], "--horizon 1000000000: use a whole number from 1 to 10,000"),
        (["--horizon", "10000", "--samples", "10000"], "gives 100,000,000 bars; the limit is 10,000,000"),
        (["--lookback", "-5"], "--lookback -5: use a whole number from 2 to 1,000,000"),
        (["--lookback", "0"], "--lookback 0: use a whole number from 2"),
        (["--context", "1"], "--context 1: use a whole number from 2"),
        (["--top-k", "-1"], "--top-k -1: use a whole number from 0"),
        (["--top-p", "1.5"], "--top-p 1.5: use a number above 0 and up to 1"),
        (["--top-p", "nan"], "--top-p nan"),
        (["--temperature", "0"], "--temperature 0: use a number above 0"),
        (["--temperature", "inf"], "--temperature inf"),
        (["--seed", "-1"], "--seed -1: use a whole number from 0"),
        (["--rolling", "trim", "--horizon", "200"], "--rolling trim needs --horizon 200 below the window's"),
        (["--rolling", "round"], "invalid choice: 'round'"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
        (["--quantization", "in8"], "--quantization in8: unknown quantization"),
    ],
)
def test_mistakes_are_told_by_their_option(cli: Callable[..., Any], arguments: list[str], said: str) -> None:
    told = cli("forecast", "--sample", "--device", "cpu", *arguments)
    assert told.status == 2 and said in told.err and "bug" not in told.err and not told.out


@pytest.mark.skipif(sys.platform != "linux", reason="a folder in which not even root can write")
@pytest.mark.parametrize(("option", "name"), [("--output", "/proc/out.csv"), ("--plot", "/proc/out.png")])
def test_a_place_that_cannot_exist(cli: Callable[..., Any], option: str, name: str) -> None:
    told = cli("forecast", "--sample", option, name)
    assert told.status == 2 and f"{option} {name}: nothing can be written there" in told.err and "bug" not in told.err


def test_so_many_paths_of_so_many_series(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked = pd.concat([f.assign(symbol=n) for n, f in sample_market(3, 40, freq="1D").items()])
    stacked.to_csv(tmp_path / "all.csv", index=False)
    monkeypatch.setattr("anytorch.cli.forecast_request.MOST_BARS", 10)
    told = cli("forecast", str(tmp_path / "all.csv"), *QUICK)
    assert told.status == 2 and "for each of 3 series gives 12 bars" in told.err and "--symbol" in told.err


def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(
    cli: Callable[..., Any], csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/closed/.out.csv.x")

    monkeypatch.setattr("tempfile.mkstemp", closed)  # root, which tests may run as, is let in everywhere
    monkeypatch.setattr(KronosPredictor, "__init__", closed)
    told = cli("forecast", str(csv), "--output", str(csv.with_name("out.csv")), *QUICK)
    assert told.status == 2 and "out.csv: nothing can be written there: Permission denied" in told.err
    assert ".out.csv." not in told.err


@pytest.mark.parametrize("as_json", [False, True])
def test_an_answer_that_cannot_be_written_is_shown_all_the_same(
    cli: Callable[..., Any], csv: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", f"{path}.half")

    monkeypatch.setattr("anytorch.cli.forecast_answer.replace_file", full)
    output = str(csv.with_name("out.csv"))
    told = cli("forecast", str(csv), "--output", output, *QUICK, *(["--json"] if as_json else []))
    assert told.status == 1 and f"error: {output} cannot be written: No space left on device" in told.err
    assert ".half" not in told.err
    if as_json:
        assert told.document["errors"] == [f"{output} cannot be written: No space left on device"]
        assert len(told.document["series"][0]["forecast"]) == 2
    else:
        assert "close (mean)" in told.out and "2 paths of tiny" in told.out


def test_a_run_without_a_seed_can_be_repeated(cli: Callable[..., Any], csv: Path) -> None:
    for source in (str(csv), "--sample"):
        first = cli("forecast", source, *QUICK, "--json")
        seed = first.document["seed"]
        assert f"--seed {seed}" in first.err
        again = cli("forecast", source, *QUICK, "--json", "--seed", str(seed))
        assert again.document == first.document and "--seed" not in again.err
        assert cli("forecast", source, *QUICK, "--json").document["seed"] != seed


def test_every_column_has_its_quantiles(cli: Callable[..., Any], csv: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    assert cli("forecast", str(csv), *QUICK, "--output", str(output)).status == 0
    (row, _) = json.loads(output.read_text())
    names = ("open", "high", "low", "close", "volume", "amount")
    assert set(row) == {"timestamps", *names} | {f"{n}_q{q}" for n in names for q in ("0.1", "0.5", "0.9")}
    assert row["amount_q0.1"] <= row["amount_q0.5"] <= row["amount_q0.9"]


@pytest.mark.long
def test_how_to_draw_and_compute_is_passed_on(
    cli: Callable[..., Any], csv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    real = KronosPredictor.forecast_batch

    def watched(self: KronosPredictor, *arguments: Any, **options: Any) -> Any:
        seen.update(options, dtype=self.model.norm.weight.dtype, quantization=self.quantization)
        return real(self, *arguments, **options)

    monkeypatch.setattr(KronosPredictor, "forecast_batch", watched)
    wanted = ("--top-k", "5", "--top-p", "0.8", "--rolling", "evict", "--dtype", "bfloat16", "--quantization", "int8")
    told = cli("forecast", str(csv), *QUICK, *wanted, "--temperature", "0.7")
    assert told.status == 0, told.err
    assert (seen["top_k"], seen["top_p"], seen["rolling"], seen["T"]) == (5, 0.8, "evict", 0.7)
    assert str(seen["dtype"]) == "torch.bfloat16" and seen["quantization"] == "int8"
    greedy = cli("forecast", str(csv), *QUICK, "--top-k", "1", "--json").document["series"][0]["quantiles"]
    assert greedy["0.1"] == greedy["0.9"], "without dice all paths are one"


def test_a_window_that_the_model_was_not_made_for_is_said(cli: Callable[..., Any], csv: Path) -> None:
    told = cli("forecast", str(csv), *QUICK, "--context", "100000", "--json")
    assert told.status == 0 and "--context 100000: tiny supports windows of at most 128 rows" in told.err
    assert told.document["warnings"][-1].startswith("--context 100000")
    assert "made for" not in cli("forecast", str(csv), *QUICK, "--context", "64").err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_a_lack_of_memory_is_no_bug(
    cli: Callable[..., Any], csv: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def lacking(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(KronosPredictor, "forecast_batch", lacking)
    told = cli("forecast", str(csv), *QUICK, "--json")
    assert told.status == 1 and told.document["error"]["type"] == "OutOfMemory"
    assert "--samples 2, --horizon 2" in told.err and "fewer" in told.err
    monkeypatch.setattr("anytorch.cli.commands.version.run", lacking)  # and anywhere else
    told = cli("version", "--json")
    assert told.status == 1 and told.document["error"]["type"] == "OutOfMemory" and "bug" not in told.err


def test_the_lines_of_a_holdout_fit_a_terminal(cli: Callable[..., Any], csv: Path) -> None:
    told = cli("forecast", str(csv), *QUICK, "--holdout")
    start = told.out.index("mean absolute error")
    assert "of the last value" in told.out[start:] and max(map(len, told.out[start:].splitlines())) <= 80


# --- long work --------------------------------------------------------------------------------------------------------


def test_the_pace_is_told_early_and_then_now_and_then() -> None:
    now = [0.0]
    pace = Pace("forecasting", lambda: now[0])
    said: list[tuple[float, str]] = []
    for step in range(1, 201):
        if line := pace.at(step, 200):
            said.append((now[0], line))
        now[0] += 1.0 if step < 100 else 2.0  # steps become dearer
    assert said[0] == (3.0, "forecasting: this takes about 3 minutes")
    assert [when for when, _ in said[1:]] == [30.0, 60.0, 90.0, 121.0, 151.0, 181.0, 211.0, 241.0, 271.0]
    assert said[1][1] == "forecasting: 31 of 200; about 3 minutes left"
    assert said[5][1] == "forecasting: 126 of 200; about 2 minutes left", "by the pace of late, not of all"
    quick = Pace("forecasting", lambda: now[0])
    for step in range(1, 21):
        assert quick.at(step, 20) == ""
        now[0] += 1.0


def test_the_pace_of_a_step_that_lasts_long_is_told_without_a_guess() -> None:
    """What reports within a step (an evaluation, before the first or later) is heard of every half minute as well."""
    now = [0.0]
    pace = Pace("training", lambda: now[0])
    said: list[tuple[float, str]] = []

    def at(done: int, words: str, seconds: float) -> None:
        if line := pace.at(done, 100, words):
            said.append((now[0], line))
        now[0] += seconds

    for part in range(10):
        at(0, f"part {part}", 10.0)
    assert said == [(when, f"training: 0 of 100, part {round(when) // 10}") for when in (30.0, 60.0, 90.0)]
    said.clear()
    for step in range(1, 7):
        at(step, "", 4.0)
    assert said == [
        (104.0, "training: this takes about 7 minutes"),  # the 100 s before the first step are not in the guess
        (120.0, "training: 6 of 100; about 6 minutes left"),
    ]
    said.clear()
    for part in range(7):
        at(6, f"part {part}", 10.0)
    assert said == [(154.0, "training: 6 of 100, part 3"), (184.0, "training: 6 of 100, part 6")]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 second"), (40, "40 seconds"), (100, "2 minutes"), (6000, "2 hours"), (864_000, "10 days")],
)
def test_duration(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_long_work_without_a_terminal_says_how_far_it_is(csv: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    ticks = iter(range(0, 100_000, 40))
    monkeypatch.setattr("anytorch.cli.output.time.monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr("anytorch.cli.output.Pace.__init__.__defaults__", (lambda: float(next(ticks)),))
    told = cli("forecast", str(csv), "--horizon", "6", "--samples", "1", "--device", "cpu")
    assert told.status == 0
    lines = [line for line in told.err.splitlines() if line.startswith("forecasting: ")]
    assert lines[0] == "forecasting: this takes about 3 minutes" and lines[1].startswith("forecasting: 3 of 6; about ")
    assert main(["forecast", str(csv), *QUICK]) == 0


def test_a_file_in_the_place_of_a_folder(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("")
    for inside in ("o.csv", "deeper/o.csv"):
        told = cli("forecast", "--sample", "--output", str(tmp_path / "a.csv" / inside))
        assert told.status == 2 and "a.csv is a file, and a folder is needed" in told.err and "mkdir" not in told.err


def test_a_zone_without_a_name_and_a_seed_that_is_not_used(cli: Callable[..., Any], tmp_path: Path) -> None:
    sample_candles(60).to_csv(tmp_path / "a.csv", index=False)
    told = cli("forecast", str(tmp_path / "a.csv"), "--timezone", "")
    assert told.status != 0 and "unknown time zone ''" in told.err and "seed" not in told.err


def test_a_series_of_single_values(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "sales.csv"
    days = [f"2024-01-{day:02},{value}" for day, value in enumerate([5, -2, 7, 1, 9, 4, 6, 8, 3, 2, 5, 0], 1)]
    path.write_text("\n".join(["date,sales", *days, ""]))
    asked = ("forecast", str(path), "--horizon", "2", "--samples", "2", "--device", "cpu", "--seed", "1")
    told = cli(*asked, "--json")
    document = json.loads(told.out)
    assert told.status == 0 and len(document["series"][0]["forecast"]) == 2
    assert any("one column of values, 'sales'" in note for note in document["series"][0]["guessed"])
    told = cli(*asked, "--lookback", "5000")
    assert told.status == 0 and "--lookback 5000: the model sees" in told.err
