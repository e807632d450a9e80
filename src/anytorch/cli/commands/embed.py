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


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a .parquet, .csv, .tsv, .jsonl or .txt file, a .npy of --output to search, a folder, or - for standard input",
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

    from anytorch.cli.embed_search import search, search_folder
    from anytorch.cli.requests import new_file
    from anytorch.errors import UsageError
    from anytorch.text.embed import ArrowEngine
    from anytorch.text.embed.files_write import ENDINGS

    if options.search is not None and options.output:
        raise UsageError(
            "--search and --output cannot be combined", hint="write the vectors first, then search that file"
        )
    if options.search is not None and not options.search.strip():
        raise UsageError("--search is empty", hint='give a question: --search "where did I put it"')
    target = new_file(options.output, "--output") if options.output else None
    endings = (".parquet", ".pq", *ENDINGS)
    if target is not None and target.suffix.lower() not in endings:
        raise UsageError(f"--output {target}: the name must end in {', '.join(endings)}")
    if target is not None and target.exists() and target.suffix.lower() in ENDINGS and not options.overwrite:
        raise UsageError(f"--output {target}: the file exists", hint="--overwrite, or name another file")
    if options.ray is not None:
        return on_ray(options, target, output)
    with ExitStack() as stack:
        source = opened(options, target, stack)
        stack.enter_context(output.fallbacks_told())
        with output.waiting(f"loading the model for {options.devices or options.device}"):
            engine = stack.enter_context(ArrowEngine(**engine_options(options), devices=options.devices))
        began = time.perf_counter()
        if isinstance(source, Path) and source.is_dir():
            answer = search_folder(engine, source, target, options, output)
        elif options.search is not None or isinstance(source, Path):
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
        if target is not None and answer.get("resumed") and not stats.texts:
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


def opened(options: argparse.Namespace, target: Path | None, stack: ExitStack) -> Source | Path:
    """What is embedded or searched: a file of texts, or the path of a folder or of a .npy. No model is loaded yet."""
    from anytorch.errors import UsageError
    from anytorch.text.embed.files_read import Source

    path = stdin_or_file(options, stack)
    if path.is_dir():
        if options.column or options.format or options.precision != "float32":
            raise UsageError(f"{path} is a folder: --column, --format and --precision are for files")
        if target is not None and target.suffix.lower() not in (".parquet", ".pq"):
            raise UsageError(f"--output {target}: the passages of a folder are written to a .parquet file")
        return path
    if path.suffix.lower() == ".npy":
        if options.search is None:
            raise UsageError(f"{path} holds vectors, not texts", hint='search it: --search "a question"')
        return path
    return Source(path, options.column, format=options.format)


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
    from anytorch.errors import UsageError
    from anytorch.text.embed.bar import progress_bar
    from anytorch.text.embed.files import asked_identity, encode_file
    from anytorch.text.embed.files_journal import Identity, file_identity
    from anytorch.text.embed.files_write import VECTOR, write_vectors

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
        if VECTOR in source.columns:
            raise UsageError(f"{source.path.name} already has a column {VECTOR!r}", hint="it can be searched as it is")
        made: Identity = {"path": str(source.path.resolve()), "column": source.column, "format": source.format}
        facts = {
            "source": {**made, **file_identity(source.path)},
            "identity": {**asked_identity(engine, options.prompt), "dim": options.dim, "precision": options.precision},
        }
        rows = write_vectors(
            engine, source.chunks(1024), target,
            total=source.total(), progress=progress, facts=None if options.file == "-" else facts, **wanted,
        )  # fmt: skip
        return {"output": str(target), "rows": rows}


def to_standard_output(engine: ArrowEngine, source: Source, wanted: dict[str, Any], output: Output) -> dict[str, Any]:
    from json import dumps

    if output.json:
        texts = list(texts_of(source))
        return {"vectors": engine.encode(texts, output="list", progress=decorated(sys.stderr), **wanted)}
    for vector in engine.encode_iter(texts_of(source), **wanted):
        output.text(dumps(vector.tolist()))
    return {}
