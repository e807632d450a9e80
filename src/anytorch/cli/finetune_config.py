"""The YAML file of Kronos's `finetune_csv`, read for `anytorch finetune --config`: the same settings in our words.

Two things are not as they were there, and cannot be had from the file: windows are normalised with their past alone, and
validation is causal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from anytorch.errors import InputError, UsageError

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
        tokenizer=pretrained if of_tokenizer or not Path(trained).is_dir() else trained,
        from_scratch=not settings.flag("experiment", f"pre_trained_{word}", both),
        device="auto" if settings.flag("device", "use_cuda", True) else "cpu",
        max_context=settings.number("data", "max_context", int),
        plan={name: value for name, value in plan.items() if value is not None},
        unused=settings.unused(),
    )


def load(path: Path) -> dict[str, dict[str, Any]]:
    try:
        yaml: Any = import_module("yaml")
    except ModuleNotFoundError as exc:
        raise UsageError("--config reads YAML, and PyYAML is not installed", hint="pip install pyyaml") from exc
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise InputError(f"{path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise InputError(f"{path} is not YAML: {str(exc).splitlines()[0]}") from exc
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
        except (TypeError, ValueError):
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
                hint="they are the shares of one file",
            )

    def unused(self) -> tuple[str, ...]:
        return tuple(
            f"{section}.{name}"
            for section, part in self.sections.items()
            for name in part
            if (section, name) not in self.seen
        )
