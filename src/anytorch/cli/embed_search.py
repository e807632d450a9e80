"""`anytorch embed … --search`: the texts of a file, a stored file of vectors or a folder that are nearest to a question."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from anytorch.cli.output import Output, decorated
from anytorch.counts import counted
from anytorch.errors import InputError, UsageError
from anytorch.files import parse_json
from anytorch.text.embed import ArrowEngine
from anytorch.text.embed.bar import progress_bar
from anytorch.text.embed.compare import as_matrix
from anytorch.text.embed.files_journal import differences, engine_identity, file_identity
from anytorch.text.embed.files_read import Source
from anytorch.text.embed.files_write import facts_path, read_facts
from anytorch.text.embed.folder import FolderIndex

VECTORS = "embedding"
SHOWN = 100  # characters of a text in the table of hits
SKIPPED_SHOWN = 3


def search(engine: ArrowEngine, source: Source | Path, options: argparse.Namespace, output: Output) -> dict[str, Any]:
    """Show the hits in a file: of texts, or of vectors that this command wrote (a Path: a .npy)."""
    if isinstance(source, Path):
        texts, vectors = stored_array(engine, source, options, output)
    else:
        texts, vectors = corpus(engine, source, options)
    if not len(vectors):
        output.note(f"{options.file} has no texts")
        return {"question": options.search, "hits": []}
    question = engine.encode(options.search, prompt="query", dim=options.dim)
    # A blank line is no answer; texts that are not known any more (None) are told by their rows.
    written = [row for row, text in enumerate(texts) if text is None or text.strip()]
    hits = engine.search(question, vectors if len(written) == len(texts) else vectors[written], options.k)
    places = [written[hit.index] for hit in hits]
    found = [
        {"row": row + 1, "score": round(hit.score, 4), "text": texts[row]}
        for row, hit in zip(places, hits, strict=True)
    ]
    rows = [(f"{hit['score']:.3f}", hit["row"], short(str(hit["text"] or ""))) for hit in found]
    output.table(("score (-1 to 1)", "row (from 1)", "text"), rows)
    return {"question": options.search, "hits": found}


def corpus(engine: ArrowEngine, source: Source, options: argparse.Namespace) -> tuple[list[str | None], Any]:
    """The texts and their vectors: read from the file if this command wrote it with this model, else computed."""

    if VECTORS not in source.columns:
        texts = [text for chunk in source.chunks(1024) for text in chunk.texts if text is not None]
        return list(texts), engine.encode(texts, prompt=options.prompt, dim=options.dim, progress=decorated(sys.stderr))
    check_made_alike(engine, source, options.prompt)
    kept: list[str | None] = []
    parts = []
    for chunk in source.chunks(8192):
        kept += [text if text is not None else "" for text in chunk.texts]
        parts.append(as_matrix(chunk.table.column(VECTORS).combine_chunks()))
    vectors = np.concatenate(parts) if parts else np.zeros((0, engine.dim), np.float32)
    check_shape(engine, source.path, vectors, options)
    return kept, vectors


def check_shape(engine: ArrowEngine, path: Path, vectors: Any, options: argparse.Namespace) -> None:

    wanted = options.dim or engine.dim
    if vectors.ndim != 2 or vectors.shape[1] != wanted or vectors.dtype.kind != "f":
        shape = " × ".join(map(str, vectors.shape[1:])) or "no"
        raise UsageError(
            f"{path}: its vectors are {vectors.dtype} with {shape} dimensions; the model makes {wanted}",
            hint="name the model (and --dim) they were made with; vectors of --precision int8 or binary cannot be searched",
        )


def stored_array(
    engine: ArrowEngine, path: Path, options: argparse.Namespace, output: Output
) -> tuple[list[str | None], Any]:
    """The vectors of a .npy, and their texts from the file they were made of, where the file beside it says which."""

    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as exc:
        raise InputError(f"{path}: cannot be read as an array: {exc}") from exc
    check_shape(engine, path, vectors, options)
    unknown: list[str | None] = [None] * len(vectors)
    beside = facts_path(path)
    try:
        facts = parse_json(beside.read_bytes())
        made = facts["source"]
        source_path = Path(made["path"])
    except (OSError, ValueError, KeyError, TypeError):
        output.note(f"{beside} does not say which texts these are: results show row numbers")
        return unknown, vectors
    check_identity(engine, path, facts["identity"], options.prompt)
    if not source_path.is_file() or file_identity(source_path)["hash"] != made["hash"]:
        output.note(f"{source_path} was changed or removed: results show row numbers")
        return unknown, vectors
    source = Source(source_path, made["column"], format=made["format"])
    texts: list[str | None] = [text for chunk in source.chunks(8192) for text in chunk.texts if text is not None]
    return texts if len(texts) == len(vectors) else unknown, vectors


def search_folder(
    engine: ArrowEngine, folder: Path, target: Path | None, options: argparse.Namespace, output: Output
) -> dict[str, Any]:
    """Bring the index of a folder up to date, then show the hits, or write the index to a Parquet file."""

    index = FolderIndex(folder, engine, prompt=options.prompt, dim=options.dim)
    with progress_bar(folder.name or str(folder)) as progress:
        done = index.update(progress)
    fresh = f"{done.added:,} new, {done.changed:,} changed, {done.removed:,} gone"
    output.note(f"{counted(done.files, 'file')} with {counted(done.passages, 'passage')} ({fresh})")
    for one in done.skipped[:SKIPPED_SHOWN]:
        output.note(f"left out: {one.path.relative_to(folder)}: {one.why}")
    if len(done.skipped) > SKIPPED_SHOWN:
        output.note(f"left out: {len(done.skipped) - SKIPPED_SHOWN:,} more files")
    if done.unsaved:
        output.warn(f"the index was not saved, so the next search computes it again: {done.unsaved}")
    facts: dict[str, Any] = {name: getattr(done, name) for name in ("files", "passages", "added", "changed", "removed")}
    facts["skipped"] = [{"file": str(one.path), "why": one.why} for one in done.skipped]
    if target is not None:
        index.write(target)
        return {"output": str(target), "rows": done.passages, **facts}
    if options.search is None:
        return facts
    found = [
        {"file": str(hit.path), "place": hit.place, "score": round(hit.score, 4), "text": hit.text}
        for hit in index.search(options.search, options.k)
    ]
    rows = [(f"{hit['score']:.3f}", f"{hit['file']}:{hit['place']}", short(str(hit["text"]))) for hit in found]
    output.table(("score (-1 to 1)", "file:line, row, cell or page", "text"), rows)
    return {"question": options.search, "hits": found, **facts}


def check_made_alike(engine: ArrowEngine, source: Source, prompt: str) -> None:
    """Raise UsageError for stored vectors of another model or prompt. Files that do not say how they were made pass."""

    identity = (read_facts(source.path) or {}).get("identity")
    if identity is not None:
        check_identity(engine, source.path, identity, prompt)


def check_identity(engine: ArrowEngine, path: Path, identity: dict[str, Any], prompt: str) -> None:

    now = engine_identity(engine)
    compared = ("model", "pooling", "steps")
    before = {**{name: identity["engine"].get(name) for name in compared}, "prompt": identity["prompt"]}
    found = differences(before, {**{name: now[name] for name in compared}, "prompt": engine.prompt_text(prompt)})
    if found:
        raise UsageError(
            f"{path}: its vectors cannot be compared with the question's: {'; '.join(found)}",
            hint="name the --model and the --prompt they were made with, or write them again",
        )


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
