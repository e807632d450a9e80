"""`anytorch version`."""

from __future__ import annotations

import argparse

from anytorch._version import __version__
from anytorch.cli.output import Output


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(options: argparse.Namespace, output: Output) -> int:
    output.answer({"anytorch": __version__}, f"anytorch {__version__}")
    return 0
