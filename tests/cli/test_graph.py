"""`anytorch graph`: searched graphs listed, shown and forgotten, by the beginning of a key, without torch."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.graph import made

from anytorch.cli.commands import graph
from anytorch.graph import records
from anytorch.measured.store import verdicts

SOURCES = Path(__file__).parents[2] / "src"


def test_list_shows_what_was_chosen(cli: Callable[..., Any]) -> None:
    none = cli("graph", "list")
    assert none.status == 0 and "no kernel graph has been searched" in none.out and "superoptimize" in none.err
    assert cli("graph", "--json").document == {"graphs": []}
    one, eager = made.stored(), made.stored(width=7, eager=True, when="2026-11-15T07:00:00Z")
    words = cli("graph")
    first, second = words.out.splitlines()[2:]
    assert one.key[:12] in first and made.FUSED in first and "400 µs" in first and "2.50" in first and "b=4" in first
    assert eager.key[:12] in second and second.count("1 ms") == 2 and "2026-11-15" in second
    listed = cli("graph", "list", "--json").document["graphs"]
    assert [row["key"] for row in listed] == [one.key, eager.key] and listed[0]["speedup"] == pytest.approx(2.5)
    assert listed[0]["kernels"] == 2 and listed[1]["kernels"] == 0 and listed[1]["chosen"] == "eager torch"


def test_show_tells_candidates_reasons_and_kernels(cli: Callable[..., Any], tmp_path: Path) -> None:
    one = made.stored()
    words = cli("graph", "show", one.key[:6])
    assert words.status == 0 and one.key in words.out and one.graph_key in words.out
    assert (
        "an output is off by 3" in words.out and "no time was left" in words.out and "cpp: i0=4 lanes=i1" in words.out
    )
    assert "5 %" in words.out and f"allowed: 8 {made.UNIT}" in words.out  # eager's error of 0.4
    assert "handwritten: norm (C++), norm.h" in words.out
    assert "matmul by torch" in words.out and "void kernel" not in words.out and "--kernels" in words.err
    with_text = cli("graph", "show", one.key, "--kernels", "--svg", str(tmp_path / "g.svg"))
    assert made.CPP.strip() in with_text.out and (tmp_path / "g.svg").read_text() == one.picture
    document = cli("graph", "show", one.key[:6], "--json", "--svg", str(tmp_path / "h.svg")).document
    assert document["svg"] == str(tmp_path / "h.svg") and "text" not in document["steps"][0]
    assert document["verdict"]["trials"][2]["refused"].startswith("wrong") and document["graph"] == one.graph
    document = cli("graph", "show", one.key[:6], "--json", "--kernels").document
    assert document["steps"][0]["text"] == made.CPP and document["svg"] is None
    eager = made.stored(width=7, eager=True)
    assert "op by op through torch" in cli("graph", "show", eager.key).out


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (("show",), "takes one KEY; 0 were given", "graph list"),
        (("show", "a", "b"), "takes one KEY; 2 were given", "graph list"),
        (("list", "a"), "takes no KEY", "graph show KEY"),
        (("show", "zz"), "no searched kernel graph has the key 'zz'", "graph list"),
        (("list", "--kernels"), "--kernels is for `anytorch graph show`", "leave it out"),
        (("clear", "--svg", "x"), "--svg is for `anytorch graph show`", "leave it out"),
        (("list", "--yes"), "--yes is for `anytorch graph clear`", "leave it out"),
        (("clear",), "needs a terminal", "--yes"),
        (("clear", "zz"), "no searched kernel graph", "graph list"),
        (("lits",), "invalid choice", "--help"),
    ],
)
def test_what_cannot_be_done_says_what_can(
    cli: Callable[..., Any], arguments: tuple[str, ...], said: str, hint: str
) -> None:
    made.stored()
    answer = cli("graph", *arguments)
    assert answer.status == 2 and said in answer.err and hint in answer.err.partition("hint:")[2]
    assert len(records.records()) == 1
    error = cli("--json", "graph", *arguments).document["error"]
    assert said in error["message"] and hint in error["hint"]


def test_a_picture_needs_a_folder(cli: Callable[..., Any], tmp_path: Path) -> None:
    one = made.stored()
    answer = cli("graph", "show", one.key, "--svg", str(tmp_path / "no" / "g.svg"))
    assert answer.status == 2 and "there is no folder" in answer.err and not answer.out


def test_clear_forgets_graphs_and_their_verdicts(cli: Callable[..., Any]) -> None:
    one, other = made.stored(width=1, kernels=("a", "b")), made.stored(width=2, kernels=("b",))
    answer = cli("graph", "clear", one.key[:10], one.key)
    assert answer.status == 0 and "1 kernel graph and 2 measurements" in answer.out
    assert [left.key for left in records.records()] == [other.key]
    assert {left.question.key for left in verdicts()} == {other.key, made.question("b").key}
    document = cli("graph", "clear", "--yes", "--json").document
    assert document == {"removed": [other.key], "verdicts": 2}
    assert not list(verdicts()) and not records.folder().exists()
    assert cli("graph", "clear", "--yes").status == 0, "there is nothing left, and that is fine"


@pytest.mark.parametrize(("typed", "left"), [("y\n", 0), ("n\n", 1), ("", 1)])
def test_clear_asks_before_it_forgets_everything(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, typed: str, left: int
) -> None:
    made.stored()
    monkeypatch.setattr(graph, "is_terminal", lambda stream: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    answer = cli("graph", "clear")
    assert len(records.records()) == left and answer.status == left and "forget 1 searched kernel graph" in answer.err


def test_reset_takes_the_records_along(cli: Callable[..., Any]) -> None:
    made.stored()
    answer = cli("--json", "reset", "--cache")
    assert str(records.folder()) in answer.document["removed"] and not records.folder().exists()


def test_damaged_records_are_left_out(cli: Callable[..., Any]) -> None:
    one = made.stored()
    path = records.folder() / f"{one.key}.json"
    path.write_bytes(path.read_bytes()[:100])
    answer = cli("graph", "list", "--json")
    assert answer.status == 0 and answer.document == {"graphs": []}


def test_torch_is_not_imported(tmp_path: Path) -> None:
    one, picture = made.stored(), str(tmp_path / "g.svg")
    script = (
        "import sys, json\nfrom anytorch.cli.main import main\n"
        f"codes = [main(['graph', 'list']), main(['graph', 'show', '{one.key}', '--kernels', '--svg', {picture!r}])]\n"
        f"codes.append(main(['graph', 'clear', '{one.key}']))\n"
        "print(json.dumps([codes, 'torch' in sys.modules, 'numpy' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 0, 0], False, False]
