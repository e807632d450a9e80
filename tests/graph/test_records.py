"""Records of searched graphs: complete, kept once, rebuilt where damaged, bounded, found by prefix, forgotten whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from anytorch.errors import GraphError
from anytorch.graph import compiler, new_kernel_graph, records, search, verify
from anytorch.graph.ir import Graph
from anytorch.graph.records import Record
from anytorch.graph.search import EAGER
from anytorch.measured import store
from tests.graph import made


def _searched(sizes: dict[str, int]) -> None:
    g = new_kernel_graph(backend="cpu")
    x, w = g.new_input(("b", 64), dtype="float32", name="x"), g.new_input((64, 48), dtype="float32")
    g.mark_output(g.silu(g.rms_norm(x) @ w))
    g.superoptimize(sizes=sizes, time_limit_s=60)


def test_a_search_leaves_a_record_and_a_recall_mends_it(
    few: None, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYTORCH_SAVE_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.setattr(search, "variants", lambda graph, back, plain=search.variants: list(plain(graph, back))[:1])
    _searched({"b": 4})
    (found,) = records.records()
    assert (
        found.title == "rms_norm, matmul, silu" and found.sizes == {"b": 4} and found.verdict.question.device == "cpu"
    )
    assert Graph.from_json(found.graph).key == found.graph_key
    assert found.verdict.chosen != EAGER and found.seconds and found.eager_s and found.speedup
    (step,) = found.steps
    assert step.language == "cpp" and "matmul" in step.ops and step.seconds and "lanes.h" in step.text
    assert step.nbytes and step.nbytes >= found.least_nbytes == 4 * (4 * 64 + 64 * 48 + 4 * 48)
    assert ElementTree.fromstring(found.picture).tag.endswith("svg") and step.schedule in found.picture
    assert found.kernel_keys and all(
        (store.folder() / f"{key}.json").exists() for key in (found.key, *found.kernel_keys)
    )

    path = records.folder() / f"{found.key}.json"
    whole = path.read_bytes()
    before = path.stat()
    _searched({"b": 4})
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino, "it was written again"
    other = json.dumps({**json.loads(whole), "format": 0}).encode()
    for damaged in (None, b"", whole[: len(whole) // 2], b"[]", other, whole.replace(b"lanes=", b"planes=")):
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        _searched({"b": 4})
        (again,) = records.records()
        assert again == found, "measured again, not recalled" if again.verdict != found.verdict else damaged

    saved = {one.name: one.read_text() for one in (tmp_path / "kernels").iterdir()}
    text = next(text for text in saved.values() if text.partition("\n")[2] == step.text)
    assert all(name.endswith(".cpp") and len(name) == 24 + len(".cpp") for name in saved)
    assert text.startswith(f"// graph {found.graph_key}, b=4, {found.title}; schedule: {step.schedule}\n")

    # A record that cannot be written is said, and the search goes on.
    path.unlink()
    records.folder().rmdir()
    records.folder().write_text("a file in the folder's place")
    _searched({"b": 4})
    assert "no record of the kernel graph is kept" in caplog.text


def test_what_eager_torch_won_and_what_was_compiled_is_recorded_too(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "fastest", lambda trials, noise=0.0: (EAGER, "a test wants it"))
    monkeypatch.setattr(compiler, "_found", {})
    torch._dynamo.reset()
    x = torch.randn(3, 40)
    made = torch.compile(lambda x: torch.relu(x) * 2 + 1, backend=compiler.compile_graph)(x)
    torch.testing.assert_close(made, torch.relu(x) * 2 + 1)
    (found,) = records.records()
    assert found.verdict.chosen == EAGER and not found.steps and found.speedup == 1
    assert "relu" in found.title and "relu" in found.picture
    torch._dynamo.reset()


def test_the_words_are_those_of_the_search() -> None:
    assert (records.EAGER, records.KIND, records.KERNEL_KIND) == (search.EAGER, search.KIND, search.KERNEL_KIND)
    assert records.MOST_ERROR == verify.TIMES_EAGER


def test_a_title_names_the_ops_and_stays_short() -> None:
    b = made.Builder()
    x = b.input((4, 4), "float32")
    assert records.title_of(b.graph([x])) == "no ops"
    twice = b.add("exp", b.add("exp", x))
    assert records.title_of(b.graph([b.add("mul", twice, b.constant(2.0, "float32"))])) == "exp × 2, mul"
    for op in ("sin", "cos", "erf", "relu", "square", "abs", "neg", "expm1", "sigmoid", "tanh", "silu", "floor"):
        twice = b.add(op, twice)
    assert records.title_of(b.graph([twice])).endswith(", …") and len(records.title_of(b.graph([twice]))) < 70


def test_a_record_is_itself_again_and_nothing_else_is_one() -> None:
    one = made.record()
    body = json.loads(json.dumps(one.as_json()))
    assert Record.from_json(body).as_json() == one.as_json() and Record.from_json(body).key == one.key
    broken: list[Callable[[dict[str, Any]], Any]] = [
        lambda body: body.pop("verdict"),
        lambda body: body.update(title=3),
        lambda body: body.update(least_nbytes="many"),
        lambda body: body["steps"][0].update(seconds="soon"),
        lambda body: body["steps"][0].update(text=None),
        lambda body: body["steps"][0].update(more=1),
        lambda body: body.update(graph=[]),
        lambda body: body["verdict"].update(trials=[{"seconds": 1}]),
        lambda body: body["steps"][0].update(nbytes=0.5),
        lambda body: body["steps"][0].update(ops=[1]),
        lambda body: body.update(least_nbytes=2**63),
        lambda body: body["verdict"]["question"]["facts"].update(sizes={"b": "4"}),
    ]
    for breaks in broken:
        changed = json.loads(json.dumps(body))
        breaks(changed)
        with pytest.raises((ValueError, TypeError, KeyError)):
            Record.from_json(changed)


def test_a_record_under_another_name_is_none() -> None:
    one = made.stored()
    path = records.folder() / f"{one.key}.json"
    path.rename(path.with_name(f"{'0' * 32}.json"))
    assert records.records() == [] and records.record_of("0" * 32) is None and records.record_of(one.key) is None
    assert records.record_of("../records/x") is None


def test_the_newest_are_kept_and_listed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST", 3)
    for day in range(1, 6):
        one = made.stored(width=day, when=f"2026-11-0{day}T07:00:00Z")
        os.utime(records.folder() / f"{one.key}.json", (day, day))
    records._bound(records.folder())
    assert [one.verdict.when[8:10] for one in records.records()] == ["05", "04", "03"]


def test_a_key_is_found_by_its_beginning() -> None:
    every = [made.stored(width=width) for width in range(1, 19)]
    one = every[0]
    assert records.find(one.key, every) is one and records.find(one.graph_key[:20].upper(), every) is one
    shortest = next(n for n in range(1, 33) if sum(other.key.startswith(one.key[:n]) for other in every) == 1)
    assert records.find(one.key[:shortest], every) is one
    with pytest.raises(GraphError, match="ambiguous") as caught:  # 18 keys begin with 16 digits
        records.find(next(d for d in "0123456789abcdef" if sum(o.key.startswith(d) for o in every) > 1), every)
    assert "type more of it" in caught.value.hint
    for wrong in ("", "zz", "../x"):
        with pytest.raises(GraphError, match="no searched kernel graph") as caught:
            records.find(wrong, every)
        assert "anytorch graph list" in caught.value.hint
    with pytest.raises(GraphError) as caught:
        records.find("a", [])
    assert "superoptimize" in caught.value.hint


def test_forgetting_takes_the_verdicts_along_but_not_those_of_others() -> None:
    one = made.stored(width=1, kernels=("own", "shared"))
    other = made.stored(width=2, kernels=("shared",))
    assert records.forget([one]) == 2
    assert [left.key for left in records.records()] == [other.key]
    assert store.recall(one.verdict.question, budget_s=0) is None and store.recall(made.question("own")) is None
    assert store.recall(made.question("shared")) is not None
    elsewhere = made.Question("quantized product", "int8", "cpu", {})
    store.remember(made.Verdict(elsewhere, (made.Trial("a", 1.0),), "a", "the only one"))
    (records.folder() / "damaged.json").write_text("{")
    assert records.clear() == (records.folder(), 2) and not records.folder().exists()
    assert records.clear() == (None, 0)
    assert [left.question.kind for left in store.verdicts()] == ["quantized product"]


def test_processes_that_write_at_once_leave_whole_records() -> None:
    script = "from tests.graph import made\nfor width in range(1, 5):\n    made.stored(width=width)\n"
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "src")])
    running = [
        subprocess.Popen([sys.executable, "-c", script], cwd=root, env={**os.environ, "PYTHONPATH": path})
        for _ in range(3)
    ]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(records.records()) == 4 and not list(records.folder().glob(".*"))
