"""Kronos's training script: `anytorch finetune tokenizer` with the settings of config.py.

python gitSource/finetune/train_tokenizer.py --device cpu
torchrun --nproc_per_node=2 gitSource/finetune/train_tokenizer.py
"""

import sys

from anytorch_compat.kronos_scripts import command_line
from config import Config

from anytorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(command_line(Config(), "tokenizer", sys.argv[1:])))
