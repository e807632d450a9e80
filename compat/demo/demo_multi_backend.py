"""YiRage's multi-back-end demo: `anytorch demo`."""

import sys

from anytorch.cli.main import main

sys.exit(main(["demo", *sys.argv[1:]]))
