"""`anytorch embed`: files and standard input in, files, lines or hits out; data on one stream, words on the other."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from anytorch.cli.main import main
from anytorch.errors import InputError, OutputError, UsageError
from anytorch.text.embed import encoder_builder
from anytorch.text.embed import engine as engine_module
from anytorch.text.embed.files_read import Chunk, Source
from anytorch.text.embed.files_write import replacing, write_vectors

LINES = ["Hello, world!", "The cat sleeps on the sofa.", "", "Refunds take five working days.", "word " * 300]


class Answer:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def embed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, make_encoder: Any, model_folder: Path
) -> Callable[..., Answer]:
    """`embed("file", "--option")` with a stand-in encoder behind it."""
    monkeypatch.setattr(encoder_builder, "build_encoder", lambda *given, **named: (make_encoder(), "a test's"))

    def call(*arguments: object) -> Answer:
        capsys.readouterr()
        status = main(["embed", *map(str, arguments)])
        return Answer(status, *capsys.readouterr())

    return call


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


def test_lines_on_standard_output(embed: Callable[..., Answer], texts: Path) -> None:
    done = embed(texts, "--dim", 4, "--device", "cpu")
    vectors = np.array([json.loads(line) for line in done.out.splitlines()])
    assert done.status == 0 and vectors.shape == (5, 4) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert "5 texts in " in done.err and "warning: 1 text had more than 256 tokens: truncated" in done.err


def test_one_document(embed: Callable[..., Answer], texts: Path) -> None:
    document = json.loads(embed(texts, "--json", "--explain").out)
    assert np.array(document["vectors"]).shape == (5, 16)
    assert document["texts"] == 5 and document["truncated"] == 1 and document["engine"]["device"] == "cpu"


def test_files(embed: Callable[..., Answer], texts: Path, tmp_path: Path) -> None:
    for ending in ("npy", "jsonl", "parquet"):
        done = embed(texts, "--output", tmp_path / f"out.{ending}")
        assert done.status == 0 and done.out == "" and f"written to {tmp_path / f'out.{ending}'}" in done.err
    array = np.load(tmp_path / "out.npy")
    assert array.shape == (5, 16) and array.dtype == np.float32
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == LINES
    assert np.allclose([row["embedding"] for row in rows], array)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.column("text").to_pylist() == LINES
    assert np.allclose(np.array(table.column("embedding").to_pylist()), array)
    again = embed(texts, "--output", tmp_path / "out.parquet", "--json")
    assert json.loads(again.out)["resumed"] == 5, "it is complete already"
    assert embed(texts, "--output", tmp_path / "out.npy").status == 2
    assert embed(texts, "--output", tmp_path / "out.npy", "--overwrite", "--precision", "ubinary").status == 0
    assert np.load(tmp_path / "out.npy").shape == (5, 2)


def test_search_in_texts_and_in_vectors(embed: Callable[..., Answer], texts: Path, tmp_path: Path) -> None:
    embed(texts, "--output", tmp_path / "out.parquet")
    for source in (texts, tmp_path / "out.parquet"):
        done = embed(source, "--search", LINES[3], "--k", 2)
        assert done.status == 0 and "Refunds take five working days." in done.out.splitlines()[2]
        hits = json.loads(embed(source, "--search", LINES[3], "--k", 2, "--json").out)["hits"]
        assert hits[0] == {"row": 4, "score": 1.0, "text": LINES[3]} and len(hits) == 2
    done = embed(tmp_path / "out.parquet", "--search", "x", "--dim", 3)
    assert done.status == 2 and "with 16 dimensions; the model makes 3" in done.err


@pytest.fixture
def prompted(copied_model: Path) -> Path:
    """A model that has a prompt for each side of a search."""
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}}
    (copied_model / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return copied_model


def test_stored_and_fresh_vectors_of_texts_are_the_same(
    embed: Callable[..., Answer], texts: Path, tmp_path: Path, prompted: Path
) -> None:
    """A file's vectors are searched as passages: they are written with that prompt."""
    embed(texts, "--model", prompted, "--output", tmp_path / "out.parquet")
    question = ("--model", prompted, "--search", "When is my money back?", "--json")
    fresh, stored = (json.loads(embed(source, *question).out)["hits"] for source in (texts, tmp_path / "out.parquet"))
    assert stored == fresh
    plain = json.loads(embed(texts, "--model", prompted, "--json", "--prompt", "").out)["vectors"]
    assert not np.allclose(plain, json.loads(embed(texts, "--model", prompted, "--json").out)["vectors"])


def test_vectors_of_another_model_or_prompt_are_not_searched(
    embed: Callable[..., Answer], texts: Path, tmp_path: Path, prompted: Path
) -> None:
    embed(texts, "--model", prompted, "--output", tmp_path / "out.parquet")
    done = embed(tmp_path / "out.parquet", "--search", "x")
    assert done.status == 2 and "cannot be compared" in done.err and "model was" in done.err and "--model" in done.err
    done = embed(tmp_path / "out.parquet", "--search", "x", "--model", prompted, "--prompt", "title: ")
    assert done.status == 2 and "prompt was 'passage: ' and is 'title: '" in done.err


def test_standard_input(embed: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    give("one\nzwölf\n".encode())
    assert len(embed("-").out.splitlines()) == 2
    give(b'{"body": "one"}\n{"body": "two"}\n{"body": "three"}\n')
    assert len(embed("-", "--format", "jsonl", "--column", "body").out.splitlines()) == 3
    give(b"one\n")
    assert embed("-", "--output", tmp_path / "out.parquet").status == 0
    give(b"")
    assert embed("-").out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.txt"], ": no such file"),
        (["texts.txt", "--output", "out.xls"], "must end in .parquet"),
        (["texts.txt", "--output", "no/folder/out.npy"], "there is no folder"),
        (["texts.txt", "--output", "out.npy", "--search", "x"], "cannot be combined"),
        (["texts.txt", "--quantization", "int9"], "is not one of int8, int4, int2, fp4"),
        (["texts.txt", "--model", "./nothing"], "there is no such folder"),
        (["texts.txt", "--device", "gpux"], "unknown device 'gpux'"),
        (["texts.txt", "--k", "0", "--search", "x"], "--k 0: use a whole number"),
        (["texts.txt", "--column", "nonsense"], "nonsense"),
    ],
)
def test_requests_that_make_no_sense(
    arguments: list[str], says: str, embed: Callable[..., Answer], texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts.parent)
    done = embed(*arguments)
    assert done.status == 2 and says in done.err and done.out == ""
    left = {path.name for path in texts.parent.iterdir()} - {"texts.txt", "anytorch-cache", "anytorch-config.toml"}
    assert not left, "something half-written"


# --- writing --------------------------------------------------------------------------------------------------------------


def rows(texts: list[Any]) -> Iterator[Chunk]:
    for first in range(0, len(texts), 64):
        some = texts[first : first + 64]
        yield Chunk(first + 1, some, pa.table({"n": list(range(first, first + len(some)))}))


def test_columns_are_kept_in_json_lines(embed: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,body,when\n007,hello there,2024-01-02\n8,good bye,\n")
    assert embed(tmp_path / "in.csv", "--column", "body", "--output", tmp_path / "out.jsonl").status == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["body"], row["when"]) for row in found] == [
        ("007", "hello there", "2024-01-02"), ("8", "good bye", ""),
    ]  # fmt: skip
    assert all(len(row["embedding"]) == 16 for row in found)
    hits = json.loads(embed(tmp_path / "out.jsonl", "--column", "body", "--search", "good bye", "--k", 1, "--json").out)
    assert hits["hits"] == [{"row": 2, "score": 1.0, "text": "good bye"}]
    again = embed(tmp_path / "out.jsonl", "--column", "body", "--output", tmp_path / "again.jsonl")
    assert again.status == 2 and "already has a column 'embedding'" in again.err


def test_an_array_is_searched_with_the_texts_it_was_made_of(
    embed: Callable[..., Answer], texts: Path, tmp_path: Path
) -> None:
    array = tmp_path / "out.npy"
    embed(texts, "--output", array)
    question = (array, "--search", LINES[3], "--k", 1)
    assert json.loads(embed(*question, "--json").out)["hits"] == [{"row": 4, "score": 1.0, "text": LINES[3]}]
    assert embed(array).status == 2, "it holds no texts to embed"
    assert "with 16 dimensions; the model makes 3" in embed(array, "--search", "x", "--dim", 3).err
    texts.write_text("other texts\n")
    changed = embed(*question, "--json")
    assert json.loads(changed.out)["hits"] == [{"row": 4, "score": 1.0, "text": None}]
    assert f"{texts} was changed or removed" in changed.err
    (tmp_path / "out.npy.json").unlink()
    assert "does not say which texts these are" in embed(*question).err
    array.write_bytes(b"no array")
    assert embed(*question).status == 2
    embed(texts, "--output", tmp_path / "small.npy", "--precision", "int8")
    assert "int8 or binary cannot be searched" in embed(tmp_path / "small.npy", "--search", "x").err


@pytest.mark.parametrize("name", ["empty.txt", "empty.csv", "empty.tsv", "empty.jsonl"])
def test_an_empty_file_has_no_texts_whatever_its_kind(embed: Callable[..., Answer], tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    for more in ((), ("--column", "text")):
        done = embed(tmp_path / name, "--output", tmp_path / "out.parquet", "--overwrite", *more)
        assert done.status == 0 and "0 texts" in done.err and "complete" not in done.err
        found = embed(tmp_path / name, "--search", "anything", "--json", *more)
        assert found.status == 0 and json.loads(found.out)["hits"] == [] and f"{name} has no texts" in found.err
        assert embed(tmp_path / name, *more).out == ""


def test_a_failure_leaves_no_half_file(fake_engine: Callable[..., Any], tmp_path: Path) -> None:
    target = tmp_path / "out.npy"
    target.write_bytes(b"as it was")
    with pytest.raises(InputError, match="text 200 is int"):
        write_vectors(fake_engine(), rows(["x"] * 200 + [7]), target)
    assert target.read_bytes() == b"as it was" and [p.name for p in tmp_path.glob("*.npy*")] == ["out.npy"]
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(UsageError, match="must end in"):
        write_vectors(fake_engine(), rows(["x"]), tmp_path / "out.csv")


def test_a_disk_that_says_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left on device"), replacing(tmp_path / "x") as file:
        monkeypatch.setattr(os, "fsync", full)
        file.write(b"1")
    with pytest.raises(OutputError, match="cannot write"), replacing(tmp_path / "no" / "x"):
        pass
    assert not list(tmp_path.glob(".x*"))


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with replacing(tmp_path / "x") as file:
        file.write(b"1")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode, "as the user's umask has it"


def test_a_folder_is_no_file_of_texts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        Source(tmp_path, None)


def test_progress_and_a_long_stream(fake_engine: Callable[..., Any], tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    count = write_vectors(
        fake_engine(), rows([f"text {n}" for n in range(1000)]), tmp_path / "out.npy", total=1000,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert count == 1000 and seen[-1] == (1000, 1000) and len(seen) > 10
    assert np.array_equal(np.load(tmp_path / "out.npy")[7], fake_engine().encode("text 7"))
    assert write_vectors(fake_engine(), [], tmp_path / "none.npy") == 0
    assert np.load(tmp_path / "none.npy").shape == (0, 16)


def test_an_interruption_says_what_was_kept(
    embed: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anytorch.text.embed import files

    source, target = tmp_path / "many.txt", tmp_path / "many.parquet"
    source.write_text("".join(f"line {number}\n" for number in range(40)))
    monkeypatch.setattr(files, "CPU_ROWS", 10)
    real, calls = engine_module.ArrowEngine.encode, [0]

    def interrupted(self: Any, texts: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return real(self, texts, **options)

    monkeypatch.setattr(engine_module.ArrowEngine, "encode", interrupted)
    done = embed(source, "--output", target, "--device", "cpu")
    assert done.status == 130 and "interrupted" in done.err and not target.exists()
    assert "rows are finished and kept beside" in done.err and "run the same command to resume" in done.err
    again = embed(source, "--output", target, "--device", "cpu")
    assert again.status == 0 and "finished by an earlier run: " in again.err and target.exists()
    calls[0] = 3
    done = embed(source, "--output", tmp_path / "other.parquet", "--device", "cpu")
    assert done.status == 130 and "no part of" in done.err and "starts over" in done.err


def test_blank_lines_are_no_answers_and_keep_their_numbers(embed: Callable[..., Answer], tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("\na red apple\n   \na green pear\n")
    done = embed(path, "--search", "a green pear", "--k", 4, "--json")
    assert sorted(hit["row"] for hit in json.loads(done.out)["hits"]) == [2, 4]
    path.write_text("\n\n")
    assert json.loads(embed(path, "--search", "pear", "--json").out)["hits"] == []
