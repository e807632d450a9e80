"""The settings of Kronos's fine-tuning scripts, by their published names. Edit them here, or give flags to the scripts."""


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
    finetuned_tokenizer_path = f"{save_path}/{tokenizer_save_folder_name}/checkpoints/best_model"
    finetuned_predictor_path = f"{save_path}/{predictor_save_folder_name}/checkpoints/best_model"
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
