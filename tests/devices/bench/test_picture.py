from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anytorch.devices.bench import BenchmarkReport, DeviceResult, Row, Timing, plot
from anytorch.errors import AnytorchError, UsageError


def report() -> BenchmarkReport:
    """Numbers measured on 2 cores of an EPYC on 2026-11-15."""

    def row(workload: str, case: str, rate: float, unit: str, limit: float | None, **more: Any) -> Row:
        share = rate / limit if limit else None
        timing = Timing(0.01, 0.001, 0.009, 0.02, 20)
        source = "best measured here (x)" if limit else ""
        return Row(workload, case, "float32", "ok", "", {}, timing, rate, unit, 0.0, 1e-3, limit, share, source, **more)

    rows = (
        row("matmul", "float32 1024×1024", 0.199, "TFLOP/s", 0.199),
        row("matmul", "float16 256×256", 0.0032, "TFLOP/s", 0.0032),
        row("bandwidth", "copy of 64 MiB", 52.4, "GB/s", 52.4),
        row("launch", "add of 256, queued", 1.1, "µs", None),
        Row("copies", "host to device, pinned", "float32", "skipped", "it shares the host's memory", unit="GB/s"),
    )
    device = DeviceResult("cpu", "cpu", "cpu", "AMD EPYC", None, rows, 5.0)
    return BenchmarkReport((device,), {}, "2.13.0+cpu", {}, "2026-11-15T04:25:13+00:00", "0.1.0", None, 5.0)


def test_a_png_can_be_read_back_and_is_not_empty(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = plot(report(), tmp_path / "bench.PNG")
    pixels = image.imread(path, format="png")
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000
    assert float(pixels[..., :3].min()) < 0.2 < 0.9 < float(pixels[..., :3].max())


def test_an_svg_is_xml_and_a_device_with_nothing_measured_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    full = report()
    empty = replace(full.devices[0], id="npu:0", rows=full.devices[0].rows[-1:])
    path = plot(replace(full, devices=(*full.devices, empty), partial=True), tmp_path / "bench.svg")
    assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("name", ["bench.pdf", "bench", "bench.json"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        plot(report(), tmp_path / name)
    assert not (tmp_path / name).exists()


def test_nothing_to_draw(tmp_path: Path) -> None:
    full = report()
    launches = replace(full.devices[0], rows=full.devices[0].rows[3:])
    with pytest.raises(UsageError, match="nothing to draw"):
        plot(replace(full, devices=(launches,)), tmp_path / "x.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AnytorchError, match=r"anytorch\[plot\]"):
        plot(report(), tmp_path / "x.png")


def test_a_matplotlib_that_is_broken_otherwise_speaks_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    for name in [name for name in sys.modules if name.startswith("matplotlib.backends")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)  # matplotlib's Agg canvas imports it
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match="PIL"):
        plot(report(), tmp_path / "x.png")


def test_an_existing_picture_stays_if_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        plot(report(), tmp_path / "file" / "x.svg")
