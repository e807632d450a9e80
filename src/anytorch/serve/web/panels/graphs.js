// Graphs: what has been tuned on this machine so far. Every choice was measured; the candidates that lost are shown too.

import { get } from "../app/api.js";
import { el, setStyle } from "../app/dom.js";
import { selectField } from "../app/fields.js";
import { duration, number, plural, when } from "../app/format.js";
import { command, emptyState, heading, problemBox, skeleton } from "../app/notices.js";
import { safePicture } from "../charts/safe-picture.js";
import { ordered, summaryOf } from "../charts/tuned.js";

export function graphsPanel(section) {
  const body = el("div", { class: "stack" }, skeleton(4, "cards"));
  section.append(heading("Graphs", "Kernels and layouts chosen by measurement on this machine, with every candidate tried."), body);
  const load = async () => {
    try {
      const { graphs } = await get("v1/graphs");
      body.replaceChildren(...(graphs.length ? pageOf(graphs) : [nothing()]));
    } catch (error) {
      body.replaceChildren(problemBox(error));
    }
  };
  return { show: load };
}

function nothing() {
  return emptyState(
    "graphs",
    "Nothing has been tuned yet",
    el("p", { text: "The first use of a tuned kernel measures its candidates and keeps the fastest correct one. To do that now:" }),
    command("anytorch optimize"),
  );
}

function pageOf(graphs) {
  const list = el("div", { class: "graph-grid" });
  const kinds = [...new Set(graphs.map((graph) => graph.kind))].sort();
  const devices = [...new Set(graphs.map((graph) => graph.device))].sort();
  const kind = selectField("Kind", [["", "All kinds"], ...kinds.map((name) => [name, name])]);
  const device = selectField("Device", [["", "All devices"], ...devices.map((name) => [name, name])]);
  const draw = () => {
    const shown = graphs.filter((graph) => (!kind.value() || graph.kind === kind.value()) && (!device.value() || graph.device === device.value()));
    list.replaceChildren(...(shown.length ? shown.map(graphCard) : [el("p", { class: "soft", text: "None of this kind on this device." })]));
  };
  kind.input.addEventListener("change", draw);
  device.input.addEventListener("change", draw);
  draw();
  const { median, best, tried } = summaryOf(graphs);
  const items = [
    ["choices", String(graphs.length)],
    ["candidates tried", String(tried)],
    ["median speed-up", median ? `${number(median)}×` : "–"],
    ["best speed-up", best ? `${number(best)}×` : "–"],
  ];
  return [
    el("dl", { class: "figures" }, items.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value })))),
    kinds.length > 1 || devices.length > 1 ? el("div", { class: "fields filters" }, kind.element, device.element) : null,
    list,
  ].filter(Boolean);
}

function graphCard(graph) {
  const picture = graph.picture_svg ? safePicture(graph.picture_svg, graph.title) : null;
  return el(
    "article",
    { class: "card graph" },
    el(
      "header",
      { class: "device-head" },
      el("div", {}, el("h2", { text: graph.title }), el("p", { class: "soft small" }, [graph.kind, graph.device, graph.when ? when(graph.when) : null].filter(Boolean).join(" · "))),
      graph.speedup ? el("span", { class: "badge good", text: `${number(graph.speedup)}×` }) : null,
    ),
    picture ? el("div", { class: "picture" }, picture) : null,
    candidateTable(graph),
  );
}

/** The timed ones (and whichever was chosen) as bars; those that were refused or never timed as one line of names. */
function candidateTable({ candidates, title }) {
  const { rows, slowest, refused, untimed } = ordered(candidates);
  return [
    el(
      "table",
      { class: "candidates" },
      el("caption", { class: "unseen", text: `${plural(candidates.length, "candidate")} for ${title}` }),
      el("thead", { class: "unseen" }, el("tr", {}, ["Candidate", "Time as a bar", "Time"].map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, rows.map((candidate) => candidateRow(candidate, slowest))),
    ),
    refused.length ? el("p", { class: "soft small", text: `Refused, not exact enough: ${refused.join(", ")}` }) : null,
    untimed.length ? el("p", { class: "soft small", text: `Not timed: ${untimed.join(", ")}` }) : null,
  ];
}

function candidateRow({ name, seconds, chosen, correct }, slowest) {
  const timed = Number.isFinite(seconds);
  const fill = el("span", { class: "rate-fill" });
  const width = timed ? `${Math.max(1, (seconds / slowest) * 100)}%` : "0%";
  setStyle(fill, { width, "--bar": chosen ? "var(--accent)" : "var(--line-strong)" });
  const badge = chosen ? ["good", "chosen"] : correct ? null : ["bad", "wrong answer"];
  return el(
    "tr",
    { class: chosen ? "chosen-row" : "" },
    el("th", { scope: "row" }, name, badge ? el("span", { class: `badge ${badge[0]}`, text: badge[1] }) : null),
    el("td", { class: "bar-cell" }, timed ? el("span", { class: "rate-track" }, fill) : null),
    el("td", { class: "amount", text: timed ? duration(seconds) : "" }),
  );
}
