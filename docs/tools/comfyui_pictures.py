"""Pictures of the example workflows in a running ComfyUI: the guide's, and the template browser's thumbnails.

    python docs/tools/comfyui_pictures.py http://127.0.0.1:8188 [/usr/bin/chromium]

Each workflow is opened in the page, run, and photographed. Needs playwright, a Chromium, and a ComfyUI with the pack. Its
input/example.png should be a picture of your own (`own_picture` makes one): ComfyUI's is ComfyUI's.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / "comfyui" / "anytorch_nodes" / "example_workflows"
ASSETS = ROOT / "docs" / "assets"
GUIDE = {"mlp": ASSETS / "comfyui-mlp.png"}
ORDER = ["mlp", "loss", "tensor_operations", "save_weights", "load_weights", "devices", "text_embedding", "forecast"]
MARGIN = 20

# Zooms so that every node is below the page's own bars, and says which part of the page they cover.
FIT = """() => {
  const canvas = window.app.canvas, nodes = window.app.graph.nodes;
  const left = Math.min(...nodes.map(n => n.pos[0])), top = Math.min(...nodes.map(n => n.pos[1])) - 40;
  const right = Math.max(...nodes.map(n => n.pos[0] + n.size[0]));
  const bottom = Math.max(...nodes.map(n => n.pos[1] + n.size[1]));
  const width = innerWidth - 120, height = innerHeight - 160;
  const scale = Math.min(width / (right - left), height / (bottom - top), 1);
  canvas.ds.scale = scale;
  canvas.ds.offset[0] = -left + 90 / scale;
  canvas.ds.offset[1] = -top + 130 / scale;
  canvas.setDirty(true, true);
  const box = canvas.canvas.getBoundingClientRect();
  return [box.left + 90, box.top + 130, (right - left) * scale, (bottom - top) * scale];
}"""
IDLE = """async () => {
  const queue = await (await fetch('/queue')).json();
  return !queue.queue_running.length && !queue.queue_pending.length;
}"""


def own_picture(path: Path, size: int = 512) -> None:
    """Something to look at with edges, colours and soft parts."""
    picture = Image.linear_gradient("L").resize((size, size))
    sky = Image.merge(
        "RGB",
        (picture.point(lambda v: 60 + v // 3), picture.point(lambda v: 120 + v // 4), picture.point(lambda v: 235)),
    )
    draw = ImageDraw.Draw(sky)
    draw.ellipse((330, 60, 430, 160), fill=(255, 214, 90))
    draw.polygon([(0, 400), (150, 190), (300, 400)], fill=(92, 84, 110))
    draw.polygon([(180, 420), (340, 240), (512, 420)], fill=(120, 104, 130))
    draw.rectangle((0, 390, 512, 512), fill=(70, 130, 80))
    draw.rectangle((90, 330, 190, 430), fill=(200, 90, 70))
    draw.polygon([(80, 330), (140, 280), (200, 330)], fill=(120, 50, 40))
    sky.save(path)


def photograph(page: Page, document: Any, *, only: int | None = None) -> bytes:
    """The workflow after it was run: all of it, or its first `only` nodes."""
    page.evaluate("async d => { await window.app.loadGraphData(d) }", document)
    page.wait_for_timeout(1500)
    page.evaluate("async () => { await window.app.queuePrompt(0, 1) }")
    page.wait_for_timeout(1000)
    page.wait_for_function(IDLE, timeout=120_000)
    page.wait_for_timeout(7000)  # until "1 job completed" is gone again
    page.keyboard.press("Escape")  # the dialog of an error
    if only is not None:
        page.evaluate("n => window.app.graph.nodes.slice(n).forEach(one => window.app.graph.remove(one))", only)
    x, y, width, height = page.evaluate(FIT)
    page.wait_for_timeout(1500)
    part = {"x": x - MARGIN, "y": y - MARGIN, "width": width + 2 * MARGIN, "height": height + 2 * MARGIN}
    return page.screenshot(clip=part)  # type: ignore[arg-type]


def main(url: str, chromium: str = "/usr/bin/chromium") -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 2200, "height": 1000})
        page.goto(url)
        page.wait_for_function("window.app && window.app.graph && window.app.extensionManager", timeout=60_000)
        page.wait_for_timeout(4000)
        page.keyboard.press("Escape")  # a fresh ComfyUI opens its template browser
        for name in ORDER:
            document = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
            picture = Image.open(io.BytesIO(photograph(page, document))).convert("RGB")
            if name in GUIDE:
                picture.quantize(128).save(GUIDE[name], optimize=True)
            picture.thumbnail((640, 400))
            picture.save(WORKFLOWS / f"{name}.jpg", quality=80)
        wrong = json.loads((WORKFLOWS / "mlp.json").read_text(encoding="utf-8"))
        wrong["nodes"][1]["widgets_values"][0] = 4  # in_channels
        picture = Image.open(io.BytesIO(photograph(page, wrong, only=2))).convert("RGB")
        picture.quantize(128).save(ASSETS / "comfyui-message.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
