"""A folder that is searched: what is cut from its files, and that an index is updated, not rebuilt."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anytorch import settings
from anytorch.cli.commands.reset import forget_all
from anytorch.cli.main import main
from anytorch.errors import InputError
from anytorch.text.embed import ArrowEngine, encoder_builder, passages
from anytorch.text.embed import folder as folder_module
from anytorch.text.embed.folder import FolderIndex
from anytorch.text.embed.passages import MOST_CHARACTERS, Passage, paragraphs, passages_of, pieces, short_enough

Make = Callable[..., ArrowEngine]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config.txt").write_text("hidden")
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "x.md").write_text("someone else's")
    (folder / "home.md").write_text("# Keys\n\nUnder the flower pot.\n\n# Food\n\nMilk and eggs.\n")
    (folder / "sub" / "people.csv").write_text("name;remark\nAnna;likes the sea\nBob;likes hills\n")
    (folder / "sub" / "geo.py").write_text("def area(r):\n    return 3.14 * r * r\n")
    (folder / "windows.txt").write_text("größer", "utf-16")
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    return folder


def texts(index: FolderIndex) -> set[str]:
    return {passage.text for file in index._files.values() for passage in file.passages}


def test_every_kind_of_file(notes: Path, fake_engine: Make) -> None:
    index = FolderIndex(notes, fake_engine())
    done = index.update()
    assert (done.files, done.passages, done.added, done.changed, done.removed, done.skipped) == (4, 6, 4, 0, 0, ())
    assert texts(index) == {
        "# Keys\n\nUnder the flower pot.",
        "# Food\n\nMilk and eggs.",
        "name: Anna; remark: likes the sea",
        "name: Bob; remark: likes hills",
        "def area(r):\n    return 3.14 * r * r",
        "größer",
    }
    (hit,) = index.search("# Food\n\nMilk and eggs.", k=1)
    assert (hit.path, hit.place) == (notes / "home.md", 5) and hit.score == pytest.approx(1, abs=1e-5)


def test_an_update_embeds_only_what_is_new_or_changed(notes: Path, fake_engine: Make) -> None:
    engine = fake_engine()
    FolderIndex(notes, engine).update()
    before = engine.stats.texts
    (notes / "home.md").write_text("# Keys\n\nIn the drawer.\n")
    (notes / "new.txt").write_text("something new\n")
    (notes / "windows.txt").unlink()
    again = FolderIndex(notes, engine)
    done = again.update()
    assert (done.files, done.added, done.changed, done.removed) == (4, 1, 1, 1)
    assert engine.stats.texts - before == 2, "the others' vectors are the stored ones"
    assert "# Keys\n\nIn the drawer." in texts(again) and "größer" not in texts(again)
    assert again.search("something new", k=1)[0].path == notes / "new.txt"
    third = FolderIndex(notes, engine)
    assert third.update().passages == done.passages and engine.stats.texts - before == 3, "one more: the question"
    assert texts(third) == texts(again)


@pytest.mark.parametrize(("every_s", "end"), [(-1.0, MemoryError), (60.0, KeyboardInterrupt)])
def test_what_a_long_update_has_finished_is_kept(
    notes: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch, every_s: float, end: type[BaseException]
) -> None:
    monkeypatch.setattr(folder_module, "SAVE_S", every_s)
    monkeypatch.setattr(folder_module, "AT_ONCE", 1)
    engine = fake_engine()
    encode, calls = engine.encode, []

    def interrupted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise end
        return encode(*given, **named)

    monkeypatch.setattr(engine, "encode", interrupted)
    with pytest.raises(end):
        FolderIndex(notes, engine).update()
    monkeypatch.setattr(engine, "encode", encode)
    assert FolderIndex(notes, engine).update().added == 2, "two of four files were kept"


def test_another_model_has_an_index_of_its_own_and_reset_forgets_all(notes: Path, fake_engine: Make) -> None:
    one, other = FolderIndex(notes, fake_engine()), FolderIndex(notes, fake_engine(), prompt="query: ")
    assert one.path != other.path and one.path.parent == settings.cache_folder() / "folders"
    one.update()
    if sys.platform != "win32":
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o600, "it holds the notes' own words"
    one.path.write_bytes(b"PAR1 damaged")
    assert FolderIndex(notes, fake_engine()).update().added == 4, "a damaged index is made again"
    assert one.path.parent in forget_all() and not one.path.exists()


def test_what_cannot_be_read_is_left_out_with_its_reason(
    notes: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (notes / "latin.txt").write_bytes("größer".encode("latin-1"))
    (notes / "zeros.txt").write_bytes(b"a\0b")
    (notes / "empty.md").write_text("\n\n")
    (notes / "book.pdf").write_bytes(b"%PDF-1.4 broken")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    monkeypatch.setitem(sys.modules, "pymupdf", None)
    done = FolderIndex(notes, fake_engine()).update()
    assert {one.path.name: one.why for one in done.skipped} == {
        "latin.txt": "is not UTF-8",
        "zeros.txt": "is not text",
        "book.pdf": "reading PDF needs a library",
    }
    assert done.files == 5 and FolderIndex(notes, fake_engine()).update().added == 0, "an empty file is known, too"
    with pytest.raises(InputError, match="no such folder"):
        FolderIndex(notes / "home.md", fake_engine())


@pytest.mark.skipif(sys.platform != "linux", reason="its kinds of files and names")
def test_odd_files_of_a_folder(notes: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip
    import os

    monkeypatch.setattr(passages, "MOST_NBYTES", 1 << 20)
    deep = notes / "with space" / "größer" / "deep"
    deep.mkdir(parents=True)
    (deep / "a b ö.txt").write_text("found in the deep")
    (deep / "up").symlink_to(notes, target_is_directory=True)
    (notes / "itself.txt").symlink_to("itself.txt")
    (notes / "nowhere.txt").symlink_to("gone.txt")
    (notes / "endless.txt").symlink_to("/dev/zero")
    os.mkfifo(notes / "pipe.txt")
    for name, part in (("bomb.txt.gz", b"a line\n"), ("bomb.csv.gz", b"a,b\n")):
        (notes / name).write_bytes(gzip.compress(part * 400_000))
    (notes / "large.txt").write_bytes(b"x" * ((1 << 20) + 1))
    (notes / "half.jsonl").write_text('{"text": "half \\ud800", "n": 1}\n')
    (notes / os.fsdecode(b"b\xff.txt")).write_text("no name")
    index = FolderIndex(notes, fake_engine())
    done = index.update()
    assert {one.path.name: one.why for one in done.skipped} == {
        "b\udcff.txt": "its name is not UTF-8",
        "bomb.csv.gz": "larger than 1 MiB",
        "bomb.txt.gz": "larger than 1 MiB",
        "half.jsonl": "row 1, column 'text' holds a lone surrogate (U+D800), which is not a character",
        "endless.txt": "is not a regular file",
        "itself.txt": "Too many levels of symbolic links",
        "large.txt": "larger than 1 MiB",
        "nowhere.txt": "No such file or directory",
        "pipe.txt": "is not a regular file",
    }
    assert done.files == 5
    assert index.search("found in the deep", k=1)[0].path == deep / "a b ö.txt", "once, not through the link upwards"
    assert FolderIndex(notes, fake_engine()).update().added == 0


def test_a_folder_that_cannot_be_listed_is_told(
    notes: Path, fake_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    scandir = os.scandir

    def refusing(path: Any = ".") -> Any:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    done = FolderIndex(notes, fake_engine()).update()
    assert [(one.path.name, one.why) for one in done.skipped] == [("sub", "Permission denied")] and done.files == 2


def test_a_cache_that_cannot_be_written_keeps_nobody_from_an_answer(notes: Path, fake_engine: Make) -> None:
    index = FolderIndex(notes, fake_engine())
    index.path.parent.parent.mkdir(parents=True, exist_ok=True)
    index.path.parent.write_text("a file in the folder's place")
    done = index.update()
    assert done.files == 4 and str(index.path) in done.unsaved
    assert index.search("größer", k=1)[0].path == notes / "windows.txt"


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    """As nbformat 4 has them; a picture's base64 is nobody's note."""
    drawn = [{"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo" * 1000}, "metadata": {}}]
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Boats\n", "\n", "They float."]},
        {
            "cell_type": "code",
            "metadata": {},
            "execution_count": 1,
            "outputs": drawn,
            "source": "import os\nprint(os.name)",
        },
        {"cell_type": "raw", "metadata": {}, "source": []},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    assert passages_of(tmp_path / "a.ipynb") == [
        Passage("# Boats\n\nThey float.", 1),
        Passage("import os\nprint(os.name)", 2),
    ]
    for text in ("{}", "[1]", "no JSON", '{"cells": [1]}', '{"cells": [{"source": 1, "cell_type": "code"}]}'):
        (tmp_path / "a.ipynb").write_text(text)
        with pytest.raises(InputError, match="is not a notebook"):
            passages_of(tmp_path / "a.ipynb")


def test_pages_of_a_pdf(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that pypdf documents: PdfReader(path).pages, each with extract_text()."""
    pages = [
        SimpleNamespace(extract_text=lambda: "first page"),
        SimpleNamespace(extract_text=lambda: "second\npage \ud800"),
    ]
    monkeypatch.setitem(sys.modules, "pypdf", SimpleNamespace(PdfReader=lambda path: SimpleNamespace(pages=pages)))
    (notes / "book.pdf").write_bytes(b"%PDF-1.4")
    assert passages_of(notes / "book.pdf") == [Passage("first page", 1), Passage("second\npage ?", 2)]


def test_cutting() -> None:
    long = [f"Sentence {number} of a paragraph that goes on and on." for number in range(100)]
    for cut in (paragraphs, pieces):
        found = cut(long)
        assert all(len(text) <= 2 * MOST_CHARACTERS for text, _ in found)
        assert "\n".join(text for text, _ in found) == "\n".join(long)
        assert [long[line - 1] for _, line in found] == [text.partition("\n")[0] for text, _ in found]
    endless = "word " * 2000
    parts = short_enough(endless, 7)
    assert "".join(text for text, _ in parts) == endless and {line for _, line in parts} == {7} and len(parts) > 3
    assert "".join(text for text, _ in short_enough("x" * 5000, 1)) == "x" * 5000
    program = ["import os", "", "def one():", "    return 1", "", "def two():", "    return 2", *(["    # more"] * 80)]
    assert pieces(program)[0] == ("\n".join(program[: len(pieces(program)[0][0].splitlines())]), 1)
    assert paragraphs([]) == pieces([]) == [] and paragraphs(["", " "]) == []


def test_the_command(
    notes: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model_folder: Path,
    make_encoder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder_builder, "build_encoder", lambda *given, **named: (make_encoder(), "a test's"))
    monkeypatch.setenv("COLUMNS", "300")

    def embed(*words: object) -> tuple[int, str, str]:
        status = main(["embed", *map(str, words), "--model", str(model_folder), "--device", "cpu"])
        return (status, *capsys.readouterr())

    status, out, err = embed(notes, "--search", "def area(r):\n    return 3.14 * r * r", "--k", 1)
    assert status == 0 and f"{notes / 'sub' / 'geo.py'}:1" in out and "4 files with 6 passages (4 new" in err
    document = json.loads(embed(notes, "--output", tmp_path / "notes.parquet", "--json")[1])
    assert document["rows"] == 6 and document["added"] == 0
    status, _, err = embed(notes, "--output", tmp_path / "notes.npy")
    assert status == 2 and "written to a .parquet file" in err
    status, out, _ = embed(tmp_path / "notes.parquet", "--search", "größer", "--k", 1)
    assert status == 0 and "größer" in out
    status, _, err = embed(notes, "--column", "text")
    assert status == 2 and "is a folder" in err
