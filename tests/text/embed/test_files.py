"""Files of texts in, Parquet out: every format, every way to be interrupted, every bad row. The encoder is a fake."""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch.errors import InputError, OutputError, UsageError
from anytorch.text.embed import files, files_journal, files_write
from anytorch.text.embed.files import FIRST_ROWS, Pieces, encode_file
from anytorch.text.embed.files_journal import differences
from anytorch.text.embed.files_read import Chunk, Source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"text number {number}" + " and more" * (number % 9) for number in range(100)]
Make = Callable[..., Any]


def write_source(folder: Path, ending: str, texts: list[str] = TEXTS) -> Path:
    path = folder / f"source.{ending}"
    plain = ending.removesuffix(".gz")
    if plain == "parquet":
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=7)
        return path
    if plain == "txt":
        body = "".join(f"{text}\n" for text in texts)
    elif plain == "jsonl":
        body = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts))
    else:
        separator = "\t" if plain == "tsv" else ","
        body = "".join(
            f"{separator.join(row)}\n" for row in [("id", "text"), *((str(n), t) for n, t in enumerate(texts))]
        )
    opener = gzip.open if ending.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(body)
    return path


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["parquet", "csv", "tsv", "jsonl", "txt", "csv.gz", "jsonl.gz"])
def test_every_format_gives_the_same_vectors(ending: str, tmp_path: Path, fake_engine: Make) -> None:
    engine = fake_engine()
    target = tmp_path / "out.parquet"
    report = encode_file(write_source(tmp_path, ending), target, engine=engine, chunk_rows=13, column="text")
    assert (report.rows, report.resumed, report.missing) == (100, 0, 0)
    table = pq.read_table(target)
    assert table.column("text").to_pylist() == TEXTS
    if ending != "txt":
        assert [str(value) for value in table.column("id").to_pylist()] == [str(number) for number in range(100)]
    kind = table.schema.field("embedding").type
    assert pa.types.is_fixed_size_list(kind) and kind.value_type == pa.float32() and kind.list_size == engine.dim
    stored = np.array(table.column("embedding").to_pylist(), np.float32)
    np.testing.assert_array_equal(stored, engine.encode(TEXTS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", f"source.{ending}"]


def test_only_parquet_pays_for_its_import(tmp_path: Path) -> None:
    """In a process of its own: this one has it."""
    source, table = write_source(tmp_path, "csv"), write_source(tmp_path, "parquet")
    code = f"""
import sys
from pathlib import Path
from anytorch.text.embed import files
from anytorch.text.embed.files_read import Chunk, Source
assert sum(len(chunk.texts) for chunk in Source(Path({str(source)!r}), "text").chunks(30)) == 100
assert "pyarrow.parquet" not in sys.modules, "it was imported for a CSV file"
assert sum(len(chunk.texts) for chunk in Source(Path({str(table)!r}), "text").chunks(30)) == 100
assert "pyarrow.parquet" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("precision", ["float16", "int8", "ubinary"])
def test_smaller_vectors(precision: str, tmp_path: Path, fake_engine: Make) -> None:
    engine = fake_engine()
    source = write_source(tmp_path, "txt")
    encode_file(source, tmp_path / "out.parquet", engine=engine, precision=precision, dim=8, prompt="say: ")
    stored = pq.read_table(tmp_path / "out.parquet").column("embedding")
    expected = engine.encode(TEXTS, precision=precision, dim=8, prompt="say: ")
    assert stored.type.value_type == pa.from_numpy_dtype(expected.dtype)
    np.testing.assert_array_equal(np.array(stored.to_pylist(), expected.dtype), expected)


def test_columns_and_metadata_of_parquet_stay(tmp_path: Path, fake_engine: Make) -> None:
    table = pa.table(
        {
            "text": pa.array(TEXTS).dictionary_encode(),
            "when": pa.array(range(100), pa.timestamp("us")),
            "tags": [[str(n), None] for n in range(100)],
            "nested": [{"a": n, "b": {"c": [n]}} for n in range(100)],
        }
    ).replace_schema_metadata({"owner": "somebody"})
    pq.write_table(table, tmp_path / "in.parquet")
    encode_file(tmp_path / "in.parquet", tmp_path / "out.parquet", engine=fake_engine(), chunk_rows=30)
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.drop_columns(["embedding"]).to_pylist() == table.to_pylist()
    assert found.schema.field("when").type == pa.timestamp("us") and found.schema.metadata[b"owner"] == b"somebody"


def test_csv_is_kept_as_it_stands(tmp_path: Path, fake_engine: Make) -> None:
    rows = [["007", 'He said "no", twice.'], ["1e3", "two\nlines"], ["", ""], ["NULL", "ünï\tcödé"]]
    with (tmp_path / "in.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["id", "text"], *rows])
    encode_file(tmp_path / "in.csv", tmp_path / "out.parquet", engine=fake_engine(), column="text", chunk_rows=3)
    found = pq.read_table(tmp_path / "out.parquet")
    assert [[row["id"], row["text"]] for row in found.to_pylist()] == rows


def test_json_objects_of_different_kinds(tmp_path: Path, fake_engine: Make) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "id": 1, "more": {"k": 1}},
        {"text": "b", "id": 2.5, "late": True},
        {"text": "c", "id": "three", "more": None, "mixed": 1},
        {"text": "d", "mixed": [1]},
    ]
    (tmp_path / "in.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    encode_file(tmp_path / "in.jsonl", tmp_path / "out.parquet", engine=fake_engine(), column="text", chunk_rows=1)
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.column_names == ["text", "id", "more", "late", "mixed", "embedding"]
    assert found.column("id").to_pylist() == ["1", "2.5", "three", None]
    assert found.column("more").to_pylist() == [{"k": 1}, None, None, None]
    assert found.column("mixed").to_pylist() == [None, None, "1", "[1]"]
    # A chunk that holds several kinds gives the same column.
    encode_file(tmp_path / "in.jsonl", tmp_path / "b.parquet", engine=fake_engine(), column="text", chunk_rows=10)
    assert pq.read_table(tmp_path / "b.parquet").column("mixed").to_pylist() == [None, None, "1", "[1]"]


@pytest.mark.parametrize("ending", ["txt", "csv", "jsonl", "parquet"])
def test_no_rows(ending: str, tmp_path: Path, fake_engine: Make) -> None:
    if ending == "parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "in.parquet")
    else:
        (tmp_path / f"in.{ending}").write_text("text\n" if ending == "csv" else "")
    engine = fake_engine()
    assert encode_file(tmp_path / f"in.{ending}", tmp_path / "out.parquet", engine=engine).rows == 0
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.num_rows == 0 and found.schema.field("embedding").type.list_size == engine.dim


def test_parts_are_saved_by_time(tmp_path: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    chunk = Chunk(101, [f"text {n}" for n in range(1000)], pa.table({"n": list(range(1000))}))
    found = []
    for piece in Pieces(10.0, lambda: now[0]).of(chunk):
        found.append(piece)
        now[0] += 0.2 * len(piece.texts)  # fifty of these texts take ten seconds
    assert [len(piece.texts) for piece in found[:3]] == [FIRST_ROWS, 50, 50]
    assert [text for piece in found for text in piece.texts] == chunk.texts
    assert [piece.table.column("n")[0].as_py() + 101 for piece in found] == [piece.first for piece in found]
    assert [len(piece.texts) for piece in Pieces(None).of(chunk)] == [1000]
    # The whole run: pieces of any size are put together, and an interrupted one is resumed in the middle of a chunk.
    monkeypatch.setattr(files, "SAVE_S", 1e-9)
    monkeypatch.setattr(files, "FIRST_ROWS", 16)
    (tmp_path / "in.txt").write_text("".join(f"line {n}\n" for n in range(100)))
    engine = fake_engine()
    encode, calls = engine.encode, []

    def interrupted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(*given, **named)

    monkeypatch.setattr(engine, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode_file(tmp_path / "in.txt", tmp_path / "out.parquet", engine=engine)
    monkeypatch.setattr(engine, "encode", encode)
    report = encode_file(tmp_path / "in.txt", tmp_path / "out.parquet", engine=engine)
    assert (report.rows, report.resumed) == (100, 48)
    assert pq.read_table(tmp_path / "out.parquet").column("text").to_pylist() == [f"line {n}" for n in range(100)]


def test_chunks_from_any_row(tmp_path: Path) -> None:
    source = Source(write_source(tmp_path, "csv"), "text")
    first = next(source.chunks(10))
    assert len(first.texts) == 10 and first.first == 1
    assert [chunk.first for chunk in source.chunks(30, skip=50)] == [51, 81]


# --- which column, which file ----------------------------------------------------------------------------------------


def test_the_column_is_found_or_asked_for(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "one.parquet")
    pq.write_table(pa.table({"title": ["x"], "text": ["y"]}), tmp_path / "usual.parquet")
    pq.write_table(pa.table({"title": ["x"], "summary": ["y"]}), tmp_path / "two.parquet")
    assert Source(tmp_path / "one.parquet", None).column == "body"
    assert Source(tmp_path / "usual.parquet", None).column == "text"
    with pytest.raises(InputError, match=r"two.parquet: name the column with the texts; its columns: title, summary"):
        Source(tmp_path / "two.parquet", None)
    with pytest.raises(InputError, match="no column 'titel'; its columns: title, summary") as caught:
        Source(tmp_path / "two.parquet", "titel")
    assert caught.value.hint == "did you mean 'title'?"


def test_what_cannot_be_asked_for(tmp_path: Path, fake_engine: Make) -> None:
    source, engine = write_source(tmp_path, "txt"), fake_engine()
    with pytest.raises(UsageError, match="the target must be a Parquet file"):
        encode_file(source, tmp_path / "out.csv", engine=engine)
    with pytest.raises(InputError, match=": no such file"):
        encode_file(tmp_path / "absent.txt", tmp_path / "out.parquet", engine=engine)
    with pytest.raises(UsageError, match="does not show a known format"):
        encode_file(shutil.copy(source, tmp_path / "in.doc"), tmp_path / "out.parquet", engine=engine)
    assert encode_file(tmp_path / "in.doc", tmp_path / "out.parquet", engine=engine, format="txt").rows == 100
    with pytest.raises(UsageError, match="chunk_rows=0"):
        encode_file(source, tmp_path / "other.parquet", engine=engine, chunk_rows=0)
    with pytest.raises(UsageError, match="both source and target"):
        encode_file(tmp_path / "out.parquet", tmp_path / "out.parquet", engine=engine, column="text")
    with pytest.raises(UsageError, match="already has a column 'embedding'"):
        encode_file(tmp_path / "out.parquet", tmp_path / "again.parquet", engine=engine, column="text")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "out.parquet").read_bytes()[:500])
    with pytest.raises(InputError, match=r"torn.parquet: cannot be read as Parquet"):
        encode_file(tmp_path / "torn.parquet", tmp_path / "again.parquet", engine=engine)


def test_a_target_that_is_there(tmp_path: Path, fake_engine: Make) -> None:
    source, target, engine = write_source(tmp_path, "txt"), tmp_path / "out.parquet", fake_engine()
    target.write_bytes(b"somebody's own file")
    with pytest.raises(UsageError, match="exists"):
        encode_file(source, target, engine=engine)
    assert target.read_bytes() == b"somebody's own file"
    encode_file(source, target, engine=engine, overwrite=True)
    finished = target.stat().st_mtime_ns
    assert encode_file(source, target, engine=engine).resumed == 100, "complete: nothing is done"
    assert target.stat().st_mtime_ns == finished
    with pytest.raises(UsageError, match="made from something else: dim was None and is 8"):
        encode_file(source, target, engine=engine, dim=8)


# --- bad rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "body", "told"),
    [
        ("in.csv", "id,text\n1,a\n2,b,c\n", r"in.csv: row 2 \(line 3\), column 'text'.* 3 fields, the header 2"),
        ("in.csv", 'id,text\n1,"a\n', r"in.csv: row 1 \(line 2\), column 'text'.*unexpected end of data"),
        ("in.jsonl", '{"text": "a"}\n\n{"text": \n', r"in.jsonl: row 2 \(line 3\), column .*not valid JSON"),
        ("in.jsonl", '{"text": "a"}\n[1]\n', r"in.jsonl: row 2, column .* list, not an object"),
        ("in.jsonl", '{"text": "a"}\n{"text": 5}\n', r"in.jsonl: row 2, column 'text' is int, not text: '5'"),
        ("in.jsonl", '{"text": "a"}\n{"id": 5}\n', r"in.jsonl: row 2, column 'text' is missing \(null\)"),
        ("in.jsonl", '{"text": "a \\ud800"}\n', r"in.jsonl: row 1, column 'text' holds a lone surrogate \(U\+D800\)"),
        ("in.txt", b"fine\nnot \xff fine\n", r"in.txt: after line \d there is a byte that is not UTF-8"),
        ("in.txt.gz", b"no gzip", r"in.txt.gz: cannot be read after line 0"),
        ("in.txt.gz", gzip.compress(b"a\nb\n", mtime=0)[:10] + b"\xff" * 9, r"in.txt.gz: cannot be read after line 0"),
        ("in.csv", '"text"x\na\n', r"in.csv: its header cannot be read"),
        ("in.jsonl", '{"text": "a"}\n{"text": "b", "\\ud800": 1}\n', r"in.jsonl: row 2, .* a name .* lone surrogate"),
    ],
)
def test_bad_rows_are_named(name: str, body: str | bytes, told: str, tmp_path: Path, fake_engine: Make) -> None:
    (tmp_path / name).write_bytes(body if isinstance(body, bytes) else body.encode())
    with pytest.raises(InputError, match=told):
        encode_file(tmp_path / name, tmp_path / "out.parquet", engine=fake_engine(), column="text")
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("found", "damaged", "told"),
    [
        (b"bad!", b"ba\xff!", "in.parquet: column 'text' holds bytes that are not UTF-8"),
        (b"text", b"te\xfft", "in.parquet: cannot be read as Parquet: 'utf-8' codec"),
    ],
)
def test_parquet_whose_texts_are_not_utf8(
    found: bytes, damaged: bytes, told: str, tmp_path: Path, fake_engine: Make
) -> None:
    path = tmp_path / "in.parquet"
    table = pa.table({"text": ["good", "bad!"]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    path.write_bytes(path.read_bytes().replace(found, damaged))
    with pytest.raises(InputError, match=told):
        encode_file(path, tmp_path / "out.parquet", engine=fake_engine())


def test_parquet_that_has_fewer_rows_than_it_says(tmp_path: Path, fake_engine: Make) -> None:
    """Arrow takes a page whose header was damaged for one without rows; the rows must not be lost in silence."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c", "d"]}), path, compression="none", use_dictionary=False)
    whole, count = path.read_bytes(), b",\x15\x08"  # of the page's values, in Thrift's compact form: 4
    assert whole.count(count) == 1
    path.write_bytes(whole.replace(count, b",\x15\x00"))
    with pytest.raises(InputError, match=r"in.parquet: cannot be read to its end: 4 of the 4 rows"):
        encode_file(path, tmp_path / "out.parquet", engine=fake_engine(), missing="null")
    assert not (tmp_path / "out.parquet").exists()


def test_missing_texts(tmp_path: Path, fake_engine: Make) -> None:
    pq.write_table(pa.table({"text": ["a", None, "c", None, None]}), tmp_path / "in.parquet")
    engine, target = fake_engine(), tmp_path / "out.parquet"
    with pytest.raises(InputError, match=r"in.parquet: row 2, column 'text' is missing") as caught:
        encode_file(tmp_path / "in.parquet", target, engine=engine)
    assert "missing='null'" in caught.value.hint
    report = encode_file(tmp_path / "in.parquet", target, engine=engine, missing="null", chunk_rows=2, resume=False)
    assert (report.rows, report.missing) == (5, 3)
    vectors = pq.read_table(target).column("embedding").to_pylist()
    assert [vector is None for vector in vectors] == [False, True, False, True, True]
    np.testing.assert_array_equal(np.array(vectors[2], np.float32), engine.encode("c"))


# --- interrupted -----------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from pathlib import Path
import numpy as np
from anytorch.text.embed import encoder_builder, engine as engine_module, files, files_journal, files_write

class Fake:
    width, padded = 16, False
    def run(self, ids, starts):
        pairs = zip(starts[:-1], starts[1:])
        return np.stack([np.cos(np.arange(16, dtype=np.float32) * int(ids[a:b].sum())) for a, b in pairs])
    def describe(self):
        return {"kernels": "fake"}
    def close(self):
        pass

encoder_builder.build_encoder = lambda *given, **named: (Fake(), "a test's")

def die(*given, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def after(times, owner, name, before=False):
    real, calls = getattr(owner, name), []
    def counted(*given, **named):
        calls.append(1)
        if before and len(calls) == times:
            die()
        answer = real(*given, **named)
        if len(calls) == times:
            die()
        return answer
    setattr(owner, name, counted)

point, model, source, target = sys.argv[1:]
if point == "before the journal":
    after(1, files_journal.Journal, "_write", before=True)
elif point == "after the journal":
    after(1, files_journal.Journal, "_write")
elif point == "while a part is written":
    after(4, files_write, "sync", before=True)
elif point == "part there, not in the journal":
    after(3, files_journal.Journal, "add", before=True)
elif point == "part in the journal":
    after(3, files_journal.Journal, "add")
elif point == "while the target is put together":
    after(4, files_write, "conform")
elif point == "target there, parts not removed":
    after(1, files_journal.Journal, "remove", before=True)
with engine_module.ArrowEngine(model, "cpu") as engine:
    report = files.encode_file(Path(source), Path(target), engine=engine, chunk_rows=13, column="text")
    print(report.resumed)
"""
POINTS = {
    "before the journal": 0,
    "after the journal": 0,
    "while a part is written": 3 * 13,
    "part there, not in the journal": 2 * 13,
    "part in the journal": 3 * 13,
    "while the target is put together": 100,
    "target there, parts not removed": 100,
}


def run_script(point: str, model: Path, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, point, str(model), str(source), str(target)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    source = write_source(folder, "jsonl")
    finished = run_script("", model_folder, source, folder / "out.parquet")
    assert finished.returncode == 0, finished.stderr
    return source, (folder / "out.parquet").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed(point: str, uninterrupted: tuple[Path, bytes], tmp_path: Path, model_folder: Path) -> None:
    source, whole = uninterrupted
    target = tmp_path / "out.parquet"
    killed = run_script(point, model_folder, source, target)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert target.exists() == (point == "target there, parts not removed")
    resumed = run_script("", model_folder, source, target)
    assert resumed.returncode == 0, resumed.stderr
    assert int(resumed.stdout) == POINTS[point], "what was finished was not computed again"
    assert target.read_bytes() == whole, "not one byte is different"
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


def interrupted(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Path, Path]:
    """A source and a target with 39 rows finished."""
    source, target = write_source(tmp_path, "csv"), tmp_path / "out.parquet"
    real, calls = files.write_part, []

    def write_part(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(*given)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_part", write_part)
        with pytest.raises(KeyboardInterrupt):
            encode_file(source, target, engine=engine, column="text", chunk_rows=13, **options)
    assert not target.exists()
    return source, target


def test_ctrl_c_and_on(tmp_path: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    source, target = interrupted(tmp_path, engine, monkeypatch)
    seen: list[tuple[int, int | None]] = []
    report = encode_file(
        source, target, engine=engine, column="text", chunk_rows=13, progress=lambda *at: seen.append(at)
    )
    assert (report.rows, report.resumed) == (100, 39)
    assert seen[0] == (39, 100) and seen[-1] == (100, 100) and seen == sorted(seen)


def test_not_with_other_settings(tmp_path: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    source, target = interrupted(tmp_path, engine, monkeypatch)
    options = {"engine": engine, "column": "text", "chunk_rows": 13}
    with pytest.raises(UsageError, match="cannot be resumed: dim was None and is 8") as caught:
        encode_file(source, target, **options, dim=8)
    assert "resume=False" in caught.value.hint
    with pytest.raises(UsageError, match="chunk_rows was 13 and is 14"):
        encode_file(source, target, **{**options, "chunk_rows": 14})
    with pytest.raises(UsageError, match="source column was 'text' and is 'id'"):
        encode_file(source, target, **{**options, "column": "id"})
    with pytest.raises(UsageError, match="engine max_length was 256 and is 100"):
        encode_file(source, target, **{**options, "engine": fake_engine(max_length=100)})
    with source.open("a") as file:
        file.write("100,one more\n")
    with pytest.raises(UsageError, match=r"source size was \d+ and is \d+; source mtime_ns .* source hash was"):
        encode_file(source, target, **options)
    report = encode_file(source, target, **options, resume=False)
    assert (report.rows, report.resumed) == (101, 0)


def test_another_model_is_another_run(tmp_path: Path, model_folder: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model_folder, copy)
    assert files_journal.model_identity(copy) == files_journal.model_identity(model_folder)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert files_journal.model_identity(copy) != files_journal.model_identity(model_folder)


def test_a_damaged_part_is_computed_again(tmp_path: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    source, target = interrupted(tmp_path, engine, monkeypatch)
    part = tmp_path / ".out.parquet.partial" / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-10])
    report = encode_file(source, target, engine=engine, column="text", chunk_rows=13)
    assert (report.rows, report.resumed) == (100, 13)


def test_a_damaged_journal(tmp_path: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    source, target = interrupted(tmp_path, engine, monkeypatch)
    path = tmp_path / ".out.parquet.partial" / "journal.json"
    whole = json.loads(path.read_text())
    for damaged in (
        "{",
        *(json.dumps({**whole, "parts": [{**whole["parts"][0], "rows": rows}]}) for rows in (-1, 1e999)),
    ):
        path.write_text(damaged)
        assert files_journal.finished_rows(target) == 0
        with pytest.raises(UsageError, match=r"journal.json: is invalid"):
            encode_file(source, target, engine=engine, column="text", chunk_rows=13)
    assert encode_file(source, target, engine=engine, column="text", chunk_rows=13, resume=False).rows == 100


def test_one_run_at_a_time(tmp_path: Path, fake_engine: Make) -> None:
    source, target, engine = write_source(tmp_path, "txt"), tmp_path / "out.parquet", fake_engine()
    with files_journal.Journal(target, {}, resume=True), pytest.raises(UsageError, match="another run is writing"):
        encode_file(source, target, engine=engine)


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["a part", "the whole"])
def test_disk_full(moment: str, tmp_path: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, source, target = fake_engine(), write_source(tmp_path, "txt"), tmp_path / "out.parquet"
    real = files_write.sync

    def sync(path: Path) -> None:
        full = path.name == "part-000002.writing" if moment == "a part" else path.name.endswith(".whole")
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path)

    with monkeypatch.context() as patched:
        patched.setattr(files_write, "sync", sync)
        with pytest.raises(OutputError, match="the disk is full") as caught:
            encode_file(source, target, engine=engine, chunk_rows=13)
    kept = 26 if moment == "a part" else 100
    assert f"{kept} rows are finished and kept" in caught.value.message and not target.exists()
    assert not list(tmp_path.rglob("*.writing")) and not list(tmp_path.rglob("*.whole"))
    assert encode_file(source, target, engine=engine, chunk_rows=13).resumed == kept
    assert target.exists()


def test_a_disk_that_is_really_full(tmp_path: Path, model_folder: Path, missing: Callable[[str, str], Any]) -> None:
    """A file system of 200 KB, where the machine lets us make one: Arrow's own error becomes ours."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", disk], capture_output=True, check=False)
    if made.returncode:
        missing("mount", made.stderr.decode().strip())
    try:
        source = write_source(tmp_path, "txt", TEXTS * 40)
        ended = run_script("", model_folder, source, disk / "out.parquet")
        assert ended.returncode == 1 and "OutputError" in ended.stderr and "the disk is full" in ended.stderr
        assert [path.name for path in disk.iterdir()] == [".out.parquet.partial"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path, fake_engine: Make) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="writing beside"):
        encode_file(write_source(tmp_path, "txt"), tmp_path / "file" / "out.parquet", engine=fake_engine())


# --- pure ------------------------------------------------------------------------------------------------------------


def test_differences_in_words() -> None:
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}, "c": 2}) == []
    assert differences({"a": {"b": 1}}, {"a": {"b": 2}, "c": "x"}) == ["a b was 1 and is 2", "c was None and is 'x'"]


def test_large_files_are_sampled_and_still_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_journal, "WHOLE_NBYTES", 1000)
    monkeypatch.setattr(files_journal, "SAMPLE_NBYTES", 10)
    path = tmp_path / "large"
    path.write_bytes(b"x" * 5000)
    before = files_journal.file_identity(path)["hash"]
    for change in (0, 4999):
        body = bytearray(b"x" * 5000)
        body[change] = ord("y")
        path.write_bytes(body)
        assert files_journal.file_identity(path)["hash"] != before


def test_any_json_in_a_journal_is_resumed_or_our_error(tmp_path: Path) -> None:
    target, identity = tmp_path / "out.parquet", {"rows": 3}
    whole = {"format": files_journal.FORMAT, "identity": identity, "parts": [{"rows": 1, "missing": 0, "nbytes": 5}]}
    journal = files_journal.partial_folder(target) / "journal.json"
    kinds: tuple[object, ...] = (
        None,
        True,
        -1,
        10**400,
        1.5,
        "x",
        [],
        {},
        [None],
        [[]],
        [{}],
        [{"rows": "1"}],
        {"a": 1},
    )
    texts = [json.dumps(kind) for kind in kinds] + [
        "",
        "{",
        "[" * 100_000,
        "\ud800".encode("utf-8", "replace").decode(),
    ]
    texts += [json.dumps({**whole, key: kind}) for key in whole for kind in kinds]
    refused = 0
    for text in texts:
        journal.parent.mkdir(exist_ok=True)
        journal.write_text(text)
        try:
            with files_journal.Journal(target, identity, resume=True) as found:
                assert found.rows == 0
        except UsageError:
            refused += 1
    assert refused > 30 and files_journal.finished_rows(target) == 0


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("ending", [".txt", ".txt.gz", ".csv"])
def test_text_with_a_mark_is_read_by_it(encoding: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"in{ending}"
    body = ("text\nÄpfel\nбирне\n" if ending == ".csv" else "Äpfel\nбирне\n").encode(encoding)
    path.write_bytes(gzip.compress(body) if ending.endswith(".gz") else body)
    found = [text for chunk in Source(path, None).chunks(10) for text in chunk.texts]
    assert found == ["Äpfel", "бирне"]


def test_big_endian_text_and_text_that_ends_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(codecs.BOM_UTF16_BE + "Äpfel\n".encode("utf-16-be"))
    assert [text for chunk in Source(path, None).chunks(10) for text in chunk.texts] == ["Äpfel"]
    path.write_bytes("Äpfel\n".encode("utf-16")[:-1])
    with pytest.raises(InputError, match="not UTF-16"):
        list(Source(path, None).chunks(10))


def test_latin1_is_named_and_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("gut\nÄpfel\n".encode("latin1"))
    with pytest.raises(InputError, match="there is a byte that is not UTF-8") as raised:
        list(Source(path, None).chunks(10))
    assert "from the encoding that it has" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("body", "columns", "texts"),
    [
        ("id;text\n1;a, b\n2;c\n", ["id", "text"], ["a, b", "c"]),
        ("id,text\n1,a; b\n", ["id", "text"], ["a; b"]),
        ("text\na; b\n", ["text"], ["a; b"]),
        ('"a;b",text\n1,x\n', ["a;b", "text"], ["x"]),
    ],
)
def test_semicolons_are_separators_where_the_header_says_so(
    body: str, columns: list[str], texts: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "in.csv"
    path.write_text(body)
    source = Source(path, "text")
    assert list(source.columns) == columns
    assert [text for chunk in source.chunks(10) for text in chunk.texts] == texts


def test_too_many_fields_between_semicolons_are_explained_so(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("id;text\n1;a;b\n")
    with pytest.raises(InputError, match="3 fields") as raised:
        list(Source(path, "text").chunks(10))
    assert "a semicolon" in str(raised.value.hint)
