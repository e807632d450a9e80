"""YiRage's back-end test: `anytorch test all`.

python compat/tests/test_multi_backend.py
"""

import sys

from anytorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["test", *(sys.argv[1:] or ["all"])]))
