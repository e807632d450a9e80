// Rates as bars inside a real table: whoever cannot see the bars reads the same numbers in the same cells.

import { el, setStyle } from "../app/dom.js";
import { number, percent } from "../app/format.js";

export function rateTable({ series, groups }) {
  const several = series.length > 1;
  return el(
    "div",
    { class: "card rates" },
    several ? legend(series) : null,
    groups.map((group) => groupTable(group, several)),
  );
}

function legend(series) {
  return el(
    "ul",
    { class: "legend" },
    series.map(({ label, colour, strength }) => el("li", {}, swatch(colour, strength), label)),
  );
}

export function swatch(colour, strength = 1) {
  return el("i", { class: "swatch", style: { "background-color": `var(${colour})`, opacity: String(strength) }, "aria-hidden": "true" });
}

function groupTable(group, several) {
  const limited = group.tests.some((test) => test.bars.some((bar) => Number.isFinite(bar.share)));
  return el(
    "table",
    { class: "rate-table" },
    el("caption", {}, el("span", { text: group.kind }), el("small", { text: `${group.unit}${group.lowerIsBetter ? ", less is better" : ""}` })),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col", text: "Test" }),
        el("th", { scope: "col", class: "bar-cell" }, limited ? axis() : el("span", { class: "unseen", text: "Bar" })),
        el("th", { scope: "col", class: "amount", text: group.unit }),
        el("th", { scope: "col", class: "amount", text: limited ? "of limit" : "" }),
      ),
    ),
    el("tbody", {}, group.tests.map((test) => test.bars.map((bar, at) => rateRow(test, bar, at, several, limited)))),
  );
}

function axis() {
  const marks = ["0", "25", "50", "75", "100 %"].map((text, at) => el("span", { text, style: { "--quarter": String(at) } }));
  return [el("span", { class: "unseen", text: "Share of the limit" }), el("span", { class: "bar-axis", "aria-hidden": "true" }, marks)];
}

function rateRow(test, bar, at, several, limited) {
  const fill = el("span", { class: `rate-fill${Number.isFinite(bar.share) ? "" : " no-limit"}` });
  setStyle(fill, { width: `${(bar.length ?? 0) * 100}%`, "--bar": `var(${bar.series.colour})`, opacity: String(bar.series.strength) });
  const title = bar.limit ? `${number(bar.rate)} of ${number(bar.limit)} ${bar.unit} (${bar.series.label})` : `${number(bar.rate)} ${bar.unit} (${bar.series.label})`;
  return el(
    "tr",
    { class: at ? "more" : "first", title },
    at ? null : el("th", { scope: "rowgroup", rowspan: test.bars.length, text: test.name }),
    el(
      "td",
      { class: `bar-cell${limited ? " ruled" : ""}` },
      several ? el("span", { class: "unseen", text: bar.series.label }) : null,
      bar.length === null ? null : el("span", { class: "rate-track" }, fill),
    ),
    el("td", { class: "amount", text: number(bar.rate) }),
    el("td", { class: "amount soft", text: Number.isFinite(bar.share) ? percent(bar.share) : "" }),
  );
}
