"""Logging to standard error, at the level the settings name. Standard output is for data alone."""

from __future__ import annotations

import logging
import sys

from anytorch import config

ROOT = "anytorch"


def logger(name: str) -> logging.Logger:
    """The logger of one module: `log = logs.logger(__name__)`. Silent until `configure` or the application's own set-up."""
    return logging.getLogger(name)


def configure(level: str | None = None) -> None:
    """Called by the command line and the service. A library user's own logging set-up is left alone."""
    root = logging.getLogger(ROOT)
    root.setLevel(level or config.get("log_level"))
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("anytorch %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
