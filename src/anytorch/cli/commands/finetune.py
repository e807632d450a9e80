"""`anytorch finetune`: train the tokenizer or the model on files of candles, in one process or under torchrun."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from anytorch.cli.output import Output

KINDS = ("tokenizer", "predictor")
BOTH = "both"
SAMPLE = {"instruments": 8, "rows": 3000}
# Field of the plan, type, what it means. Defaults are the plan's own, which differ between the two kinds.
OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("lookback", int, "rows of history in a window (90)"),
    ("horizon", int, "rows to predict after them (10)"),
    ("epochs", int, "passes over the data (10)"),
    ("steps_per_epoch", int, "most steps in a pass; 0: every window"),
    ("batch_size", int, "windows per process and step (32)"),
    ("accumulate", int, "batches whose gradients are summed for one step (1)"),
    ("learning_rate", float, "highest learning rate (tokenizer 2e-4, predictor 4e-5)"),
    ("weight_decay", float, "weight decay of AdamW (0.1)"),
    ("patience", int, "stop after this many evaluations without improvement; 0: never"),
    ("evaluate_every", int, "steps between evaluations; 0: after every pass"),
    ("validation_windows", int, "most windows in an evaluation, evenly spread (2000)"),
    ("save_every", int, "steps from one save to the next (200)"),
    ("stride", int, "rows from one window to the next (1)"),
    ("validation", float, "share of the data, by time, for choosing the best weights (0.1)"),
    ("test", float, "share of the data, the latest, to leave unused for tests (0.1)"),
    ("lora_rank", int, "train a low-rank adapter (LoRA) of this rank instead of all weights; 0: all weights"),
    ("seed", int, "the same seed gives the same weights (100)"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind", choices=(*KINDS, BOTH), help="what to train; the tokenizer comes first; both need a --config"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file of Kronos's finetune_csv; options on the command line override it"
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="+", metavar="FILE", help="CSV or Parquet files, or folders of them")
    data.add_argument("--sample", action="store_true", help="train on generated candles")
    data.add_argument(
        "--columns", metavar="FIELD=NAME,…", help="names of columns that are not recognised, as OURS=THEIRS"
    )
    data.add_argument("--timezone", metavar="ZONE", help="time zone of the timestamps")
    data.add_argument("--repair", action="store_true", help="repair faulty data, and report each repair")
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help="tiny (default), kronos-mini, -small, -base, or a folder")
    model.add_argument("--tokenizer", metavar="NAME", help="the tokenizer to train, or the one the model uses")
    model.add_argument("--context", type=int, metavar="N", help="most rows in the window of later forecasts")
    model.add_argument("--from-scratch", action="store_true", help="keep the model's shape, but start from new weights")
    model.add_argument("--objective", default="generation", metavar="NAME", help="generation (default) or published")
    model.add_argument("--device", metavar="DEVICE", help="auto (default), cpu, cuda, …; under torchrun, its type")
    plan = parser.add_argument_group("training")
    for name, kind, words in OPTIONS:
        plan.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=words)
    plan.add_argument("--no-mixed-precision", action="store_true", help="float32 throughout")
    where = parser.add_argument_group("answer")
    where.add_argument("--output", metavar="DIR", help="folder of the run; name it again to resume")
    where.add_argument("--restart", action="store_true", help="discard the existing run")
    where.add_argument(
        "--restart-changed", action="store_true", help="discard the existing run if its plan, data or model differ"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    from anytorch.errors import UsageError

    if options.config is not None:
        found: dict[str, Any] = {}
        for kind in KINDS if options.kind == BOTH else (options.kind,):
            stage = argparse.Namespace(**{**vars(options), "kind": kind})
            changes = with_config(stage, options.kind == BOTH, output)
            found[kind] = train(stage, changes, output) if changes is not None else None
        if output.json and speaks():
            output.data(found if options.kind == BOTH else found[options.kind])
        return 0
    if options.kind == BOTH:
        raise UsageError("training both needs a settings file", hint="name it with --config, or train them one by one")
    if options.output is None:
        raise UsageError("name the folder of the run with --output")
    done = train(options, {}, output)
    if output.json and speaks():
        output.data(done)
    return 0


def with_config(options: argparse.Namespace, one_of_two: bool, output: Output) -> dict[str, Any] | None:
    """Fill in the options that the command line left out; return the file's plan, or None if it skips this stage."""
    from anytorch.cli.finetune_config import read_config

    config = read_config(options.config, options.kind, options.output)
    if config.unused:
        output.note(f"not used: {', '.join(config.unused)}")
    options.output = str(config.output)
    if one_of_two and not config.wanted:
        output.note(f"{options.config} skips the {options.kind}")
        return None
    if config.skip_existing and (config.output / "best_model").is_dir():
        output.note(f"{config.output / 'best_model'} exists and is kept")
        return None
    if not options.data and not options.sample:
        options.data = [config.data]
    options.model = options.model or config.model
    options.tokenizer = options.tokenizer or config.tokenizer
    options.device = options.device or config.device
    options.context = config.max_context if options.context is None else options.context
    options.from_scratch = options.from_scratch or config.from_scratch
    return dict(config.plan)


def speaks() -> bool:
    """True in the one process that prints, of several."""
    from anytorch.forecast.training.processes import number

    return number("RANK", 0) == 0


def train(options: argparse.Namespace, changes: dict[str, Any], output: Output) -> dict[str, Any]:
    """Train one of the two, and say how it went; → the same for scripts."""
    from dataclasses import asdict

    from anytorch.cli.requests import named_device

    check(options)
    changes |= {name: getattr(options, name) for name, _, _ in OPTIONS if getattr(options, name) is not None}
    if options.no_mixed_precision:
        changes["mixed_precision"] = False
    device = named_device("auto" if options.device is None else options.device, "--device")
    from anytorch.forecast.checkpoints import choose_checkpoint
    from anytorch.forecast.training import finetune_predictor, finetune_tokenizer
    from anytorch.forecast.training.finetune import PREDICTOR_PLAN

    found = choose_checkpoint(options.model or "tiny", options.tokenizer)
    seen = changes.get("lookback", PREDICTOR_PLAN.lookback) + changes.get("horizon", PREDICTOR_PLAN.horizon)
    if (
        speaks()
        and options.context is not None
        and options.context > (most := longest(found.max_context, seen, options))
    ):
        output.warn(f"--context {options.context}: forecasts with windows of more than {most} rows are not trained for")
    series = read(options, output.note if speaks() else silent)
    resume = "same" if options.restart_changed and not options.restart else not options.restart
    common: dict[str, Any] = {"output": options.output, "device": device, "resume": resume, **changes}
    try:
        with output.fallbacks_told(), output.progress(f"training the {options.kind}") as progress:
            if speaks():
                common["progress"] = progress
            if options.kind == "tokenizer":
                done = finetune_tokenizer(series, tokenizer=start(found.tokenizer, options), **common)
            else:
                done = finetune_predictor(
                    series,
                    model=start(found.model, options),
                    tokenizer=found.tokenizer,
                    max_context=options.context,
                    objective=options.objective,
                    **common,
                )
    except KeyboardInterrupt:
        if speaks():
            output.note(left_behind(options))
        raise
    except (RuntimeError, MemoryError) as exc:
        raise_lack_of_memory(exc, options)
        raise
    if speaks() and not output.json:
        tell(done, options, output)
    return {**asdict(done), "folder": str(done.folder)}


def check(options: argparse.Namespace) -> None:
    """Check the options before anything is read; raises UsageError."""
    from anytorch.cli.requests import new_folder
    from anytorch.errors import UsageError
    from anytorch.forecast.training.plan import wrong

    if bool(options.data) == options.sample:
        raise UsageError("name files with --data, or use --sample" + (", not both" if options.data else ""))
    for name, _, _ in OPTIONS:
        value = getattr(options, name)
        if value is not None and (why := wrong(name, value)):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(f"--{name.replace('_', '-')} {shown}: {why}")
    if options.context is not None and options.context < 2:
        raise UsageError(f"--context {options.context}: a window has at least 2 rows")
    if options.from_scratch and options.lora_rank:
        raise UsageError(
            f"--from-scratch --lora-rank {options.lora_rank}: LoRA needs trained weights",
            hint="leave out one of the two",
        )
    new_folder(options.output, "--output")


def longest(own: int, seen: int, options: argparse.Namespace) -> int:
    """Rows of the longest window the model was trained on, before or now; new weights count only now."""
    return seen if options.from_scratch else max(own, seen)


def left_behind(options: argparse.Namespace) -> str:
    """What to say after Ctrl-C."""
    from pathlib import Path

    if not (Path(options.output) / "last.pt").is_file():
        return "no step was finished; nothing was saved"
    again = "the same command without --restart" if options.restart else "the same command"
    return f"what was saved is in {options.output}; {again} resumes it"


def raise_lack_of_memory(exc: Exception, options: argparse.Namespace) -> None:
    from anytorch.devices.oom import is_out_of_memory
    from anytorch.errors import OutOfMemory

    if is_out_of_memory(exc):
        raise OutOfMemory(
            f"there is not enough memory to train the {options.kind}: {(str(exc).splitlines() or [''])[0]}",
            hint="lower --batch-size and raise --accumulate by the same factor, or lower --lookback",
        ) from exc


def start(source: str, options: argparse.Namespace) -> Any:
    """The weights to start from; or, from scratch, the arguments of a new one."""
    if not options.from_scratch:
        return source
    from anytorch.forecast.model.pretrained import CONFIG, find_folder, read_json

    return read_json(find_folder(source, "tokenizer" if options.kind == "tokenizer" else "model") / CONFIG)


def silent(words: str) -> None:
    """Discard a message: in all processes but the first."""


def read(options: argparse.Namespace, note: Callable[[str], None]) -> list[Any]:
    from anytorch.forecast.candles.generate import sample_market
    from anytorch.forecast.candles.read import read_many
    from anytorch.forecast.candles.tables import parse_given
    from anytorch.forecast.training.windows import as_series

    if options.sample:
        note(f"generated candles: {SAMPLE['instruments']} instruments, {SAMPLE['rows']} bars of 5 minutes each")
        return as_series(sample_market(SAMPLE["instruments"], SAMPLE["rows"], seed=options.seed or 0))
    given = parse_given(options.columns) if options.columns else None
    found = read_many(options.data, columns=given, timezone=options.timezone, repair=options.repair)
    for one in found[:3]:
        for words in one.notes:
            note(f"{one.name}: {words}")
    note(f"{len(found)} series, {sum(map(len, found))} rows")
    return found


def tell(done: Any, options: argparse.Namespace, output: Output) -> None:
    output.pairs(
        [
            ("steps", f"{done.steps}" + (f", resumed after {done.resumed_from}" if done.resumed_from else "")),
            ("validation", f"{done.first_loss:.5g} before, {done.best_loss:.5g} at step {done.best_step}")
            if done.first_loss is not None
            else ("validation", "none"),
            ("stopped", "early: no further improvement" if done.stopped_early else ""),
            ("time (s)", f"{done.seconds:.1f}"),
            ("best weights", done.folder),
            ("log and curve", f"{options.output}/log.jsonl, loss.png"),
        ]
    )
    if options.kind == "tokenizer":
        output.note(f"next: anytorch finetune predictor --tokenizer {done.folder} …")
    else:
        output.note(f"next: anytorch forecast FILE --model {done.folder}")
