"""`anytorch finetune`: train the tokenizer or the model on files of candles, in one process or under torchrun."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from anytorch import limits
from anytorch.cli.output import Output
from anytorch.cli.parser import number
from anytorch.errors import InputError, UsageError

KINDS = ("tokenizer", "predictor")
BOTH = "both"
SAMPLE = {"instruments": 8, "rows": 3000}
# Field of the plan, its limit, what it means. Defaults are the plan's own, which differ between the two kinds.
OPTIONS: tuple[tuple[str, limits.Limit, str], ...] = (
    ("lookback", limits.WINDOW, "rows of history in a window (90)"),
    ("horizon", limits.STEPS, "rows to predict after them (10)"),
    ("epochs", limits.ROUNDS, "passes over the data (10)"),
    ("steps_per_epoch", limits.COUNT_OR_NONE, "most steps in a pass; 0: every window"),
    ("batch_size", limits.BATCH, "windows per process and step (32)"),
    ("accumulate", limits.BATCH, "batches whose gradients are summed for one step (1)"),
    ("learning_rate", limits.LEARNING_RATE, "highest learning rate (tokenizer 2e-4, predictor 4e-5)"),
    ("weight_decay", limits.DECAY, "weight decay of AdamW (0.1)"),
    ("patience", limits.COUNT_OR_NONE, "stop after this many evaluations without improvement; 0: never"),
    ("evaluate_every", limits.COUNT_OR_NONE, "steps between evaluations; 0: after every pass"),
    ("validation_windows", limits.COUNT_OR_NONE, "most windows in an evaluation, evenly spread (2000)"),
    ("save_every", limits.COUNT, "steps from one save to the next (200)"),
    ("stride", limits.COUNT, "rows from one window to the next (1)"),
    ("validation", limits.PART, "share of the data, by time, for choosing the best weights (0.1)"),
    ("test", limits.PART, "share of the data, the latest, to leave unused for tests (0.1)"),
    ("lora_rank", limits.RANK, "train a low-rank adapter (LoRA) of this rank instead of all weights; 0: all weights"),
    ("seed", limits.SEED, "the same seed gives the same weights (100)"),
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
    model.add_argument(
        "--context", type=number(limits.WINDOW), metavar="N", help="most rows in the window of later forecasts"
    )
    model.add_argument("--from-scratch", action="store_true", help="keep the model's shape, but start from new weights")
    model.add_argument("--objective", default="generation", metavar="NAME", help="generation (default) or published")
    model.add_argument("--device", metavar="DEVICE", help="auto (default), cpu, cuda, …; under torchrun, its type")
    plan = parser.add_argument_group("training")
    for name, limit, words in OPTIONS:
        plan.add_argument(f"--{name.replace('_', '-')}", type=number(limit), metavar="N", help=words)
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
    from anytorch.train import number

    return number("RANK", 0) == 0


def train(options: argparse.Namespace, changes: dict[str, Any], output: Output) -> dict[str, Any]:
    """Train the tokenizer or the predictor and print the outcome; → the same for scripts."""
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
        output.warn(f"--context {options.context}: the model is trained only for windows of at most {most} rows")
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
    from anytorch.forecast.candles.columns import parse_given
    from anytorch.forecast.candles.generate import sample_market
    from anytorch.forecast.candles.read import read_many
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


# --- `--config`: the YAML file of Kronos's `finetune_csv`, the same settings in our words -----------------------------

# Two things are not as they were there, and cannot be had from the file: windows are normalised with their past alone, and
# validation is causal.

# What the published loader reads and what has no counterpart here: worker processes, and what torchrun decides.
UNUSED = {
    "data": set(),
    "training": {"num_workers"},
    "model_paths": set(),
    "experiment": {"name", "description", "use_comet"},
    "device": {"device_id"},
    "distributed": {"use_ddp", "backend"},
}


@dataclass(frozen=True)
class FinetuneConfig:
    """One stage of such a file, as the options and the plan of `anytorch finetune`."""

    wanted: bool  # experiment.train_tokenizer or train_basemodel
    skip_existing: bool
    data: str
    output: Path
    model: str | None
    tokenizer: str | None
    from_scratch: bool
    device: str
    max_context: int | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def read_config(path: str | Path, kind: str, folder: str | None = None) -> FinetuneConfig:
    """The settings for "tokenizer" or "predictor"; `folder` instead of the file's for both.

    Raises InputError for a file that does not say what is needed.
    """
    settings = Settings(load(Path(path)), str(path))
    of_tokenizer = kind == "tokenizer"
    stage, word = ("tokenizer", "tokenizer") if of_tokenizer else ("basemodel", "predictor")
    parts = [settings.text("model_paths", name) for name in ("base_save_path", "base_path", "exp_name")]
    base = folder or parts[0] or str(Path(parts[1]) / parts[2])
    names = {one: settings.text("model_paths", f"{one}_save_name") or one for one in ("tokenizer", "basemodel")}
    trained = settings.text("model_paths", "finetuned_tokenizer") or str(Path(base) / names["tokenizer"] / "best_model")
    pretrained = settings.text("model_paths", "pretrained_tokenizer") or None
    both = settings.flag("experiment", "pre_trained", True)
    plan = {
        "lookback": settings.number("data", "lookback_window", int),
        "horizon": settings.number("data", "predict_window", int),
        "clip": settings.number("data", "clip", float),
        "validation": settings.number("data", "val_ratio", float),
        "test": settings.number("data", "test_ratio", float),
        "epochs": settings.number("training", f"{stage}_epochs", int),
        "batch_size": settings.number("training", "batch_size", int),
        "log_every": settings.number("training", "log_interval", int),
        "seed": settings.number("training", "seed", int),
        "learning_rate": settings.number("training", f"{word}_learning_rate", float),
        "weight_decay": settings.number("training", "adam_weight_decay", float),
        "accumulate": settings.number("training", "accumulation_steps", int),
    }
    betas = [settings.number("training", f"adam_beta{n}", float) for n in (1, 2)]
    if not of_tokenizer and None not in betas:  # the published tokenizer is trained with AdamW's own
        plan["betas"] = tuple(betas)
    settings.check_ratios()
    for other in ("tokenizer", "basemodel", "predictor"):  # the other stage's share of the file
        settings.seen |= {("training", f"{other}_epochs"), ("training", f"{other}_learning_rate")}
        settings.seen |= {("experiment", f"train_{other}"), ("experiment", f"pre_trained_{other}")}
    return FinetuneConfig(
        wanted=settings.flag("experiment", f"train_{stage}", True),
        skip_existing=settings.flag("experiment", "skip_existing", False),
        data=settings.text("data", "data_path", needed=True),
        output=Path(base) / names[stage],
        model=settings.text("model_paths", "pretrained_predictor") or None,
        tokenizer=pretrained if of_tokenizer or not is_folder(trained) else trained,
        from_scratch=not settings.flag("experiment", f"pre_trained_{word}", both),
        device="auto" if settings.flag("device", "use_cuda", True) else "cpu",
        max_context=settings.number("data", "max_context", int),
        plan={name: value for name, value in plan.items() if value is not None},
        unused=settings.unused(),
    )


def is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except OSError:  # a name that no folder can have
        return False


def load(path: Path) -> dict[str, dict[str, Any]]:
    try:
        yaml: Any = import_module("yaml")
    except ModuleNotFoundError as exc:
        raise UsageError("--config reads YAML, and PyYAML is not installed", hint="pip install pyyaml") from exc
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc.strerror}") from exc
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as exc:  # dates and numbers that there are not, too
        raise InputError(f"{path} is not YAML: {(str(exc).splitlines() or [''])[0]}") from exc
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values() if part is not None):
        raise InputError(f"{path} has no sections", hint=f"the sections of such a file are: {', '.join(UNUSED)}")
    return {str(name): part or {} for name, part in found.items()}


class Settings:
    """The file's values, checked as they are asked for; remembers which were."""

    def __init__(self, sections: dict[str, dict[str, Any]], path: str) -> None:
        self.sections, self.path = sections, path
        self.seen = {(section, name) for section, names in UNUSED.items() for name in names}

    def value(self, section: str, name: str) -> Any:
        self.seen.add((section, name))
        return self.sections.get(section, {}).get(name)

    def text(self, section: str, name: str, needed: bool = False) -> str:
        value = self.value(section, name)
        if value is None or value == "":
            if needed:
                raise InputError(f"{self.path}: {section}.{name} is missing")
            return ""
        return str(value)

    def number(self, section: str, name: str, kind: type[int] | type[float]) -> Any:
        value = self.value(section, name)
        if value is None:
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            found = kind(float(value))  # YAML reads 2e-4, without a point, as text
            if not math.isfinite(found):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{self.path}: {section}.{name} is {value!r}, not a number") from None
        if found != float(value):
            raise InputError(f"{self.path}: {section}.{name} is {value!r}, not a whole number")
        return found

    def flag(self, section: str, name: str, default: bool) -> bool:
        value = self.value(section, name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.path}: {section}.{name} is {value!r}, not true or false")
        return value

    def check_ratios(self) -> None:
        shares = [self.number("data", f"{name}_ratio", float) for name in ("train", "val", "test")]
        if None not in shares and abs(sum(shares) - 1) > 1e-6:
            raise InputError(
                f"{self.path}: data.train_ratio, val_ratio and test_ratio add up to {sum(shares):g}, not to 1",
                hint="make the three shares add up to 1",
            )

    def unused(self) -> tuple[str, ...]:
        return tuple(
            f"{section}.{name}"
            for section, part in self.sections.items()
            for name in part
            if (section, name) not in self.seen
        )
