"""YiRage's multi-back-end benchmark: `anytorch benchmark`."""

import sys

from anytorch.cli.main import main

sys.exit(main(["benchmark", *sys.argv[1:]]))
