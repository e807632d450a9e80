// Graphs: what has been tuned on this machine so far. Every choice was measured; the candidates that lost are shown too.

import { get } from "../app/api.js";
import { el } from "../app/dom.js";
import { selectField } from "../app/fields.js";
import { number, when } from "../app/format.js";
import { command, emptyState, heading, problemBox, prose, skeleton } from "../app/notices.js";
import { candidateTable } from "../charts/candidate-table.js";
import { sorted, summaryOf } from "../charts/tuned.js";
import { kernelGraphCard } from "./kernel-graph.js";

// A normalised product, as in every transformer. Runs as it stands in a shell, and in PowerShell.
const SEARCH = "python -c \"import torch, anytorch; model = torch.nn.Sequential(torch.nn.LayerNorm(256), torch.nn.Linear(256, 256)); x = torch.randn(8, 256); anytorch.graph.trace(model, x).superoptimize(x)\"";

export function graphsPanel(section) {
  const body = el("div", { class: "stack" }, skeleton(4, "cards"));
  section.append(heading("Graphs", "Kernel graphs, kernels and layouts chosen by measurement on this machine, with every candidate tried."), body);
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
    prose("`superoptimize()` searches a kernel graph, and it is shown here with every candidate. The first use of a tuned kernel measures its candidates, too. To search a small graph now, in about half a minute:"),
    command(SEARCH),
  );
}

function pageOf(graphs) {
  const lists = el("div", { class: "stack" });
  const kinds = [...new Set(graphs.map((graph) => graph.kind))].sort();
  const devices = [...new Set(graphs.map((graph) => graph.device))].sort();
  const kind = selectField("Kind", [["", "All kinds"], ...kinds.map((name) => [name, name])]);
  const device = selectField("Device", [["", "All devices"], ...devices.map((name) => [name, name])]);
  const draw = () => {
    const shown = graphs.filter((graph) => (!kind.value() || graph.kind === kind.value()) && (!device.value() || graph.device === device.value()));
    const { searched, others } = sorted(shown);
    const parts = [list("Kernel graphs", searched, kernelGraphCard), list("Other choices", others, choiceCard)].filter(Boolean);
    lists.replaceChildren(...(parts.length ? parts : [el("p", { class: "soft", text: "None of this kind on this device." })]));
  };
  kind.input.addEventListener("change", draw);
  device.input.addEventListener("change", draw);
  draw();
  return [
    el("dl", { class: "figures" }, figures(graphs).map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value })))),
    kinds.length > 1 || devices.length > 1 ? el("div", { class: "fields filters" }, kind.element, device.element) : null,
    lists,
  ].filter(Boolean);
}

function list(title, graphs, card) {
  if (!graphs.length) return null;
  return el("section", { class: "stack" }, el("h2", { text: title }), el("div", { class: "graph-grid" }, graphs.map(card)));
}

/** The gains of kernel graphs are over eager torch, those of other choices over the slowest candidate: not to be mixed. */
function figures(graphs) {
  const { searched, others } = sorted(graphs);
  const times = (value) => (value ? `${number(value)}×` : "–");
  const all = summaryOf(graphs);
  const items = [["candidates tried", String(all.tried)]];
  if (others.length) {
    const { median, best } = summaryOf(others);
    items.unshift(["choices", String(others.length)]);
    items.push(["median speed-up", times(median)], ["best speed-up", times(best)]);
  }
  if (searched.length) {
    items.unshift(["kernel graphs", String(searched.length)]);
    items.push(["median over eager torch", times(summaryOf(searched).median)]);
  }
  return items;
}

function choiceCard(graph) {
  return el(
    "article",
    { class: "card graph" },
    el(
      "header",
      { class: "device-head" },
      el("div", {}, el("h3", { text: graph.title }), el("p", { class: "soft small" }, [graph.kind, graph.device, graph.when ? when(graph.when) : null].filter(Boolean).join(" · "))),
      graph.speedup ? el("span", { class: "badge good", text: `${number(graph.speedup)}×` }) : null,
    ),
    candidateTable(graph),
  );
}
