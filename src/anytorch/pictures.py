"""Pictures as .png or .svg files, drawn by matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from anytorch.errors import AnytorchError, UsageError
from anytorch.files import replace_file

SUFFIXES = (".png", ".svg")


def check_suffix(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"cannot draw to {path.name!r}: the name must end in .png or .svg")


def figure_for(path: Path, size: tuple[float, float]) -> Any:
    """A Figure of so many inches with its own canvas: pyplot would touch the user's global state and backend."""
    check_suffix(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] != "matplotlib":
            raise  # matplotlib is there and broken: its own words say more than ours
        raise AnytorchError(
            "drawing needs matplotlib, which is not installed", hint="pip install 'anytorch[plot]'"
        ) from exc
    figure = Figure(figsize=size, layout="constrained")
    (FigureCanvasAgg if path.suffix.lower() == ".png" else FigureCanvasSVG)(figure)
    return figure


def write_figure(figure: Any, path: Path, dpi: int) -> Path:
    body = io.BytesIO()
    figure.savefig(body, format=path.suffix.lower()[1:], dpi=dpi)
    try:
        replace_file(path, body.getvalue())
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}", hint="name another file") from exc
    return path
