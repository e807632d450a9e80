"""Streams, tables, completion scripts, and the page that documents them."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.waiting import until

from anytorch.cli import output as output_module
from anytorch.cli.output import Output, aligned, decorated, finite
from anytorch.cli.parser import COMMANDS, command_parser
from anytorch.devices.registry import registry

REPOSITORY = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_columns() -> None:
    lines = list(aligned(("device", "time (ms)"), [["cpu", "1.5"], ["cuda:0", "10.25"]]))
    assert lines == ["device  time (ms)", "------  ---------", "cpu           1.5", "cuda:0      10.25"]


def test_boxes_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)  # here and not in a fixture: pytest sets it anew for each phase
    Output().table(("device", "time (ms)"), [("[red]cpu", 1.5)])
    drawn = terminal.getvalue()
    assert "│" in drawn and "[red]cpu" in drawn, "a name is text, never markup"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert not decorated(terminal)
        terminal.truncate(0)
        Output().table(("device",), [("cpu",)])
        assert "│" not in terminal.getvalue() and "cpu" in terminal.getvalue()
        monkeypatch.delenv(name)


@pytest.mark.parametrize("rich", [True, False])
def test_a_narrow_terminal_breaks_no_word(monkeypatch: pytest.MonkeyPatch, rich: bool) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    if not rich:
        monkeypatch.setenv("NO_COLOR", "1")
    columns, rows = ("moment", "close (mean)", "volume (mean)"), [("2024-01-11", "101.575", "9288.1")]

    def drawn(room: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(room))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal := Terminal())
            Output().table(columns, rows, title="what came after the last of them all")
        return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()

    for room in (60, 45, 44, 38, 37, 30):
        lines = drawn(room)
        assert max(map(len, lines)) <= room
        assert sum("101.575" in line and "2024-01-11" in line and "9288.1" in line for line in lines) == 1
        assert ("close (mean)" in "".join(lines)) == (room >= (45 if rich else 39))
        assert ("│" in "".join(lines)) == (rich and room >= 37), "boxes as long as there is room for them"
    assert drawn(30)[-4:] == [
        "              close  volume",
        "moment       (mean)  (mean)",
        "----------  -------  ------",
        "2024-01-11  101.575  9288.1",
    ]


def test_off_a_terminal_lines_are_as_long_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    Output().table(("device", "time (ms)"), [("cuda:0", "10.25")], title="a title that is longer than that")
    assert capsys.readouterr().out.splitlines()[1:] == [
        *("a title that is longer than that", "device  time (ms)", "------  ---------", "cuda:0      10.25")
    ]


def test_json_mode_keeps_words_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(json=True)
    output.text("words")
    output.heading("words")
    output.table(("a",), [("b",)])
    output.pairs([("a", "b")])
    output.note("a note")
    output.data({"value": float("nan"), "list": [float("inf"), 1.0]})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"value": None, "list": [None, 1.0]}
    assert err == "a note\n"


def test_finite() -> None:
    assert finite({"a": [float("-inf"), True, 0.5, None, "x"]}) == {"a": [None, True, 0.5, None, "x"]}


def test_progress_is_a_bar_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Output().progress("measuring") as progress:
        progress(1, 2, "matmul")  # words about what takes long alone
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(output_module, "decorated", lambda stream: True)
    with Output().progress("measuring") as progress:
        progress(1, 2, "matmul")
    assert capsys.readouterr().out == ""


def test_a_table_that_fits_is_not_folded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever width rich would measure: the layout has decided what there is room for."""
    monkeypatch.setattr(output_module, "decorated", lambda stream: True)
    monkeypatch.setattr(Output, "room", 80)
    monkeypatch.setenv("COLUMNS", "50")
    times = ["2024-01-11 14:00:00+02:00", "2024-01-11 14:05:00+02:00"]
    Output().table(["time", "close (mean)", "volume (mean)"], [[time, "101.25", "12345.6"] for time in times])
    lines = capsys.readouterr().out.splitlines()
    assert all(any(time in line for line in lines) for time in times) and max(map(len, lines)) == 60


def test_somebody_elses_warning_is_handed_on() -> None:
    import warnings

    with pytest.warns(RuntimeWarning, match="not ours"), Output().fallbacks_told() as told:
        warnings.warn("not ours", RuntimeWarning, stacklevel=1)
    assert told == []


# --- completion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_everything(shell: str, cli: Callable[..., Any]) -> None:
    answer = cli("completion", shell)
    assert answer.status == 0
    for name in COMMANDS:
        assert name in answer.out
        for action in command_parser(name)._actions:
            for flag in action.option_strings:
                assert (flag.lstrip("-") if shell == "fish" else flag) in answer.out
    for backend in registry().backends:
        assert backend in answer.out
    assert cli("--json", "completion", shell).document["script"].strip() == answer.out.strip()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_parse(shell: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    script = tmp_path / "script"
    script.write_text(cli("completion", shell).out)
    parsed = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True)
    assert parsed.returncode == 0 and not parsed.stderr, parsed.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["te"], ["test"]),
        (["--json", "test", "cu"], ["cuda"]),
        (["demo", "--backend", "web"], ["webgpu"]),
        (["benchmark", "--du"], ["--duration"]),
        (["config", "s"], ["show", "save"]),
        (["doctor", "cpu-only"], ["cpu-only-wheel"]),
        (["set", "al"], []),
        (["test", "al"], ["all"]),
        (["--ver"], ["--version", "--verbose"]),
    ],
)
def test_bash_completes(typed: list[str], offered: list[str], cli: Callable[..., Any], tmp_path: Path) -> None:
    script, empty = tmp_path / "script", tmp_path / "empty"
    script.write_text(cli("completion", "bash").out)
    empty.mkdir()  # `config` completes files, too: there are none
    words = " ".join(f"'{word}'" for word in typed)
    typing = f"COMP_WORDS=(anytorch {words}); COMP_CWORD={len(typed)}"
    code = f'source {shlex.quote(str(script))}; {typing}; _shtab_anytorch; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], check=True, capture_output=True, text=True, cwd=empty)
    assert done.stdout.split() == offered


def test_completion_survives_a_damaged_settings_file(settings_file: Path, cli: Callable[..., Any]) -> None:
    settings_file.write_bytes(b"broken = ")
    assert cli("completion", "bash").status == 0


# --- the page -------------------------------------------------------------------------------------------------------


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_page_is_up_to_date() -> None:
    tool = load(REPOSITORY / "docs" / "tools" / "cli_reference.py")
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.updated(page) == page, "run: python docs/tools/cli_reference.py"
    with pytest.raises(ValueError, match="no generated part"):
        tool.updated("nothing here")
    for name in COMMANDS:
        assert f"### `anytorch {name}`" in page


@pytest.mark.skipif(sys.platform == "win32", reason="getrusage")
def test_the_startup_benchmark_checks_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    bench = load(REPOSITORY / "bench" / "info_startup.py")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    tools = bench.commands()
    assert set(tools) >= {"anytorch info", "torch.utils.collect_env"}
    said = "PyTorch version: 0.0\n"
    tools["torch.utils.collect_env"] = [sys.executable, "-c", f"print({said!r})"]
    with pytest.raises(SystemExit, match="the answers differ"):
        bench.check_answers(tools)
    assert bench.cpu_ms([sys.executable, "-c", "pass"]) > 0
    assert os.environ["PYTHONPATH"] == str(REPOSITORY / "src")


def test_a_long_wait_is_told_and_a_short_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().waiting("loading the model", after_s=1000):
        pass
    assert capsys.readouterr() == ("", "")
    err = ""
    with Output(json=True).waiting("loading the model", after_s=0.0, every_s=0.01):

        def told() -> bool:
            nonlocal err
            err += capsys.readouterr().err
            return "s so far" in err

        until(told, "both lines")
    assert err.startswith("loading the model …\n")
    assert not [thread for thread in threading.enumerate() if thread.name == "anytorch-waiting"]
