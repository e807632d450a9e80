"""Kronos's web page: the anytorch service, whose `/api/load-model` answers with the device. `python app.py`."""

import sys

from anytorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", "--port", "7070", *sys.argv[1:]]))
