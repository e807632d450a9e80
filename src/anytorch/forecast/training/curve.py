"""The loss curve as a picture, from the log."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anytorch.errors import AnytorchError, OutputError, UsageError
from anytorch.files import replace_file

TRAIN, VALIDATION, BEST = "#56B4E9", "#D55E00", "#000000"  # Okabe and Ito's palette, as in our other pictures


def draw_curve(entries: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> Path:
    """Training and validation loss against steps, to a .png or .svg file. Needs matplotlib."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg"):
        raise UsageError(f"cannot draw to {path.name!r}: the name must end in .png or .svg")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        if (exc.name or "").split(".")[0] != "matplotlib":
            raise
        raise AnytorchError("drawing needs matplotlib", hint="pip install 'anytorch[plot]'") from exc
    steps = [entry for entry in entries if "loss" in entry]
    checks = [entry for entry in entries if "validation" in entry]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    (FigureCanvasAgg if suffix == ".png" else FigureCanvasSVG)(figure)
    panel = figure.subplots()
    panel.plot([e["step"] for e in steps], [e["loss"] for e in steps], color=TRAIN, lw=1, label="training")
    if checks:
        values = [entry["validation"] for entry in checks]
        panel.plot([e["step"] for e in checks], values, color=VALIDATION, marker="o", ms=3, label="validation")
        best = checks[values.index(min(values))]
        panel.plot([best["step"]], [best["validation"]], "*", color=BEST, ms=11, label=f"best: {min(values):.4f}")
    panel.set(xlabel="step", ylabel="loss", title=title)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    body = io.BytesIO()
    figure.savefig(body, format=suffix[1:], dpi=130)
    try:
        replace_file(path, body.getvalue())
    except OSError as exc:
        raise OutputError(f"{path} cannot be written: {exc.strerror}") from exc
    return path
