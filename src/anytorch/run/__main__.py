"""`python -m anytorch.run SCRIPT …` is `anytorch run SCRIPT …`."""

from __future__ import annotations

import sys

from anytorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
