"""`python -m anytorch.run SCRIPT …` is `anytorch run SCRIPT …`."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module("anytorch.cli.main").main(["run", *sys.argv[1:]]))
