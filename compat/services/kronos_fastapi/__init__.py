"""Kronos's FastAPI service: the paths of its document, re-exports of `anytorch.serve`."""
