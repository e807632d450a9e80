"""The settings of Kronos's fine-tuning scripts, by their published names. Edit them here, or give flags to the scripts."""

from __future__ import annotations

from pathlib import Path


class Config:
    """Every flag of `anytorch finetune` can also be given on the command line, where it wins."""

    training_device = "auto"  # auto, cpu, cuda, mps, …
    dataset_path = "./data/processed_datasets"  # a folder of CSV or Parquet files, one per instrument
    save_path = "./outputs/models"
    tokenizer_save_folder_name = "finetune_tokenizer_demo"
    predictor_save_folder_name = "finetune_predictor_demo"
    # "tiny" comes with anytorch and needs no download; the published ones: kronos-tokenizer-base, kronos-small.
    pretrained_tokenizer_path = "tiny"
    pretrained_predictor_path = "tiny"
    lookback_window = 90
    predict_window = 10
    epochs = 30
    batch_size = 50
    n_train_iter = 2000  # steps per epoch
    tokenizer_learning_rate = 2e-4
    predictor_learning_rate = 4e-5
    adam_weight_decay = 0.1
    accumulation_steps = 1
    seed = 100

    def __init__(self) -> None:
        self.finetuned_tokenizer_path = f"{self.save_path}/{self.tokenizer_save_folder_name}/checkpoints/best_model"
        self.finetuned_predictor_path = f"{self.save_path}/{self.predictor_save_folder_name}/checkpoints/best_model"

    def command_line(self, kind: str, given: list[str]) -> list[str]:
        """The arguments of `anytorch finetune` that these settings are, before those that were `given`."""
        folder = self.tokenizer_save_folder_name if kind == "tokenizer" else self.predictor_save_folder_name
        rate = self.tokenizer_learning_rate if kind == "tokenizer" else self.predictor_learning_rate
        trained = Path(self.finetuned_tokenizer_path)
        tokenizer = str(trained) if kind == "predictor" and trained.is_dir() else self.pretrained_tokenizer_path
        made = {
            "--device": self.training_device,
            "--output": f"{self.save_path}/{folder}/checkpoints",
            "--model": self.pretrained_predictor_path,
            "--tokenizer": tokenizer,
            "--lookback": self.lookback_window,
            "--horizon": self.predict_window,
            "--learning-rate": rate,
            "--weight-decay": self.adam_weight_decay,
            "--accumulate": self.accumulation_steps,
            "--batch-size": self.batch_size,
            "--seed": self.seed,
        }
        data: list[str] = []
        if "--data" not in given and "--sample" not in given:
            # Nothing to train on: show on generated candles, in a minute, that everything works.
            there = Path(self.dataset_path).is_dir()
            data = ["--data", self.dataset_path] if there else ["--sample"]
            made |= {"--epochs": self.epochs, "--steps-per-epoch": self.n_train_iter}
            if not there:
                made |= {"--epochs": 1, "--steps-per-epoch": 20, "--batch-size": 16, "--validation-windows": 200}
        return ["finetune", kind, *data, *(str(part) for pair in made.items() for part in pair), *given]
