"""The page around its panels: keys, themes, tabs, narrow windows, and no serious finding of axe anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
Open = Callable[..., Any]
PANELS = ("devices", "benchmark", "embeddings", "forecast", "generate", "graphs")
KEY = "a-key-only-for-the-tests-of-the-page"
ROWS = [  # of two runs on two devices: what was measured, and what limit is known
    ("matmul, float32 1024×1024", "TFLOP/s", 0.11, 0.14),
    ("matmul, bfloat16 1024×1024", "TFLOP/s", 0.31, 0.5),
    ("bandwidth, copy 256 MiB", "GB/s", 14.2, 20.0),
    ("launch, empty kernel", "µs", 4.2, None),
]


def run(day: int, factor: float) -> dict[str, Any]:
    rows = [
        {"device": device, "test": test, "unit": unit, "rate": rate * factor * times, "limit": limit}
        | {"share": None if limit is None else rate * factor * times / limit}
        for device, times in (("cpu", 1.0), ("webgpu:0", 0.3))
        for test, unit, rate, limit in ROWS
    ]
    return {"run_id": str(day), "when": f"2026-11-{day}T10:00:00Z", "seconds": 2.0, "rows": rows, "problems": []}


def fill(tab: Any, name: str) -> None:
    """Open a panel with something in it: what is empty cannot be wrong."""
    panel = tab.open(name)
    if name == "devices":
        panel.locator(".device").first.wait_for()
    elif name == "benchmark":
        panel.locator(".rate-table").first.wait_for()
        panel.get_by_role("group", name="Compare runs").get_by_role("checkbox").nth(1).check()
    elif name == "embeddings":
        panel.get_by_role("button", name="Compare the texts").click()
        panel.locator(".dot").first.wait_for()
        panel.get_by_label("Search by meaning").fill("not enough graphics memory")
        panel.locator(".hit").first.wait_for()
    elif name == "forecast":
        panel.get_by_label("Paths").fill("8")
        panel.get_by_role("button", name="Use the sample").click()
        panel.locator(".candles svg").wait_for()
    elif name == "generate":
        panel.locator(".model-line, .model select").first.wait_for()
        if panel.locator("option", has_text="tiny-llama (load)").count():
            panel.get_by_label("Model").select_option(label="tiny-llama (load)")
        panel.get_by_label("At most").fill("32")
        panel.get_by_role("button", name="Generate").click()
        expect(panel.locator(".figures dd").first).to_have_text(re.compile(r"^[\d.\u202f]+$"))
    else:
        panel.locator(".graph, .empty").first.wait_for()
        panel.get_by_text("Picture, kernels and generated text").first.click()
        panel.get_by_text("Generated C++ of step 0").click()


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_accessibility_finding(visit: Open, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = visit(theme=theme)
    tab.page.route("**/v1/benchmark/runs", lambda route: route.fulfill(json={"runs": [run(15, 1.0), run(14, 0.8)]}))
    found = []
    for name in PANELS:
        fill(tab, name)
        tab.shoot(f"{name}-{theme}")
        for violation in Axe().run(tab.page).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                nodes = [node["html"][:160] + " " + node["failureSummary"] for node in violation["nodes"][:3]]
                found.append(f"{name}: {violation['id']}: {violation['help']}\n  " + "\n  ".join(nodes))
    assert not found, "\n".join(found)


@pytest.mark.long
def test_a_phone_needs_no_sideways_scrolling(visit: Open) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = visit(width=360, height=740)
    tab.page.route("**/v1/benchmark/runs", lambda route: route.fulfill(json={"runs": [run(15, 1.0), run(14, 0.8)]}))
    for name in PANELS:
        fill(tab, name)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360, name
        tab.shoot(f"{name}-phone")
        tabs = tab.page.get_by_role("tab")
        for at in range(tabs.count()):
            box = tabs.nth(at).bounding_box()
            assert box["width"] >= 44 and box["height"] >= 44 and box["y"] > 600, f"{name}: tab {at} is {box}"
    serious = [v["id"] for v in Axe().run(tab.page).response["violations"] if v["impact"] in ("serious", "critical")]
    assert not serious


def test_tabs_follow_the_keyboard(visit: Open) -> None:
    tab = visit()
    tab.open("devices")
    tab.page.keyboard.press("Tab")
    expect(tab.page.get_by_text("Skip to the content")).to_be_focused()
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator("#content")).to_be_focused()
    assert tab.page.url.endswith("#devices")
    tab.page.get_by_text("Skip to the content").focus()
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Tab")
    expect(tab.page.get_by_role("tab", name="Devices")).to_be_focused()
    tab.page.keyboard.press("ArrowDown")
    expect(tab.page.get_by_role("tab", name="Benchmark")).to_be_focused()
    expect(tab.page.get_by_role("tabpanel", name="Benchmark")).to_be_visible()
    expect(tab.page.get_by_role("tabpanel")).to_have_count(1)
    tab.page.keyboard.press("End")
    expect(tab.page.get_by_role("tabpanel", name="Graphs")).to_be_visible()
    tab.page.keyboard.press("ArrowRight")
    expect(tab.page.get_by_role("tab", name="Devices")).to_be_focused()
    outline = tab.page.get_by_role("tab", name="Devices").evaluate("tab => getComputedStyle(tab).outlineStyle")
    assert outline == "solid"
    assert tab.page.url.endswith("#devices")
    assert tab.page.title() == "Devices · anytorch"
    tab.page.reload()
    expect(tab.page.get_by_role("tabpanel", name="Devices")).to_be_visible()


def test_the_theme_is_remembered(visit: Open) -> None:
    tab = visit(theme="light")
    tab.open("graphs")
    ground = "getComputedStyle(document.body).color"
    light = tab.page.evaluate(ground)
    button = tab.page.get_by_role("button", name="Theme: as the system")
    button.click()
    expect(tab.page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert tab.page.evaluate(ground) == light
    tab.page.get_by_role("button", name="Theme: light").click()
    dark = tab.page.evaluate(ground)
    assert dark != light
    tab.page.reload()
    expect(tab.page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert tab.page.evaluate(ground) == dark


def test_the_key_is_asked_for_once_and_kept_in_the_tab(visit: Open) -> None:
    tab = visit(key=None)
    tab.page.goto(tab.address)
    dialog = tab.page.get_by_role("dialog", name="This service requires an API key")
    dialog.get_by_label("API key").fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    expect(dialog).to_contain_text("does not know this key")
    dialog.get_by_label("API key").fill(KEY)
    dialog.get_by_label("API key").press("Enter")
    tab.page.locator("#panel-devices .device").first.wait_for()
    expect(dialog).to_be_hidden()
    assert tab.page.evaluate("sessionStorage.getItem('anytorch-api-key')") == KEY
    assert tab.page.evaluate("Object.values(localStorage).join()").find(KEY) < 0
    tab.page.reload()
    tab.page.locator("#panel-devices .device").first.wait_for()
    assert tab.errors and all("401" in line for line in tab.errors), tab.errors  # the browser's own lines
    tab.errors.clear()


def test_without_the_key_the_panel_says_so(visit: Open) -> None:
    tab = visit(key=None)
    tab.page.goto(tab.address)
    tab.page.get_by_role("button", name="Cancel").click()
    box = tab.page.get_by_role("alert")
    expect(box).to_contain_text("An API key is required")
    tab.errors.clear()


def test_a_service_that_is_gone_is_said(visit: Open) -> None:
    tab = visit()
    tab.open("embeddings")
    expect(tab.page.locator("#service")).to_contain_text("Ready")
    tab.page.route("**/v1/**", lambda route: route.abort())
    tab.page.get_by_role("button", name="Compare the texts").click()
    box = tab.page.get_by_role("alert")
    expect(box).to_contain_text("The service does not answer")
    expect(box.get_by_role("button", name="Copy: anytorch serve")).to_be_visible()
    tab.errors.clear()


def test_the_policy_of_the_page_forbids_everything_else(visit: Open) -> None:
    tab = visit()
    answer = tab.page.goto(tab.address)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert tab.page.request.get(f"{tab.address}favicon.ico").headers["content-type"] == "image/svg+xml"
    tab.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'hacked = 1'}))"
    )
    assert tab.page.evaluate("typeof hacked") == "undefined"
    tab.errors.clear()  # the browser's line about the refused script


def test_readiness_is_told_before_the_models_are_there(visit: Open) -> None:
    state = {"status": "starting", "device": None, "models": {"embeddings": [], "forecast": [], "text": []}}
    state |= {"versions": {"anytorch": "0", "python": "3", "torch": None}, "uptime_seconds": 0.1}
    tab = visit()
    tab.page.route("**/v1/readyz", lambda route: route.fulfill(status=503, body=json.dumps(state)))
    tab.open("graphs")
    expect(tab.page.locator("#service")).to_have_text(re.compile("Starting"))
    tab.errors.clear()  # the browser writes a line about every 503


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_of_the_api(visit: Open, theme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = visit(width=360, height=740, theme=theme)
    tab.page.set_extra_http_headers({"Authorization": f"Bearer {KEY}"})
    tab.page.goto(f"{tab.address}docs")
    expect(tab.page.get_by_role("heading", name="POST /v1/similarity")).to_be_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    serious = [v["id"] for v in Axe().run(tab.page).response["violations"] if v["impact"] in ("serious", "critical")]
    assert not serious
    tab.page.set_viewport_size({"width": 1280, "height": 900})
    tab.shoot(f"docs-{theme}")
