"""What can be said without a cluster: how it is shared out, how many replicas, and the journal of scattered parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anytorch.cli.main import main
from anytorch.errors import ModelError, UsageError
from anytorch.serve.options import ServeOptions
from anytorch.serve.ray.cluster import Share, shares
from anytorch.serve.ray.deploy import Scale, free_port, parse_scale, start_serve
from anytorch.serve.ray.files import ScatteredJournal, encode_file_on_ray
from anytorch.serve.running import first_answer
from anytorch.text.embed.files_journal import part_path

IDENTITY = {"dim": 3, "chunk_rows": 10}


@pytest.mark.parametrize(
    ("resources", "device", "nodes", "whole", "expected"),
    [
        ({"CPU": 16.0, "GPU": 4.0}, "auto", 1, True, Share({"num_cpus": 1, "num_gpus": 1}, 4, None)),
        ({"CPU": 16.0, "NPU": 8.0}, "auto", 1, False, Share({"num_cpus": 1, "resources": {"NPU": 1}}, 8, None)),
        ({"CPU": 16.0, "GPU": 4.0}, "cpu", 2, True, Share({"num_cpus": 4}, 2, 8)),
        ({"CPU": 2.0}, "auto", 1, True, Share({"num_cpus": 1}, 1, 2)),
        ({"CPU": 2.0}, "auto", 1, False, Share({"num_cpus": 1}, 2, 1)),
        ({}, "auto", 0, False, Share({"num_cpus": 1}, 1, 1)),
    ],
)
def test_a_cluster_is_shared_out_one_per_device(
    resources: dict[str, float], device: str, nodes: int, whole: bool, expected: Share
) -> None:
    assert shares(resources, device, nodes=nodes, whole_nodes=whole) == expected


@pytest.mark.parametrize(
    ("text", "scale"), [(None, Scale(1, None)), ("2", Scale(2, 2)), ("1:8", Scale(1, 8)), ("0:", Scale(0, None))]
)
def test_replicas_are_a_number_or_two(text: str | None, scale: Scale) -> None:
    assert parse_scale(text) == scale


@pytest.mark.parametrize("text", ["x", "3:1", "-1", "0", "1:x"])
def test_replicas_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--replicas"):
        parse_scale(text)


def test_a_file_is_refused_as_without_ray_before_a_cluster_is_started(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    source, text = tmp_path / "in.parquet", tmp_path / "in.txt"
    pq.write_table(pa.table({"text": ["one"], "embedding": [1.0]}), source)
    text.write_text("one\n")
    refused: list[tuple[Path, str, dict[str, str], str]] = [
        (source, "out.csv", {}, "the target must be a Parquet file"),
        (source, "in.parquet", {}, "both source and target"),
        (source, "out.parquet", {}, "already has a column 'embedding'"),
        (source, "out.parquet", {"vector_column": "v", "missing": "skip"}, "missing='skip'"),
        (text, "out.parquet", {}, "with --ray the source must be Parquet"),
    ]
    for given, target, options, words in refused:
        with pytest.raises(UsageError, match=words):
            encode_file_on_ray(given, tmp_path / target, column="text", address="no cluster", **options)  # type: ignore[arg-type]


def journal(tmp_path: Path, *, resume: bool = True, **changes: int) -> ScatteredJournal:
    return ScatteredJournal(tmp_path / "out.parquet", {**IDENTITY, **changes}, resume=resume)


def finish(one: ScatteredJournal, number: int) -> None:
    part_path(one.folder, number).write_bytes(b"x" * (number + 1))
    one.add(number, 10, 1, number + 1)


def test_parts_count_in_any_order_and_after_a_kill(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        finish(first, 7)
        finish(first, 2)
        part_path(first.folder, 5).write_bytes(b"not noted")
    with journal(tmp_path) as second:
        assert sorted(second.parts) == [2, 7]
        assert (second.rows, second.missing) == (20, 2)
        assert not part_path(second.folder, 5).exists()


def test_a_damaged_part_is_computed_again(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        finish(first, 1)
        finish(first, 3)
        part_path(first.folder, 3).write_bytes(b"")
    with journal(tmp_path) as second:
        assert sorted(second.parts) == [1]


def test_another_run_is_refused_unless_it_starts_afresh(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        finish(first, 1)
    with pytest.raises(UsageError, match="dim was 3 and is 4"), journal(tmp_path, dim=4):
        pass
    with journal(tmp_path, resume=False, dim=4) as second:
        assert not second.parts


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with journal(tmp_path), pytest.raises(UsageError, match="another run"), journal(tmp_path):
        pass


def test_a_journal_of_parts_in_order_is_gone_on_with(tmp_path: Path) -> None:
    folder = journal(tmp_path).folder
    folder.mkdir()
    part_path(folder, 0).write_bytes(b"xy")
    parts = [{"rows": 10, "missing": 0, "nbytes": 2}]
    (folder / "journal.json").write_text(json.dumps({"format": 1, "identity": IDENTITY, "parts": parts}))
    with journal(tmp_path) as one:
        assert sorted(one.parts) == [0]


def test_a_journal_that_cannot_be_understood_is_left_alone(tmp_path: Path) -> None:
    folder = journal(tmp_path).folder
    folder.mkdir()
    (folder / "journal.json").write_text('{"format": 9, "parts": {}}')
    with pytest.raises(UsageError, match="is invalid"), journal(tmp_path):
        pass


class Died(Exception): ...


@pytest.mark.parametrize(
    "why", [TimeoutError("HTTP proxies not available after 60s."), Died("it was killed by ray.kill")]
)
def test_ray_serve_may_take_longer_to_start_than_ray_waits(why: Exception) -> None:
    asked: list[object] = []

    def slow(**options: object) -> None:
        asked.append(options)
        if len(asked) == 1:
            raise why

    start_serve(slow, ServeOptions(port=8123), Died)
    assert asked == [{"http_options": {"host": "127.0.0.1", "port": 8123}}] * 2
    asked.clear()

    def never(**options: object) -> None:
        asked.append(options)
        raise TimeoutError("HTTP proxies not available after 60s.")

    with pytest.raises(TimeoutError):
        start_serve(never, ServeOptions(port=8123))
    assert len(asked) == 2


def test_a_service_that_never_answers_is_not_waited_for_without_end() -> None:
    options = ServeOptions(port=free_port("127.0.0.1"))
    found = first_answer(options, key=None, stopped=lambda: False, limit_s=0.05)
    assert isinstance(found, ModelError) and str(options.port) in found.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--replicas", "2"], "--replicas needs --ray"),
        (["embed", "texts.txt", "--ray"], "Parquet"),
        (["embed", "-", "--ray", "--output", "x.parquet"], "Parquet"),
    ],
)
def test_the_command_line_says_what_it_cannot_do(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
