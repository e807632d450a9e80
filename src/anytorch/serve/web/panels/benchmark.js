// Benchmark: run it, watch it, see each rate beside the device's limit, and lay earlier runs next to it.

import { Problem, get, remove, stream, streamAgain } from "../app/api.js";
import { announce, el, icon, setStyle } from "../app/dom.js";
import { checkbox, selectField } from "../app/fields.js";
import { duration, plural, when } from "../app/format.js";
import { emptyState, heading, problemBox, skeleton, warningBox } from "../app/notices.js";
import { rateTable } from "../charts/rate-bars.js";
import { seriesOf } from "../charts/rate-series.js";

const LENGTHS = [
  ["2", "Quick, 2 s each"],
  ["10", "Normal, 10 s each"],
  ["60", "Thorough, 1 min each"],
];

const KEEP_S = 20; // how long a benchmark goes on without a page that follows it: a reload takes a second or two

export function benchmarkPanel(section) {
  const start = el("button", { class: "button", type: "button" }, icon("play"), "Run the benchmark");
  const stop = el("button", { class: "button plain", type: "button", hidden: true }, icon("stop"), "Stop");
  const length = selectField("Length", LENGTHS, { value: "10", keepAs: "benchmark-length" });
  const deviceChoice = el("fieldset", { class: "checks" }, el("legend", { text: "Devices" }), skeleton(1));
  const progress = progressBar();
  const problems = el("div");
  const runChoice = el("fieldset", { class: "checks runs", hidden: true }, el("legend", { text: "Compare runs" }));
  const results = el("div", { class: "stack" }, skeleton(5));

  section.append(
    heading("Benchmark", "Measured rates of each device beside its limits. Every result is checked before it is timed."),
    el("div", { class: "card controls" }, deviceChoice, length.element, el("div", { class: "actions" }, start, stop), progress.element),
    problems,
    runChoice,
    results,
  );

  let runs = [];
  let chosen = new Set();
  let live = null;
  let aborter = null;

  const draw = () => {
    const all = live ? [live, ...runs] : runs;
    const shown = all.filter((run) => run === live || chosen.has(run.run_id));
    drawRunChoice(runChoice, runs, chosen, live, draw);
    if (!all.length) {
      results.replaceChildren(
        emptyState("benchmark", "Nothing has been measured yet", el("p", { text: "A quick run takes a few seconds for each device. Runs are stored, so that you can compare them." })),
      );
      return;
    }
    results.replaceChildren(
      shown.length ? rateTable(seriesOf(shown)) : el("p", { class: "soft", text: "Tick a run to see it." }),
      ...shown.flatMap((run) => (run.problems ?? []).map((text) => warningBox(el("p", { text })))),
    );
  };

  const loadRuns = async () => {
    ({ runs } = await get("v1/benchmark/runs"));
    runs.sort((a, b) => b.when.localeCompare(a.when));
  };

  const boxes = new Map();
  const prepare = async () => {
    try {
      const { devices } = await get("v1/devices");
      const usable = devices.filter((device) => device.usable);
      deviceChoice.replaceChildren(el("legend", { text: "Devices" }));
      for (const device of usable) {
        // A software renderer is the CPU, only slower: not measured unless someone asks.
        const box = checkbox(`${device.title} (${device.id})`, { checked: device.best || usable.length === 1 });
        boxes.set(device.id, box.input);
        deviceChoice.append(box.element);
      }
      await loadRuns();
      if (runs.length) chosen.add(runs[0].run_id);
      draw();
    } catch (error) {
      results.replaceChildren(problemBox(error));
    }
  };

  /** A benchmark that was running when the page was loaded again goes on: look for one, and show it. */
  const resume = async () => {
    try {
      const { seconds } = await get("v1/benchmark/running");
      if (seconds && !live) await follow(seconds, (signal) => streamAgain("v1/benchmark/running/events", { signal }));
    } catch (error) {
      problems.replaceChildren(problemBox(error));
    }
  };

  const run = async () => {
    const devices = [...boxes].filter(([, box]) => box.checked).map(([id]) => id);
    problems.replaceChildren();
    if (!devices.length) {
      problems.replaceChildren(warningBox(el("p", { text: "Tick at least one device." })));
      return;
    }
    await follow(Number(length.value()), (signal) =>
      stream("v1/benchmark", { devices, seconds: Number(length.value()), keep_s: KEEP_S }, { signal }),
    );
  };

  /** Show a run, one that is started now or one that a reload has left: its events come from the beginning. */
  const follow = async (seconds, open) => {
    aborter = new AbortController();
    live = { run_id: "live", when: new Date().toISOString(), seconds, rows: [], problems: [] };
    start.disabled = true;
    stop.hidden = false;
    stop.focus();
    progress.show(0, "Starting…");
    announce("The benchmark has started");
    draw();
    let ended = "";
    try {
      for await (const { event, data } of open(aborter.signal)) {
        const value = JSON.parse(data);
        if (event === "progress") progress.show(value.fraction, value.message || `${value.device}: ${value.test}`);
        else if (event === "result") {
          live.rows.push(value);
          draw();
        } else if (event === "problem") {
          live.problems.push([value.device, value.test, value.message].filter(Boolean).join(": "));
          draw();
        } else if (event === "done") ended = value.run_id;
        else if (event === "failed") throw new Problem({ title: "The benchmark failed", detail: value.message });
      }
    } catch (error) {
      if (error.name !== "AbortError") problems.replaceChildren(problemBox(error));
    }
    start.disabled = false;
    if (document.activeElement === stop || document.activeElement === document.body) start.focus();
    stop.hidden = true;
    progress.hide();
    await finish(ended);
  };

  const finish = async (runId) => {
    const measured = live.rows.length;
    try {
      await loadRuns();
    } catch (error) {
      problems.append(problemBox(error));
    }
    if (runs.some((earlier) => earlier.run_id === runId)) {
      chosen = new Set([runId, ...[...chosen].slice(0, 1)]);
      live = null;
    } else if (!measured) live = null;
    announce(`The benchmark has ended: ${plural(measured, "result")}`);
    draw();
  };

  start.addEventListener("click", run);
  stop.addEventListener("click", async () => {
    aborter?.abort();
    await remove("v1/benchmark/running").catch(() => {}); // it may have ended by itself
  });
  prepare().then(resume);
}

function drawRunChoice(place, runs, chosen, live, redraw) {
  place.hidden = runs.length < 2 && !(live && runs.length);
  place.replaceChildren(
    el("legend", { text: "Compare runs" }),
    ...runs.slice(0, 8).map((run) => {
      const devices = [...new Set(run.rows.map((row) => row.device))].join(", ");
      const words = `${when(run.when)}, ${devices || "nothing"}, ${duration(run.seconds)} each${run.partial ? ", stopped early" : ""}`;
      return checkbox(words, {
        checked: chosen.has(run.run_id),
        onChange(on) {
          if (on) chosen.add(run.run_id);
          else chosen.delete(run.run_id);
          redraw();
        },
      }).element;
    }),
  );
}

function progressBar() {
  const fill = el("span", { class: "meter-fill" });
  const meter = el("div", { class: "meter", role: "progressbar", "aria-label": "Benchmark", "aria-valuemin": "0", "aria-valuemax": "100" }, fill);
  const words = el("p", { class: "soft small" });
  const element = el("div", { class: "progress", hidden: true }, meter, words);
  return {
    element,
    show(share, text) {
      element.hidden = false;
      const percent = Math.round(Math.max(0, Math.min(1, share)) * 100);
      meter.setAttribute("aria-valuenow", String(percent));
      setStyle(fill, { width: `${percent}%` });
      words.textContent = text;
    },
    hide() {
      element.hidden = true;
    },
  };
}
