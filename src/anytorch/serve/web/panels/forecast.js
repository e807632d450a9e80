// Forecast: a file of candles or the sample goes in; history, the median and the fan of likely closes come out.

import { post } from "../app/api.js";
import { busyWith } from "../app/busy.js";
import { forecastRows, lookAtCandles, writeCsv } from "../app/csv.js";
import { announce, el, icon } from "../app/dom.js";
import { checkbox, numberField, segments } from "../app/fields.js";
import { dropZone, save } from "../app/files.js";
import { duration, grouped, number, plural } from "../app/format.js";
import { keep, kept } from "../app/kept.js";
import { modelPicker } from "../app/model-picker.js";
import { emptyState, heading, tableAlternative, warningBox } from "../app/notices.js";
import { bandsOf } from "../charts/candles.js";
import { candleView } from "../charts/candle-view.js";
import { swatch } from "../charts/rate-bars.js";

const QUANTILES = [0.05, 0.25, 0.5, 0.75, 0.95];
const SPANS = [
  ["60", "60 bars"],
  ["120", "120 bars"],
  ["all", "All"],
];

export function forecastPanel(section) {
  let source = { sample: true };
  let sourceName = "sample";
  const horizon = numberField("Bars ahead", { value: 24, min: 1, max: 1000, keepAs: "forecast-horizon" });
  const samples = numberField("Paths", { value: 20, min: 1, max: 200, keepAs: "forecast-samples", hint: "more paths, smoother fan" });
  const seed = numberField("Seed", { value: 1, min: 0, keepAs: "forecast-seed", hint: "same seed, same forecast" });
  const temperature = numberField("Temperature", { value: 1, min: 0.1, max: 10, step: 0.1, keepAs: "forecast-temperature", hint: "above 1 wilder, below tamer" });
  const topP = numberField("Top p", { value: 1, min: 0.05, max: 1, step: 0.05, keepAs: "forecast-top-p", hint: "below 1 rare moves are cut" });
  const start = el("button", { class: "button", type: "submit" }, icon("forecast"), "Forecast");
  const useSample = el("button", { class: "button plain", type: "button", text: "Use the sample" });
  const chosen = el("p", { class: "chosen", role: "status" });
  const problems = el("div");
  const results = el("div", { class: "stack" });
  const picker = modelPicker("forecast");

  const choose = (next, name, words) => {
    source = next;
    sourceName = name;
    chosen.replaceChildren(icon("done"), words);
  };
  const takeFile = async (file) => takeText(file.name, await file.text());
  const takeText = (fileName, text) => {
    const look = lookAtCandles(text);
    const span = look.from ? `, ${look.from} to ${look.to}` : "";
    choose({ csv: text }, fileName.replace(/\.[^.]*$/, ""), `${fileName}: ${plural(look.rows, "row")}${span}`);
    keep("forecast-file", JSON.stringify([fileName, text]));
    if (look.candles && look.rows > 1) showHistory(results, look.candles);
    else results.replaceChildren();
  };
  useSample.addEventListener("click", () => {
    choose({ sample: true }, "sample", "The sample: synthetic candles");
    keep("forecast-file", null);
    form.requestSubmit();
  });

  const form = el(
    "form",
    { class: "card" },
    el("div", { class: "sources" }, dropZone("or drop it here: a CSV with time, open, high, low, close, or with one column of values", ".csv,.tsv,.txt", takeFile), useSample),
    chosen,
    el("div", { class: "fields" }, horizon.element, samples.element, seed.element, temperature.element, topP.element),
    el("div", { class: "actions" }, start, picker.element),
  );
  choose({ sample: true }, "sample", "The sample: synthetic candles");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = {
      ...source,
      horizon: horizon.value() ?? undefined,
      samples: samples.value() ?? undefined,
      seed: seed.value() ?? undefined,
      temperature: temperature.value() ?? undefined,
      top_p: topP.value() ?? undefined,
      quantiles: QUANTILES,
      return_samples: true,
      model: picker.model(),
    };
    const answer = await busyWith(start, problems, (signal) => post("v1/forecast", body, { signal }));
    if (!answer) return;
    results.replaceChildren(...views(answer, sourceName));
    picker.refresh(); // the first request may have loaded the model
    announce(`Forecast of ${plural(answer.forecast.close.length, "bar")} on ${answer.device} in ${duration(answer.seconds)}`);
  });

  results.append(
    emptyState("forecast", "Nothing forecast yet", el("p", { text: "Drop a file of candles or of single values, or use the sample and press Forecast. The file is sent to this service only." })),
  );
  const before = kept("forecast-file");
  if (before) takeText(...JSON.parse(before));
  section.append(heading("Forecast", "Forecast the next candles: not one line, but a range of likely paths."), form, problems, results);
}

/** The file as it was read, before anything is sent. */
function showHistory(results, history) {
  const view = candleView({ history }, () => ({ shown: 120 }));
  results.replaceChildren(el("section", { class: "card" }, el("h2", { text: "The history, as read" }), view.element));
}

function views(answer, name) {
  const first = innerWidth < 640 ? "60" : "120"; // a phone has no room for more candles than that
  const options = { shown: Number(first), paths: false };
  const view = candleView(answer, () => options);
  const span = segments("History shown", SPANS, first, (key) => {
    options.shown = key === "all" ? Infinity : Number(key);
    view.redraw();
  });
  const paths = checkbox("Every path", {
    onChange(on) {
      options.paths = on;
      view.redraw();
    },
  });
  const saveButton = (text, make) => el("button", { class: "button plain small", type: "button", on: { click: make } }, icon("save"), text);
  const table = forecastRows(answer);
  return [
    answer.device_warning ? warningBox(el("p", { text: answer.device_warning })) : null,
    ...(answer.warnings ?? []).map((text) => warningBox(el("p", { text }))),
    el(
      "section",
      { class: "card" },
      el("div", { class: "chart-head" }, el("h2", { text: answer.name || name }), span),
      view.element,
      legend(answer),
      el(
        "div",
        { class: "chart-foot" },
        answer.samples ? paths.element : null,
        el(
          "div",
          { class: "actions" },
          saveButton("CSV", () => save(`${name}-forecast.csv`, new Blob([writeCsv(table)], { type: "text/csv" }))),
          saveButton("PNG", async () => save(`${name}-forecast.png`, await view.png())),
        ),
      ),
      tableAlternative("Show as a table", {
        caption: "The forecast: mean of the paths, and quantiles of the close",
        columns: table[0],
        rows: table.slice(1).map((row) => row.map((value) => (typeof value === "number" ? number(value, 6) : value))),
      }),
    ),
    figures(answer),
    answer.guessed.length
      ? el("details", { class: "card" }, el("summary", { text: "How the file was read" }), el("ul", {}, answer.guessed.map((text) => el("li", { text }))))
      : null,
  ].filter(Boolean);
}

function legend({ quantiles }) {
  const bands = bandsOf(quantiles).map(([low, high], at) =>
    el("li", {}, el("i", { class: "swatch band", style: { opacity: String(0.3 + 0.28 * at) } }), `${Math.round((high - low) * 100)} % of the paths`),
  );
  return el(
    "ul",
    { class: "legend", "aria-label": "Legend" },
    el("li", {}, el("i", { class: "swatch hollow" }), "Rose"),
    el("li", {}, swatch("--down"), "Fell"),
    el("li", {}, el("i", { class: "swatch stroke" }), "Median close"),
    bands,
  );
}

function figures(answer) {
  const bars = answer.forecast.close.length;
  const paths = answer.samples?.length ?? null;
  const items = [
    ["device", answer.device],
    ["model", answer.model],
    ["bars of history", grouped(answer.history.close.length)],
    [paths ? "bars ahead × paths" : "bars ahead", paths ? `${grouped(bars)} × ${paths}` : grouped(bars)],
    ["computing", duration(answer.seconds)],
  ];
  return el("dl", { class: "figures" }, items.map(([label, value]) => el("div", {}, el("dt", { text: label }), el("dd", { text: value }))));
}
