// A searched kernel graph: what was chosen and what it gained; opened, its picture, kernels and their generated text.

import { get } from "../app/api.js";
import { el } from "../app/dom.js";
import { bytes, duration, number, plural, when } from "../app/format.js";
import { command, problemBox, skeleton } from "../app/notices.js";
import { candidateTable } from "../charts/candidate-table.js";
import { safePicture } from "../charts/safe-picture.js";
import { stepWords } from "../charts/tuned.js";

const LANGUAGES = { cpp: "C++", triton: "Triton" };

export function kernelGraphCard(graph) {
  const sizes = Object.entries(graph.sizes ?? {}).map(([name, size]) => `${name} = ${size}`);
  const made = graph.kernels ? plural(graph.kernels, "kernel") : "eager torch";
  const facts = [graph.device, ...sizes, made, graph.when ? when(graph.when) : null];
  const card = el(
    "article",
    { class: "card graph kernel-graph" },
    el(
      "header",
      { class: "device-head" },
      el("div", {}, el("h3", { text: graph.title }), el("p", { class: "soft small", text: facts.filter(Boolean).join(" · ") })),
      graph.speedup > 1 ? el("span", { class: "badge good", title: "over eager torch", text: `${number(graph.speedup)}×` }) : null,
    ),
    candidateTable(graph),
  );
  const body = el("div", { class: "stack" });
  const more = el("details", { class: "explanation" }, el("summary", { text: "Picture, kernels and generated text" }), body);
  more.addEventListener("toggle", () => {
    card.classList.toggle("wide", more.open);
    if (more.open && !body.childElementCount) load(graph, body);
  });
  card.append(more);
  return card;
}

async function load(graph, body) {
  body.replaceChildren(skeleton(4));
  try {
    body.replaceChildren(...parts(await get(`v1/graphs/${graph.id}`)).filter(Boolean));
  } catch (error) {
    body.replaceChildren(problemBox(error));
  }
}

function parts(graph) {
  const picture = graph.picture_svg ? safePicture(graph.picture_svg, graph.title) : null;
  const least = Number.isFinite(graph.least_nbytes) ? ` Any program moves at least ${bytes(graph.least_nbytes)}.` : "";
  return [
    el("p", { class: "soft small", text: `Why: ${graph.why}.${least}` }),
    picture ? el("div", { class: "picture paper", tabindex: "0", role: "region", "aria-label": `Picture of ${graph.title}` }, picture) : null,
    graph.steps.length ? stepTable(graph) : el("p", { text: "Eager torch was fastest: the graph runs op by op, and no kernel is used." }),
    ...graph.steps.map(generated),
    schedules(graph.kernel_choices),
    command(`anytorch graph show ${graph.id.slice(0, 12)} --kernels`),
  ];
}

function stepTable({ steps, title }) {
  const columns = ["Step", "What", "Moves", "Time"];
  const rows = steps.map((step, at) => [String(at), stepWords(step), step.nbytes ? bytes(step.nbytes) : "", step.seconds ? duration(step.seconds) : ""]);
  return el(
    "div",
    { class: "table-scroll steps", tabindex: "0", role: "region", "aria-label": `Steps of ${title}` },
    el(
      "table",
      {},
      el("caption", { text: "The chosen program" }),
      el("thead", {}, el("tr", {}, columns.map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text, at) => (at ? el("td", { text }) : el("th", { scope: "row", text })))))),
    ),
  );
}

function generated(step, at) {
  if (!step.text) return null;
  const name = `Generated ${LANGUAGES[step.language] ?? "text"} of step ${at}`;
  const text = el("pre", { class: "generated", tabindex: "0", role: "region", "aria-label": name }, el("code", { text: step.text }));
  return el("details", { class: "explanation" }, el("summary", { text: name }), text);
}

/** The schedules that were measured for single kernels, of this program and of those that lost. */
function schedules(choices) {
  if (!choices.length) return null;
  const count = choices.reduce((sum, choice) => sum + choice.candidates.length, 0);
  const tables = choices.map((choice) => [el("p", { class: "small", text: choice.title }), candidateTable(choice)]);
  return el("details", { class: "explanation" }, el("summary", { text: `${plural(count, "schedule")} tried for ${plural(choices.length, "kernel")}` }), tables);
}
