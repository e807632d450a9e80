"""Kronos's training script: `anytorch finetune predictor` with the settings of config.py.

python gitSource/finetune/train_predictor.py --device cpu
torchrun --nproc_per_node=2 gitSource/finetune/train_predictor.py
"""

import sys

from anytorch_compat.kronos_scripts import command_line
from config import Config

from anytorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(command_line(Config(), "predictor", sys.argv[1:])))
