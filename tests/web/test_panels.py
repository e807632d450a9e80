"""Each panel used as a person would use it, in a real Chromium, against the running service."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
ROOT = Path(__file__).parents[2]
Open = Callable[..., Any]


def drop(page: Any, target: Any, name: str, content: str) -> None:
    made = "([name, content]) => { const d = new DataTransfer(); d.items.add(new File([content], name)); return d; }"
    data = page.evaluate_handle(made, [name, content])
    for event in ("dragenter", "dragover", "drop"):
        target.dispatch_event(event, {"dataTransfer": data})


def test_devices(visit: Open, ask: Callable[[str], bytes]) -> None:
    tab = visit()
    panel = tab.open("devices")
    while not (found := json.loads(ask("v1/devices")))["tried"]:  # a first run on this machine takes its time
        tab.page.wait_for_timeout(500)
    usable = [device for device in found["devices"] if device["usable"]]
    cards = panel.locator(".device")
    expect(cards).to_have_count(len(usable))
    cpu = panel.locator(".device", has=tab.page.locator("code.id", has_text=re.compile("^cpu$")))
    expect(cpu.get_by_role("meter", name="Memory")).to_have_attribute("aria-valuenow", re.compile(r"^\d+$"))
    # Live: the spark line grows with every reading of /v1/devices/live.
    drawn = cpu.locator(".spark-line").get_attribute("d")
    expect(cpu.locator(".spark-line")).not_to_have_attribute("d", drawn)
    expect(tab.page.locator("#service")).to_contain_text("Ready on cpu")


def test_a_missing_device_says_why_and_what_helps(visit: Open, ask: Callable[[str], bytes]) -> None:
    # No machine of ours lacks a driver on purpose: the answer is the real one with one broken card added.
    found = json.loads(ask("v1/devices"))
    fix = "pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"
    reason = {"code": "cpu-only-wheel", "severity": "error", "title": "torch was built without CUDA", "fix": [fix]}
    reason |= {"detail": "torch 2.13.0+cpu is installed", "page": "/v1/doctor/cpu-only-wheel"}
    broken = {"id": "cuda:0", "backend": "cuda", "title": "NVIDIA GeForce RTX 4090", "state": "unusable"}
    broken |= {"best": False, "usable": False, "facts": [], "memory": None, "utilisation": None, "reasons": [reason]}
    found["devices"].append(broken)
    tab = visit()
    tab.page.route("**/v1/devices", lambda route: route.fulfill(json=found))
    panel = tab.open("devices")
    card = panel.locator(".missing", has_text="NVIDIA GeForce RTX 4090")
    expect(card).to_contain_text("Torch was built without CUDA")
    card.get_by_role("button", name=f"Copy: {fix}").click()
    assert tab.page.evaluate("navigator.clipboard.readText()") == fix
    expect(tab.page.locator("#announcer")).to_have_text("Copied")
    card.get_by_text("What it means").click()  # the doctor's own page, fetched from the real service
    expect(card.locator(".explained h5").first).to_be_visible()
    tab.shoot("devices-missing-light")


@pytest.mark.long
def test_benchmark(visit: Open) -> None:
    tab = visit()
    panel = tab.open("benchmark")
    expect(panel.get_by_role("checkbox", name=re.compile(r"\(cpu\)"))).to_be_checked()
    panel.get_by_label("Length").select_option("2")
    panel.get_by_role("button", name="Run the benchmark").click()
    expect(panel.get_by_role("progressbar")).to_be_visible()
    expect(panel.locator(".rate-table tbody tr").first).to_be_visible()
    expect(panel.get_by_role("button", name="Stop")).to_be_hidden()
    shares = panel.locator(".rate-table td.amount.soft").all_inner_texts()
    assert any(re.fullmatch(r"\d+ %", share) for share in shares), shares
    widths = panel.locator(".rate-fill").evaluate_all("bars => bars.map(bar => bar.getBoundingClientRect().width)")
    assert max(widths) > 50
    tab.shoot("benchmark-measured-light")
    # A second, stopped one: what was measured stays, and the first can be laid beside it.
    panel.get_by_role("button", name="Run the benchmark").click()
    panel.get_by_role("button", name="Stop").click()
    expect(panel.get_by_role("button", name="Run the benchmark")).to_be_enabled()
    expect(panel.get_by_role("button", name="Run the benchmark")).to_be_focused()


def test_benchmark_runs_are_compared(visit: Open) -> None:
    row = {"device": "cpu", "test": "matmul, float32 64×64", "unit": "TFLOP/s", "limit": 0.2}
    rows = [{**row, "rate": 0.1, "share": 0.5}, {**row, "device": "webgpu:0", "rate": 0.02, "share": 0.1}]
    runs = [{"run_id": str(n), "when": f"2026-11-1{n}T10:00:00Z", "seconds": 2.0, "rows": rows} for n in (4, 3)]
    tab = visit()
    tab.page.route("**/v1/benchmark/runs", lambda route: route.fulfill(json={"runs": runs}))
    panel = tab.open("benchmark")
    expect(panel.locator(".rate-fill")).to_have_count(2)
    panel.get_by_role("group", name="Compare runs").get_by_role("checkbox").nth(1).check()
    expect(panel.locator(".rate-fill")).to_have_count(4)
    expect(panel.locator(".legend li")).to_have_count(4)
    tab.shoot("benchmark-compared-light")


def test_embeddings(visit: Open, tmp_path: Path) -> None:
    tab = visit()
    panel = tab.open("embeddings")
    texts = ["a cat sleeps", "a kitten naps", "the stock market fell", "shares dropped today"]
    panel.get_by_label("Texts, one on each line").fill("\n".join(texts))
    panel.get_by_role("button", name="Compare the texts").click()
    heat = panel.locator(".chart.heat")
    heat.wait_for()
    expect(panel.locator(".figures")).to_contain_text("texts a second")
    # Read by keys: a text is the same as itself, and more like its neighbour than like the others.
    heat.focus()
    readout = panel.locator(".heat-view .readout")
    tab.page.keyboard.press("ArrowDown")
    similar = []
    for _ in texts:
        similar.append(float(readout.locator("strong").inner_text()))
        tab.page.keyboard.press("ArrowRight")
    assert similar[1] > 0.99 and similar[0] > max(similar[2:])
    # Another theme is drawn anew, on the canvas too.
    picture = "canvas => canvas.toDataURL()"
    before = heat.locator("canvas").evaluate(picture)
    for name in ("as the system", "light"):
        tab.page.get_by_role("button", name=f"Theme: {name}").click()
    assert heat.locator("canvas").evaluate(picture) != before
    expect(panel.locator(".dot")).to_have_count(len(texts))
    panel.locator(".chart.map").focus()
    for _ in range(3):
        tab.page.keyboard.press("ArrowRight")
    expect(panel.locator(".map-view .readout")).to_contain_text("nearest: 4 (")
    panel.get_by_label("Search by meaning").fill("falling prices on the exchange")
    expect(panel.locator(".hit").first).to_contain_text(re.compile("market|shares"))
    expect(panel.locator(".dot.hit")).not_to_have_count(0)
    panel.get_by_text("Show as a table").first.click()
    expect(panel.locator(".table-scroll table tbody tr").first.locator("td").first).to_have_text("1.00")

    # Dropped on the texts, as from a file manager.
    drop(tab.page, panel.get_by_label("Texts, one on each line"), "dropped.txt", "first\nsecond\n")
    expect(panel.get_by_label("Texts, one on each line")).to_have_value("first\nsecond")

    file = tmp_path / "more.csv"
    file.write_text("id,text\n1,one\n2,two\n3,three\n")
    panel.locator("input[type=file]").set_input_files(file)
    expect(panel.get_by_label("Texts, one on each line")).to_have_value("one\ntwo\nthree")
    expect(panel.get_by_text("3 texts", exact=True)).to_be_visible()


def test_embeddings_shows_the_services_problem(visit: Open) -> None:
    tab = visit()
    panel = tab.open("embeddings")
    panel.get_by_label("Texts, one on each line").fill("  \n ")
    panel.get_by_role("button", name="Compare the texts").click()
    expect(panel.locator(".notice")).to_contain_text("some texts first")
    problem = {"title": "The queue is full", "detail": "the queue is full", "status": 429}
    problem |= {"hint": "try again, or run `anytorch serve --workers 2`"}
    body = json.dumps(problem)
    answer = {"status": 429, "body": body, "content_type": "application/problem+json"}
    tab.page.route("**/v1/similarity", lambda route: route.fulfill(**answer))
    panel.get_by_label("Texts, one on each line").fill("a text")
    panel.get_by_role("button", name="Compare the texts").click()
    box = panel.get_by_role("alert")
    expect(box).to_contain_text("The queue is full")
    expect(box.get_by_role("button", name="Copy: anytorch serve --workers 2")).to_be_visible()
    # The browser itself writes one line about the 429; nothing else may be there.
    assert all("429" in line for line in tab.errors), tab.errors
    tab.errors.clear()


def test_one_of_several_models_is_chosen(visit: Open, ask: Callable[[str], bytes]) -> None:
    models = [m for m in json.loads(ask("api/models"))["models"] if m["job"] == "embeddings"]
    other = {**models[0], "id": "another-model", "default": False, "dim": 768, "loaded": True}
    sent: list[Any] = []
    tab = visit()
    tab.page.route("**/api/models", lambda route: route.fulfill(json={"models": [*models, other]}))
    tab.page.route("**/v1/similarity", lambda route: (sent.append(route.request.post_data_json), route.abort())[1])
    panel = tab.open("embeddings")
    panel.get_by_label("Model").select_option("another-model")
    expect(panel.locator(".model-line")).to_contain_text("768 dimensions")
    panel.get_by_role("button", name="Compare the texts").click()
    expect(panel.get_by_role("alert")).to_be_visible()
    assert sent[0]["model"] == "another-model"
    tab.errors.clear()  # the browser's line about the request that was cut off


def test_a_long_computation_is_counted_and_can_be_stopped(visit: Open) -> None:
    tab = visit()
    tab.page.route("**/v1/forecast", lambda route: None)  # never answered
    panel = tab.open("forecast")
    start = panel.get_by_role("button", name="Forecast", exact=True)
    start.click()
    waiting = panel.locator(".waiting")
    expect(waiting).to_contain_text(re.compile(r"Computing… \d\.\d s"))
    expect(start).to_be_focused()
    expect(start).to_be_disabled()
    waiting.get_by_role("button", name="Stop").click()
    expect(waiting).to_be_hidden()
    expect(start).to_be_enabled()
    expect(panel.get_by_role("alert")).to_be_hidden()


def test_forecast_of_the_sample(visit: Open) -> None:
    tab = visit()
    panel = tab.open("forecast")
    panel.get_by_label("Bars ahead").fill("8")
    panel.get_by_label("Paths").fill("4")
    panel.get_by_role("button", name="Use the sample").click()
    chart = panel.locator(".chart.candles")
    chart.wait_for()
    expect(panel.locator(".figures")).to_contain_text("cpu")
    expect(panel.locator(".figures")).to_contain_text("8 × 4")
    readout = panel.locator(".candle-view .readout")
    expect(readout).to_contain_text("O")
    chart.focus()
    tab.page.keyboard.press("End")
    expect(readout).to_contain_text("Median")
    expect(readout).to_contain_text("90 %")
    box = chart.bounding_box()
    tab.page.mouse.move(box["x"] + 60, box["y"] + 60)
    expect(readout).not_to_contain_text("Median")
    shapes = chart.locator("svg > *").count()
    panel.get_by_label("Every path").check()
    expect(chart.locator("svg > *")).not_to_have_count(shapes)

    with tab.page.expect_download() as waiting:
        panel.get_by_role("button", name="CSV", exact=True).click()
    rows = list(csv.reader(io.StringIO(waiting.value.path().read_text())))
    assert len(rows) == 9 and "close_q0.5" in rows[0]
    with tab.page.expect_download() as waiting:
        panel.get_by_role("button", name="PNG", exact=True).click()
    picture = waiting.value.path().read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    panel.get_by_text("Show as a table").click()
    expect(panel.locator(".table-scroll tbody tr")).to_have_count(8)


def test_forecast_of_a_file(visit: Open, tmp_path: Path) -> None:
    lines = ["timestamps,open,high,low,close,volume"]
    for minute in range(60):
        price = 100 + minute % 7
        lines.append(f"2026-01-01 00:{minute:02d}:00,{price},{price + 2},{price - 2},{price + 1},{1000 + minute}")
    file = tmp_path / "my candles.csv"
    file.write_text("\n".join(lines))
    tab = visit()
    panel = tab.open("forecast")
    panel.locator("input[type=file]").set_input_files(file)
    expect(panel.locator(".chosen")).to_contain_text("my candles.csv: 60 rows")
    expect(panel.get_by_text("The history, as read")).to_be_visible()
    panel.get_by_label("Bars ahead").fill("5")
    panel.get_by_label("Paths").fill("3")
    panel.get_by_role("button", name="Forecast", exact=True).click()
    expect(panel.locator(".figures")).to_contain_text("5 × 3")

    file.write_text("nothing,useful\n1,2\n")
    panel.locator("input[type=file]").set_input_files(file)
    panel.get_by_role("button", name="Forecast", exact=True).click()
    expect(panel.get_by_role("alert")).to_be_visible()
    assert all("422" in line for line in tab.errors), tab.errors
    tab.errors.clear()


def test_generate(visit: Open) -> None:
    tab = visit()
    panel = tab.open("generate")
    # The built-in model waits for the first request; one of the folder is offered, and loaded when it is chosen.
    expect(panel.get_by_role("button", name="Generate")).to_be_visible()
    panel.get_by_label("Model").select_option("tiny-llama")
    expect(panel.locator(".model-line")).to_contain_text("tiny-llama")
    panel.get_by_label("Prompt").fill("one word after")
    panel.get_by_label("At most").fill("24")
    panel.get_by_role("button", name="Generate").click()
    expect(panel.locator(".written")).not_to_be_empty()
    expect(panel.locator(".written")).not_to_have_class(re.compile("writing"))
    figures = panel.locator(".figures")
    expect(figures.locator("dd").nth(0)).to_have_text(re.compile(r"^[\d.\u202f]+$"))
    expect(figures.locator("dd").nth(1)).to_have_text(re.compile(r"^\d+$"))
    panel.get_by_text("Continue the text").click()
    panel.get_by_label("At most").fill("300")
    panel.get_by_role("button", name="Generate").click()
    expect(panel.get_by_role("button", name="Generate")).to_be_enabled()


def test_generate_without_any_model(visit: Open) -> None:
    tab = visit()
    tab.page.route("**/api/models", lambda route: route.fulfill(json={"models": []}))
    panel = tab.open("generate")
    expect(panel).to_contain_text("No text model is loaded")
    expect(panel.get_by_role("button", name=re.compile("^Copy: anytorch serve --text-model"))).to_be_visible()
    expect(panel.get_by_label("Prompt")).to_be_hidden()
    tab.shoot("generate-empty-light")


def test_graphs(visit: Open, ask: Callable[[str], bytes]) -> None:
    tab = visit()
    panel = tab.open("graphs")
    graphs = json.loads(ask("v1/graphs"))["graphs"]
    expect(panel.locator(".graph")).to_have_count(len(graphs))
    card = panel.locator(".graph", has_text="int8 weights 1536x512, 1 row")
    expect(card.locator("tr").nth(1)).to_contain_text("cpp dot")
    expect(card.locator("tr").nth(1).locator(".badge")).to_have_text("chosen")
    expect(card).to_contain_text("3.06×")
    expect(card).to_contain_text("Refused, not exact enough: torch cast (off by 0.1 of the answer's size")
    expect(card).to_contain_text("Not timed: torch int8pack (rounds inputs to bfloat16")


def test_a_kernel_graph_shows_its_picture_kernels_and_text(visit: Open, ask: Callable[[str], bytes]) -> None:
    tab = visit()
    panel = tab.open("graphs")
    card = panel.locator(".kernel-graph")
    expect(card).to_have_count(1)
    expect(card).to_contain_text("rms_norm, matmul, silu")
    expect(card).to_contain_text("b = 4")
    expect(card.locator(".badge", has_text="2.5×")).to_be_visible()
    expect(card).to_contain_text("Refused, not exact enough: sums in 4 parts (an output is off by 3")
    expect(card).to_contain_text("Not timed: products by torch (no time was left to measure it)")
    card.get_by_text("Picture, kernels and generated text").click()
    expect(card.get_by_role("img", name="Picture of rms_norm, matmul, silu")).to_be_visible()
    expect(card.get_by_role("region", name="Steps of rms_norm, matmul, silu")).to_contain_text("7 ops in one kernel")
    expect(card).to_contain_text("matmul by torch")
    card.get_by_text("Generated C++ of step 0").click()
    (listed,) = [one for one in json.loads(ask("v1/graphs"))["graphs"] if one["picture"]]
    text = json.loads(ask(f"v1/graphs/{listed['id']}"))["steps"][0]["text"]
    assert "a < b && c > d" in text
    assert card.locator("pre.generated").text_content() == text
    card.get_by_text("1 schedule tried for 1 kernel").click()
    expect(card.get_by_role("button", name=f"Copy: anytorch graph show {listed['id'][:12]} --kernels")).to_be_visible()
    assert ask(listed["picture"].lstrip("/")).startswith(b"<svg")
    tab.shoot("graphs-open-light")


def test_graphs_with_odd_pictures_and_without_any(visit: Open) -> None:
    shapes = '<script>alert(1)</script><rect width="9" onclick="x()" height="9"/>'
    bad = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9">{shapes}</svg>'
    candidates = [{"name": "a", "seconds": 2e-3, "chosen": True, "correct": True}]
    candidates += [{"name": "b", "seconds": 1e-3, "chosen": False, "correct": False}]
    candidates += [{"name": "c", "seconds": None, "chosen": False, "correct": True}]
    graph = {
        "id": "1",
        "title": "matmul",
        "device": "cpu",
        "kind": "kernel graph",
        "picture": "/v1/graphs/1/picture.svg",
    }
    graph |= {"candidates": candidates, "when": "2026-11-15T10:00:00Z", "speedup": 1.5, "sizes": {}, "kernels": 0}
    whole = {**graph, "picture_svg": bad, "why": "x", "steps": [], "kernel_choices": [], "least_nbytes": None}
    answer: dict[str, Any] = {"graphs": [graph]}
    tab = visit()
    tab.page.route("**/v1/graphs", lambda route: route.fulfill(json=answer))
    tab.page.route("**/v1/graphs/1", lambda route: route.fulfill(json=whole))
    panel = tab.open("graphs")
    panel.get_by_text("Picture, kernels and generated text").click()
    expect(panel).to_contain_text("Eager torch was fastest")
    expect(panel.get_by_role("img", name="Picture of matmul")).to_be_visible()
    assert panel.locator(".picture script").count() == 0
    assert panel.locator(".picture rect").get_attribute("onclick") is None
    expect(panel.locator(".candidates")).to_contain_text("wrong answer")
    expect(panel).to_contain_text("Not timed: c")
    # The browser itself says that it would not have run them either.
    assert all("Content Security Policy" in line for line in tab.errors), tab.errors
    tab.errors.clear()
    answer["graphs"] = []
    tab.page.locator("#tab-devices").click()
    tab.page.locator("#tab-graphs").click()
    expect(panel).to_contain_text("Nothing has been tuned yet")
    expect(panel.get_by_role("button", name=re.compile("superoptimize"))).to_be_visible()


@pytest.mark.long
def test_the_command_that_fills_graphs(run_python: Callable[..., Any], shared_libraries: Path) -> None:
    """What the empty panel offers, as it is printed there (with a search of one schedule, which takes less)."""
    script = (ROOT / "src/anytorch/serve/web/panels/graphs.js").read_text()
    (command,) = re.findall(r'^const SEARCH = "python -c (.*)";$', script, re.M)
    code = json.loads(f'"{command}"').strip('"')
    few = "from anytorch.graph import search; search.QUICK = search.FEW = search.MANY = 1\n"
    listed = "\nfrom anytorch.serve import graphs\nassert graphs.graphs()\n"
    run_python(few + code + listed, env={"ANYTORCH_CACHE_DIR": str(shared_libraries), "ANYTORCH_MEASURE_S": "0.2"})


def test_a_reload_keeps_what_was_typed(visit: Open, tmp_path: Path) -> None:
    tab = visit()
    panel = tab.open("embeddings")
    panel.get_by_label("Texts, one on each line").fill("one\ntwo\nthree")
    panel = tab.open("forecast")
    panel.get_by_label("Bars ahead").fill("7")
    days = [f"2024-01-{day:02},{day * 3 % 7}" for day in range(1, 20)]
    (tmp_path / "sales.csv").write_text("\n".join(["date,sales", *days, ""]))
    panel.locator("input[type=file]").set_input_files(tmp_path / "sales.csv")
    expect(panel.locator(".chosen")).to_contain_text("sales.csv: 19 rows")
    tab.page.reload()
    expect(panel.get_by_label("Bars ahead")).to_have_value("7")
    expect(panel.locator(".chosen")).to_contain_text("sales.csv: 19 rows")
    panel.get_by_label("Paths").fill("2")
    panel.get_by_role("button", name="Forecast", exact=True).click()  # a series of single values
    panel.get_by_text("How the file was read").click()
    expect(panel).to_contain_text("one column of values, 'sales'")
    tab.open("embeddings")
    expect(tab.page.get_by_label("Texts, one on each line")).to_have_value("one\ntwo\nthree")


def test_a_reload_follows_the_running_benchmark(visit: Open, ask: Callable[[str], bytes]) -> None:
    tab = visit()
    panel = tab.open("benchmark")
    expect(panel.get_by_role("checkbox").first).to_be_checked()  # the devices are there
    panel.get_by_label("Length").select_option("60")
    panel.get_by_role("button", name="Run the benchmark").click()
    expect(panel.get_by_role("progressbar")).to_be_visible()
    while not json.loads(ask("v1/benchmark/running"))["seconds"]:  # the page shows the bar before the service is asked
        tab.page.wait_for_timeout(100)
    tab.page.reload()
    expect(panel.get_by_role("progressbar")).to_be_visible()
    expect(panel.get_by_label("Length")).to_have_value("60")
    panel.get_by_role("button", name="Stop").click()
    expect(panel.get_by_role("button", name="Run the benchmark")).to_be_enabled()


@pytest.mark.parametrize(("chat", "kind"), [(False, "Continue the text"), (True, "Answer"), (None, "Answer")])
def test_generate_begins_with_what_the_model_is_made_for(visit: Open, chat: bool | None, kind: str) -> None:
    model = {"id": "m", "job": "text", "device": "cpu", "loaded": True, "default": True, "chat": chat}
    tab = visit()
    tab.page.route("**/api/models", lambda route: route.fulfill(json={"models": [model]}))
    panel = tab.open("generate")
    expect(panel.get_by_role("radio", name=kind)).to_be_checked()
    other = panel.get_by_text("Answer" if kind != "Answer" else "Continue the text")
    other.click()
    tab.page.reload()
    expect(panel.get_by_role("radio", name=kind)).not_to_be_checked()  # what was chosen is kept
