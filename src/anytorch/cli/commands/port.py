"""`anytorch port`: source that names CUDA, rewritten to PyTorch that names no vendor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch.cli.output import Output
from anytorch.counts import counted
from anytorch.errors import PackageMissing

if TYPE_CHECKING:
    from anytorch.run.port.files import Result

HINT = "in a clone of anytorch, pip install '.[port]', anywhere else, pip install 'anytorch[port]'"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE|FOLDER", help="Python files, or folders of them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--diff", action="store_true", help="print the changes as a diff; nothing is written (the default)"
    )
    what.add_argument("--write", action="store_true", help="change the files")
    what.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a file names a vendor")


def run(options: argparse.Namespace, output: Output) -> int:
    try:
        from anytorch.run.port import files
    except ModuleNotFoundError as exc:
        if exc.name != "libcst":
            raise
        raise PackageMissing("porting needs libcst, which is not installed", hint=HINT) from exc
    results = [files.port_file(path) for path in files.sources(options.paths)]
    if options.write:
        for result in results:
            files.write(result)
    if output.json:
        output.data({"files": [document(result) for result in results], "written": options.write})
    else:
        show(results, output, diff=not (options.write or options.check))
    problems = any(result.problem for result in results)
    return int(problems or (options.check and any(result.names_a_vendor for result in results)))


def document(result: Result) -> dict[str, Any]:
    def notes(kind: str) -> list[dict[str, Any]]:
        return [] if result.ported is None else [vars(note) for note in getattr(result.ported, kind)]

    return {
        "path": str(result.path),
        "changed": result.changed,
        "problem": result.problem,
        "changes": notes("changes"),
        "left": notes("left"),
        "diff": result.diff(),
    }


def show(results: list[Result], output: Output, *, diff: bool) -> None:
    """The diff, or what was changed line by line, on standard output; what was left and why, on standard error."""
    for result in results:
        if result.problem:
            output.warn(f"{result.path} {result.problem}; the file is left unchanged")
        if result.ported is None:
            continue
        if diff and result.changed:
            output.text(result.diff().rstrip("\n"))
        elif not diff:
            for note in result.ported.changes:
                output.text(f"{result.path}:{note.line}: {note.before} → {note.after} ({note.why})")
        for note in result.ported.left:
            output.note(f"{result.path}:{note.line}: left: {note.before} ({note.why})")
    changed = sum(result.changed for result in results)
    left = sum(len(result.ported.left) for result in results if result.ported is not None)
    output.note(
        f"{counted(changed, 'file')} of {len(results)} would change or changed; {counted(left, 'mention')} left"
    )
