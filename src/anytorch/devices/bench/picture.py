"""A picture of measured rate against the device's limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anytorch.devices.bench.results import BenchmarkReport, DeviceResult, Row
from anytorch.errors import UsageError
from anytorch.pictures import check_suffix, figure_for, write_figure

PANELS = (("TFLOP/s", "computing"), ("GB/s", "moving data"))
# Okabe and Ito's palette: told apart by colour-blind readers and in print.
COLOURS = {"matmul": "#0072B2", "transformer": "#56B4E9", "bandwidth": "#009E73", "copies": "#E69F00"}
BAR_INCH, MARGIN_INCH = 0.34, 1.25
WIDE = 20.0  # rates further apart than this need a logarithmic scale
MOST_WORDS = 8


def plot(report: BenchmarkReport, path: str | Path) -> Path:
    """Draw the report to a .png or .svg file and return its path.

    One row of panels per device, bars (on a logarithmic scale where they differ much), a tick at each bar's limit.
    Needs matplotlib.
    """
    path = Path(path)
    check_suffix(path)
    if not any(panel_rows(device, unit) for device in report.devices for unit, _ in PANELS):
        raise UsageError(
            "there is nothing to draw: no rate was measured", hint="measure matmul, bandwidth or transformer"
        )
    heights = [slots_of(device) for device in report.devices]
    figure = figure_for(path, (13, sum(h * BAR_INCH + MARGIN_INCH for h in heights) + 0.9))
    axes = figure.subplots(len(report.devices), len(PANELS), squeeze=False, height_ratios=heights)
    for device, line, slots in zip(report.devices, axes, heights, strict=True):
        for (unit, title), panel in zip(PANELS, line, strict=True):
            draw_panel(panel, device, unit, title, slots)
        draw_words(line[-1], device)
    figure.suptitle(heading(report), fontsize=11)
    figure.supxlabel(
        "bar: median measured rate, with the interquartile spread    ▏ black tick: limit stated by the device    "
        "▏ grey tick: best measured here (no stated limit)",
        fontsize=8,
        color="#444444",
    )
    return write_figure(figure, path, dpi=150)


def panel_rows(device: DeviceResult, unit: str) -> list[Row]:
    return [row for row in device.rows if row.ok and row.unit == unit and row.rate]


def heading(report: BenchmarkReport) -> str:
    drivers = ", ".join(f"{vendor} driver {version}" for vendor, version in report.driver.items())
    facts = [f"torch {report.torch}", drivers, f"anytorch {report.anytorch}", report.date[:10]]
    partial = "   (interrupted: rows are missing)" if report.partial else ""
    return "Measured rate against the limit\n" + " · ".join(fact for fact in facts if fact) + partial


def draw_panel(panel: Any, device: DeviceResult, unit: str, title: str, slots: int) -> None:
    """One device and unit. `slots` bars would fill the panel: all bars of a device are equally thick."""
    rows = panel_rows(device, unit)
    panel.set_title(f"{device.id} · {device.name} · {title}"[:90], fontsize=9.5, loc="left")
    if not rows:
        panel.set_axis_off()
        panel.text(0, 0.5, "nothing measured here", transform=panel.transAxes, color="#666666", fontsize=9)
        return
    rates = [row.rate or 0.0 for row in rows]
    limits = [row.limit or rate for row, rate in zip(rows, rates, strict=True)]
    spreads = rate_spreads(rows)
    places = range(len(rows))
    panel.barh(places, rates, color=[COLOURS.get(row.workload, "#999999") for row in rows], height=0.62, zorder=2)
    panel.errorbar(rates, places, xerr=spreads, fmt="none", ecolor="#222222", elinewidth=1, capsize=2, zorder=5)
    for place, row, rate, limit, spread in zip(places, rows, rates, limits, spreads, strict=True):
        stated = row.limit_source.startswith("stated")
        panel.plot([limit, limit], [place - 0.4, place + 0.4], color="black" if stated else "#999999", lw=2, zorder=4)
        share = f" · {percent(row.share)}" if row.share is not None and (stated or row.share < 0.995) else ""
        panel.annotate(
            f"{rate:,.0f} {unit}{share}" if rate >= 1000 else f"{rate:.3g} {unit}{share}",
            (max(limit, rate + spread), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    high = max(*rates, *limits, *(rate + spread for rate, spread in zip(rates, spreads, strict=True)))
    if high > WIDE * min(rates):
        # A logarithmic bar has no natural start: begin below the least rate. The room on the right is for the words.
        low = min(rates) / 3
        panel.set_xscale("log")
        panel.set_xlim(low, high * (high / low) ** 0.42)
    else:
        panel.set_xlim(0, high * 1.42)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_ylim(max(len(rows), slots) - 0.4, -0.6)
    panel.set_yticks(list(places), [f"{row.workload}  {row.case}" for row in rows], fontsize=8)
    panel.set_xlabel(unit + (", logarithmic" if panel.get_xscale() == "log" else ""), fontsize=8.5)
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="x", color="#dddddd", lw=0.7, zorder=0)
    panel.spines[["top", "right"]].set_visible(False)


def slots_of(device: DeviceResult) -> int:
    """Room for the longer panel, and in the last one for the words below the bars (two lines are as high as a bar)."""
    bars = [len(panel_rows(device, unit)) for unit, _ in PANELS]
    return max(3, bars[0], bars[-1] + (len(words(device)) + 2) // 2)


def words(device: DeviceResult) -> list[str]:
    """The cost of a launch, and what was not timed."""
    lines = [f"{row.case}: {row.rate:.3g} µs" for row in device.rows if row.ok and row.unit == "µs" and row.rate]
    lines += [f"{row.status}: {row.workload} {row.case}" for row in device.rows if not row.ok]
    if len(lines) > MOST_WORDS:
        lines = [*lines[:MOST_WORDS], f"… and {len(lines) - MOST_WORDS} more"]
    return lines


def draw_words(panel: Any, device: DeviceResult) -> None:
    text = "\n".join(words(device))
    panel.text(0.99, 0.02, text, transform=panel.transAxes, ha="right", va="bottom", fontsize=7.5, color="#555555")


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.095 else f"{share * 100:.2g}%"


def rate_spreads(rows: Sequence[Row]) -> list[float]:
    """Half the interquartile spread of the time, as a spread of the rate."""
    return [(row.rate or 0.0) * row.timing.spread_s / (2 * row.timing.median_s) if row.timing else 0.0 for row in rows]
