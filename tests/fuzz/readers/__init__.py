"""Targets in Python: every reader of a file that somebody else may have written, or a failing disk damaged."""

from tests.fuzz.readers import models, requests, state, tables

__all__ = ["models", "requests", "state", "tables"]
