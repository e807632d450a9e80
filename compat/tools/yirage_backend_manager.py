"""YiRage's back-end manager: `info`, `optimize`, `benchmark`, `set` and `test` of the anytorch command line."""

import sys

from anytorch.cli.main import main

sys.exit(main(sys.argv[1:] or ["--help"]))
