"""`anytorch graph`: the kernel graphs that were searched on this machine, and what was chosen for each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch.cli.output import Output, is_terminal
from anytorch.counts import counted
from anytorch.errors import CacheError, OutputError, UsageError

if TYPE_CHECKING:
    from anytorch.graph.records import Record, Step

SHOWN = 12  # digits of a key in a table
# Which options and how many keys an action takes.
ACTIONS: dict[str, tuple[frozenset[str], range]] = {
    "list": (frozenset(), range(1)),
    "show": (frozenset({"kernels", "svg"}), range(1, 2)),
    "clear": (frozenset({"yes"}), range(10_000)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", default="list", choices=tuple(ACTIONS), help="what to do (default: list)")
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="for show and clear: a graph's key, or enough of its beginning"
    )
    parser.add_argument("--kernels", action="store_true", help="show: also print the generated text of every kernel")
    parser.add_argument("--svg", metavar="FILE", help="show: also write the picture of the graph to this file")
    parser.add_argument("--yes", action="store_true", help="clear: forget every graph without asking first")


def run(options: argparse.Namespace, output: Output) -> int:
    action: str = options.action
    allowed, count = ACTIONS[action]
    for name in ("kernels", "svg", "yes"):
        if getattr(options, name) and name not in allowed:
            owner = next(one for one, (names, _) in ACTIONS.items() if name in names)
            raise UsageError(f"--{name} is for `anytorch graph {owner}`, not for {action}", hint="leave it out")
    if len(options.keys) not in count:
        takes = {"list": "takes no KEY", "show": "takes one KEY"}[action]
        hint = "anytorch graph show KEY" if action == "list" else "`anytorch graph list` prints the keys"
        raise UsageError(f"`anytorch graph {action}` {takes}; {len(options.keys)} were given", hint=hint)
    if action == "list":
        return show_all(output)
    if action == "show":
        return show_one(options, output)
    return clear(options, output)


def show_all(output: Output) -> int:
    from anytorch.graph.records import records
    from anytorch.measured.verdict import duration

    found = records()
    if output.json:
        output.data({"graphs": [summary_of(one) for one in found]})
        return 0
    if not found:
        output.text("no kernel graph has been searched on this machine yet")
        output.note("hint: superoptimize() of a graph from new_kernel_graph() or trace() searches one")
        return 0
    rows = [
        (
            one.key[:SHOWN],
            one.title,
            sizes_of(one),
            one.verdict.question.device,
            one.verdict.chosen,
            duration(one.seconds),
            duration(one.eager_s),
            times(one.speedup),
            one.verdict.when.replace("T", " ").removesuffix("Z"),
        )
        for one in found
    ]
    columns = ("key", "graph", "sizes", "device", "chosen", "time", "eager torch", "gain (x)", "searched, UTC")
    output.table(columns, rows)
    return 0


def summary_of(one: Record) -> dict[str, Any]:
    return {
        "key": one.key,
        "graph_key": one.graph_key,
        "title": one.title,
        "sizes": one.sizes,
        "device": one.verdict.question.device,
        "when": one.verdict.when,
        "chosen": one.verdict.chosen,
        "seconds": one.seconds,
        "eager_s": one.eager_s,
        "speedup": one.speedup,
        "kernels": sum(bool(step.text or step.source) for step in one.steps),
    }


def sizes_of(one: Record) -> str:
    return ", ".join(f"{name}={size}" for name, size in sorted(one.sizes.items()))


def times(speedup: float | None) -> str:
    if speedup is None:
        return ""
    return f"{speedup:,.0f}" if speedup >= 100 else f"{speedup:.2f}"


def show_one(options: argparse.Namespace, output: Output) -> int:
    from anytorch.cli.requests import new_file
    from anytorch.graph.records import find, records

    one = find(options.keys[0], records())
    picture = None
    if options.svg is not None:
        picture = new_file(options.svg, "--svg")
        write(picture, one.picture)
    if output.json:
        output.data(document_of(one, options.kernels, picture))
    else:
        tell(one, output, texts=options.kernels)
    if picture is not None:
        output.note(f"picture written to {picture}")
    return 0


def document_of(one: Record, texts: bool, picture: Path | None) -> dict[str, Any]:
    """The whole record, with the kernels' texts if they are wanted. The picture is in its file alone."""
    body = one.as_json()
    body.pop("picture")
    if not texts:
        for step in body["steps"]:
            step.pop("text")
    return {**summary_of(one), **body, "svg": str(picture) if picture else None}


def tell(one: Record, output: Output, *, texts: bool) -> None:
    from anytorch.graph.records import MOST_ERROR
    from anytorch.measured.verdict import duration

    verdict = one.verdict
    output.pairs(
        [
            ("key", one.key),
            ("graph", f"{one.graph_key}: {one.title}"),
            ("sizes", sizes_of(one)),
            ("device", verdict.question.device),
            ("searched", verdict.when),
            ("least data to move", f"{one.least_nbytes / 2**20:.4g} MiB"),
            ("chosen", f"{verdict.chosen or 'nothing'} ({verdict.why})"),
            ("gain", f"{times(one.speedup)} times eager torch's speed" if one.speedup else ""),
        ],
        indent=0,
    )
    rows = [
        (
            trial.name,
            duration(trial.seconds) if trial.seconds is not None else "",
            "" if trial.error is None else f"{100 * trial.error / MOST_ERROR:.2g} %",
            "chosen" if trial.name == verdict.chosen else trial.refused,
        )
        for trial in verdict.trials
    ]
    output.table(("candidate", "time", "error (share of the limit)", ""), rows, title="candidates")
    if verdict.most_error:
        output.text(f"allowed: {verdict.most_error:.2g} {verdict.error_unit}")
    if not one.steps:
        output.text("\nthe graph runs op by op through torch: no kernel was generated for it")
        return
    steps = [
        (
            str(number),
            str(len(step.ops)),
            "" if step.nbytes is None else f"{step.nbytes / 2**20:.4g}",
            "" if step.seconds is None else duration(step.seconds),
            how_of(step),
        )
        for number, step in enumerate(one.steps)
    ]
    output.table(("step", "ops", "moves (MiB)", "time", "how"), steps, title="the chosen program")
    if not texts:
        output.note(f"hint: `anytorch graph show {one.key[:SHOWN]} --kernels` prints the generated text")
        return
    for number, step in enumerate(one.steps):
        if step.text:
            output.heading(f"step {number}, {step.language}")
            output.text(step.text.rstrip("\n"))


def how_of(step: Step) -> str:
    """By which kernel a step is computed, in words."""
    if step.source:
        return f"{step.schedule}, {step.source}"
    return f"{step.language}: {step.schedule}" if step.text else f"{', '.join(step.ops)} by torch"


def write(path: Path, picture: str) -> None:
    from anytorch.files import replace_file

    try:
        replace_file(path, picture.encode())
    except OSError as exc:
        raise OutputError(f"cannot write {path}: {exc.strerror}", hint="name another file") from exc


def clear(options: argparse.Namespace, output: Output) -> int:
    from anytorch.graph import records

    every = records.records()
    chosen = list({one.key: one for one in (records.find(key, every) for key in options.keys)}.values())
    everything = not options.keys
    if everything and not options.yes and not agreed(len(every), output):
        output.note("nothing was removed")
        return 1
    try:
        verdicts = records.clear()[1] if everything else records.forget(chosen)
    except OSError as exc:
        where = exc.filename or records.folder()
        raise CacheError(f"cannot remove {where}: {exc.strerror}", hint="check its permissions") from exc
    gone = every if everything else chosen
    line = f"{counted(len(gone), 'kernel graph')} and {counted(verdicts, 'measurement')} of them forgotten"
    output.answer({"removed": [one.key for one in gone], "verdicts": verdicts}, line)
    return 0


def agreed(count: int, output: Output) -> bool:
    """True if the user confirms on the terminal. Raises UsageError without a terminal."""
    if output.json or not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        raise UsageError(
            "`anytorch graph clear` without a KEY forgets every searched graph, and asks first, which needs a terminal",
            hint="add --yes, or name the graphs: `anytorch graph list` prints their keys",
        )
    sys.stderr.write(f"forget {counted(count, 'searched kernel graph')} and what was measured for them? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
