"""Kronos's training scripts as a command line of ours: the settings of its config.py in the words of `anytorch finetune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Nothing to train on: show on generated candles, in a minute, that everything works.
SHORT = {"--epochs": 1, "--steps-per-epoch": 20, "--batch-size": 16, "--validation-windows": 200}


def command_line(settings: Any, kind: str, given: Sequence[str]) -> list[str]:
    """The `anytorch finetune` arguments for Kronos's `Config` and a stage, followed by the arguments `given`.

    A flag that is given twice counts as it was given last, so the command line wins over the settings. The original's
    scripts overwrite what they find; these go on with a run that was killed, and overwrite any other.
    """
    of_tokenizer = kind == "tokenizer"
    folder = settings.tokenizer_save_folder_name if of_tokenizer else settings.predictor_save_folder_name
    # The predictor learns on the tokenizer that was trained before it, where there is one.
    trained = not of_tokenizer and Path(settings.finetuned_tokenizer_path).is_dir()
    made: dict[str, Any] = {
        "--device": settings.training_device,
        "--output": f"{settings.save_path}/{folder}/checkpoints",
        "--model": settings.pretrained_predictor_path,
        "--tokenizer": settings.finetuned_tokenizer_path if trained else settings.pretrained_tokenizer_path,
        "--lookback": settings.lookback_window,
        "--horizon": settings.predict_window,
        "--learning-rate": settings.tokenizer_learning_rate if of_tokenizer else settings.predictor_learning_rate,
        "--weight-decay": settings.adam_weight_decay,
        "--accumulate": settings.accumulation_steps,
        "--batch-size": settings.batch_size,
        "--seed": settings.seed,
    }
    data: list[str] = []
    if "--data" not in given and "--sample" not in given:
        made |= {"--epochs": settings.epochs, "--steps-per-epoch": settings.n_train_iter}
        if Path(settings.dataset_path).is_dir():
            data = ["--data", settings.dataset_path]
        else:
            data = ["--sample"]
            made |= SHORT
    return [
        "finetune",
        kind,
        *data,
        *(str(part) for pair in made.items() for part in pair),
        "--restart-changed",
        *given,
    ]
