"""`anytorch embed`: turn texts from a file or standard input into vectors, or search them by meaning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch import limits
from anytorch.cli.output import Output, decorated
from anytorch.cli.parser import number
from anytorch.counts import counted

if TYPE_CHECKING:
    from anytorch.text.embed import ArrowEngine
    from anytorch.text.embed.files_read import Source

VECTORS = "embedding"
SHOWN = 100  # characters of a text in the table of hits


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a .parquet, .csv, .tsv, .jsonl or .txt file; - for standard input"
    )
    parser.add_argument("--column", metavar="NAME", help="which column holds the texts")
    parser.add_argument(
        "--format", metavar="KIND", help="parquet, csv, tsv, jsonl or txt, if the file name does not tell"
    )
    parser.add_argument("--output", metavar="FILE", help="write to this .parquet (can be resumed), .npy or "
                        ".jsonl file; without it JSON Lines go to standard output")  # fmt: skip
    parser.add_argument("--search", metavar="QUESTION", help="show the texts nearest in meaning to this query")
    parser.add_argument(
        "--k", type=number(limits.HITS), default=5, metavar="N", help="number of texts to show (default: 5)"
    )
    parser.add_argument("--model", metavar="MODEL", help="a folder, or a model on the Hugging Face Hub")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, vulkan, …")
    parser.add_argument("--devices", metavar="LIST", help="several at once: all, or cuda:0,cuda:1")
    parser.add_argument("--quantization", metavar="KIND", help="int8, int4, int2 or fp4")
    parser.add_argument("--dtype", default="auto", metavar="DTYPE", help="auto, float32, float16, bfloat16")
    parser.add_argument(
        "--prompt", default="passage", metavar="PROMPT",
        help="the name of one of the model's prompts, or a text (default: passage, if the model has such a prompt)",
    )  # fmt: skip
    parser.add_argument(
        "--dim", type=number(limits.DIMENSIONS), metavar="N", help="only the first N dimensions (Matryoshka)"
    )
    parser.add_argument(
        "--precision", default="float32", metavar="KIND", help="float32, float16, int8, binary, ubinary"
    )
    parser.add_argument(
        "--max-length", type=number(limits.LENGTH), metavar="N", help="truncate texts to this many tokens"
    )
    parser.add_argument(
        "--batch-tokens", type=number(limits.BATCH_TOKENS), metavar="N", help="tokens per batch (default: measured)"
    )
    parser.add_argument("--threads", type=number(limits.THREADS), metavar="N", help="CPU threads")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    parser.add_argument("--no-resume", action="store_true", help="discard the finished part of an interrupted run")
    parser.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS",
        help="run as a Ray Data job, one worker per device, on this cluster (auto, ray://host:10001) or on a new local one; "
        "input and output are Parquet",
    )  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="also explain which device and kernels were used")


def run(options: argparse.Namespace, output: Output) -> int:
    import time

    from anytorch.cli.requests import new_file
    from anytorch.errors import UsageError
    from anytorch.text.embed import ArrowEngine
    from anytorch.text.embed.files_read import Source
    from anytorch.text.embed.files_write import ENDINGS

    if options.search is not None and options.output:
        raise UsageError(
            "--search and --output cannot be combined", hint="write the vectors first, then search that file"
        )
    target = new_file(options.output, "--output") if options.output else None
    endings = (".parquet", ".pq", *ENDINGS)
    if target is not None and target.suffix.lower() not in endings:
        raise UsageError(f"--output {target}: the name must end in {', '.join(endings)}")
    if target is not None and target.exists() and target.suffix.lower() in ENDINGS and not options.overwrite:
        raise UsageError(f"--output {target}: the file exists", hint="--overwrite, or name another file")
    if options.ray is not None:
        return on_ray(options, target, output)
    with ExitStack() as stack:
        source = Source(stdin_or_file(options, stack), options.column, format=options.format)
        stack.enter_context(output.fallbacks_told())
        engine = stack.enter_context(ArrowEngine(**engine_options(options), devices=options.devices))
        began = time.perf_counter()
        if options.search is not None:
            answer = search(engine, source, options, output)
        else:
            try:
                answer = encode(engine, source, target, options, output)
            except KeyboardInterrupt:
                if target is not None:
                    output.note(what_was_kept(target, from_stdin=options.file == "-"))
                raise
        seconds = time.perf_counter() - began
        stats = engine.stats
        rate = f" ({stats.texts / seconds:,.0f} texts/s)" if stats.texts >= 50 and seconds else ""
        where = f"; written to {target}" if target is not None else ""
        if target is not None and not stats.texts:
            output.note(f"{target} is already complete")
        else:
            output.note(f"{counted(stats.texts, 'text')} in {seconds:.1f} s{rate} on {engine.device}{where}")
        if stats.truncated:
            output.warn(f"{counted(stats.truncated, 'text')} had more than {engine.max_length} tokens: truncated")
        if options.explain:
            output.note(engine.explain())
        if output.json:
            counts = {"texts": stats.texts, "truncated": stats.truncated, "seconds": round(seconds, 3)}
            output.data({"engine": engine.describe(), **counts, **answer})
    return 0


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    names = ("device", "quantization", "dtype", "max_length", "threads")
    given = {name: getattr(options, name) for name in names}
    return {"model_path": options.model, "batch_tokens": options.batch_tokens or "auto", **given}


def what_was_kept(target: Path, *, from_stdin: bool) -> str:
    """The message after an interruption: what was kept and how to resume."""
    from anytorch.text.embed.files_journal import finished_rows

    if target.suffix.lower() not in (".parquet", ".pq"):
        return f"{target} was not written: only a Parquet output can be resumed"
    rows = finished_rows(target)
    if not rows:
        return f"no part of {target} was finished; the same command starts over"
    kept = f"{counted(rows, 'row is', 'rows are')} finished and kept beside {target}"
    if from_stdin:
        return f"{kept}; run the same command with the same input to resume"
    return f"{kept}; run the same command to resume"


def on_ray(options: argparse.Namespace, target: Path | None, output: Output) -> int:
    from anytorch.errors import UsageError
    from anytorch.serve.ray.files import encode_file_on_ray

    if target is None or options.file == "-" or options.search is not None or options.devices:
        raise UsageError(
            "--ray needs a Parquet file as input and as output",
            hint="anytorch embed a.parquet --output b.parquet --ray",
        )
    from anytorch.text.embed.bar import progress_bar

    with ExitStack() as stack:
        progress = stack.enter_context(progress_bar(options.file)) if decorated(sys.stderr) else None
        report = encode_file_on_ray(
            options.file,
            target,
            column=options.column,
            engine=engine_options(options),
            address=options.ray,
            resume=not options.no_resume,
            overwrite=options.overwrite,
            progress=progress,
            prompt=options.prompt,
            dim=options.dim,
            precision=options.precision,
        )
    if report.resumed:
        output.note(f"finished by an earlier run: {report.resumed:,} of {counted(report.rows, 'row')}")
    output.note(f"{counted(report.rows, 'row')} in {report.seconds:.1f} s; written to {target}")
    if report.truncated:
        output.warn(f"{counted(report.truncated, 'text')} had more tokens than the model's limit: truncated")
    if output.json:
        output.data({"output": str(target), "rows": report.rows, "resumed": report.resumed, "seconds": report.seconds})
    return 0


def stdin_or_file(options: argparse.Namespace, stack: ExitStack) -> Path:
    """The input file; standard input is first saved to a file, so that it can have any format a file can."""
    if options.file != "-":
        return Path(options.file)
    import shutil
    import tempfile

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anytorch-embed-")))
    path = folder / f"stdin.{options.format or 'txt'}"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


def texts_of(source: Source) -> Iterator[str]:
    for chunk in source.chunks(1024):
        yield from (text for text in chunk.texts if text is not None)


def encode(
    engine: ArrowEngine, source: Source, target: Path | None, options: argparse.Namespace, output: Output
) -> dict[str, Any]:
    from anytorch.text.embed.bar import progress_bar
    from anytorch.text.embed.files import encode_file
    from anytorch.text.embed.files_write import write_vectors

    wanted = {"prompt": options.prompt, "dim": options.dim, "precision": options.precision}
    if target is None:
        return to_standard_output(engine, source, wanted, output)
    with ExitStack() as stack:
        progress = stack.enter_context(progress_bar(source.path.name)) if decorated(sys.stderr) else None
        if target.suffix.lower() in (".parquet", ".pq"):
            report = encode_file(
                source.path,
                target,
                column=options.column,
                engine=engine,
                resume=not options.no_resume,
                overwrite=options.overwrite,
                format=options.format,
                progress=progress,
                **wanted,
            )
            if report.resumed:
                output.note(f"finished by an earlier run: {report.resumed:,} of {counted(report.rows, 'row')}")
            return {"output": str(target), "rows": report.rows, "resumed": report.resumed}
        rows = write_vectors(engine, texts_of(source), target, total=source.total(), progress=progress, **wanted)
        return {"output": str(target), "rows": rows}


def to_standard_output(engine: ArrowEngine, source: Source, wanted: dict[str, Any], output: Output) -> dict[str, Any]:
    from json import dumps

    if output.json:
        texts = list(texts_of(source))
        return {"vectors": engine.encode(texts, output="list", progress=decorated(sys.stderr), **wanted)}
    for vector in engine.encode_iter(texts_of(source), **wanted):
        output.text(dumps(vector.tolist()))
    return {}


def search(engine: ArrowEngine, source: Source, options: argparse.Namespace, output: Output) -> dict[str, Any]:
    texts, vectors = corpus(engine, source, options)
    question = engine.encode(options.search, prompt="query", dim=options.dim)
    written = [row for row, text in enumerate(texts) if text.strip()]  # a blank line is no answer
    hits = engine.search(question, vectors if len(written) == len(texts) else vectors[written], options.k)
    places = [written[hit.index] for hit in hits]
    found = [
        {"row": row + 1, "score": round(hit.score, 4), "text": texts[row]}
        for row, hit in zip(places, hits, strict=True)
    ]
    rows = [(f"{hit['score']:.3f}", hit["row"], short(str(hit["text"]))) for hit in found]
    output.table(("score (-1 to 1)", "row (from 1)", "text"), rows)
    return {"question": options.search, "hits": found}


def corpus(engine: ArrowEngine, source: Source, options: argparse.Namespace) -> tuple[list[str], Any]:
    """The texts and their vectors: read from the file if this command wrote it with this model, else computed."""
    import numpy as np

    from anytorch.errors import UsageError
    from anytorch.text.embed.compare import as_matrix

    if VECTORS not in source.columns:
        texts = list(texts_of(source))
        return texts, engine.encode(texts, prompt=options.prompt, dim=options.dim, progress=decorated(sys.stderr))
    check_made_alike(engine, source, options.prompt)
    kept: list[str] = []
    parts = []
    for chunk in source.chunks(8192):
        kept += [text if text is not None else "" for text in chunk.texts]
        parts.append(as_matrix(chunk.table.column(VECTORS).combine_chunks()))
    vectors = np.concatenate(parts) if parts else np.zeros((0, engine.dim), np.float32)
    wanted = options.dim or engine.dim
    if vectors.shape[1] != wanted or vectors.dtype.kind != "f":
        raise UsageError(
            f"{source.path}: its vectors are {vectors.dtype} with {vectors.shape[1]} dimensions; the model makes {wanted}",
            hint="name the model (and --dim) they were made with",
        )
    return kept, vectors


def check_made_alike(engine: ArrowEngine, source: Source, prompt: str) -> None:
    """Raise UsageError for stored vectors of another model or prompt. Files that do not say how they were made pass."""
    from anytorch.errors import UsageError
    from anytorch.text.embed.files_journal import differences, engine_identity
    from anytorch.text.embed.files_write import read_facts

    identity = (read_facts(source.path) or {}).get("identity")
    if identity is None:
        return
    now = engine_identity(engine)
    compared = ("model", "pooling", "steps")
    before = {**{name: identity["engine"].get(name) for name in compared}, "prompt": identity["prompt"]}
    found = differences(before, {**{name: now[name] for name in compared}, "prompt": engine.prompt_text(prompt)})
    if found:
        raise UsageError(
            f"{source.path}: its vectors cannot be compared with the question's: {'; '.join(found)}",
            hint="name the --model and the --prompt they were made with, or write them again",
        )


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
