// Embeddings: texts in; a heat map of how alike they are, a map of them on a plane, and a search over them.

import { post } from "../app/api.js";
import { busyWith } from "../app/busy.js";
import { announce, debounce, el, icon, uniqueId } from "../app/dom.js";
import { acceptDrops, dropZone } from "../app/files.js";
import { duration, grouped, number, plural, shorten } from "../app/format.js";
import { keepField } from "../app/kept.js";
import { modelPicker } from "../app/model-picker.js";
import { heading, problemBox, tableAlternative, warningBox } from "../app/notices.js";
import { textsOf, textsOfFile } from "../app/texts.js";
import { heatMap } from "../charts/heat-map.js";
import { textMap } from "../charts/text-map.js";

// A heat map of more cells than pixels tells nobody anything; the search still covers every text.
const MOST_COMPARED = 200;
const WAIT_MS = 250;

const EXAMPLE = `The driver is too old for this card
My GPU is not found by the framework
Which version of the driver do I need?
The model does not fit into memory
Running out of VRAM when the batch grows
Keep the weights on the disk and read them when needed
The bakery opens at seven in the morning
Fresh bread and coffee around the corner
A recipe for rye bread with walnuts
The price rose sharply after the announcement
Shares fell for the third day in a row
Forecasting tomorrow’s prices from candles`;

export function embeddingsPanel(section) {
  const id = uniqueId("texts");
  const area = el("textarea", { id, rows: "12", spellcheck: "false", "aria-describedby": `${id}-count` });
  area.value = EXAMPLE;
  keepField("embeddings-texts", area);
  const count = el("small", { id: `${id}-count`, class: "soft" });
  const compare = el("button", { class: "button", type: "submit" }, icon("embeddings"), "Compare the texts");
  const picker = modelPicker("embeddings");
  const problems = el("div");
  const results = el("div", { class: "stack" });

  const recount = () => (count.textContent = plural(textsOf(area.value).length, "text"));
  area.addEventListener("input", recount);
  recount();

  const takeFile = async (file) => {
    const texts = textsOfFile(file.name, await file.text());
    area.value = texts.map((text) => text.replace(/\s+/g, " ")).join("\n");
    area.dispatchEvent(new Event("input"));
    announce(`${plural(texts.length, "text")} from ${file.name}`);
  };
  const form = el(
    "form",
    { class: "card texts" },
    el("div", { class: "field" }, el("label", { for: id, text: "Texts, one on each line" }), area, count),
    el("div", { class: "actions" }, compare, dropZone("or drop one here: .txt, .csv, .jsonl", ".txt,.md,.csv,.tsv,.json,.jsonl,.ndjson", takeFile)),
    picker.element,
  );
  acceptDrops(area, takeFile);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const texts = textsOf(area.value);
    if (!texts.length) {
      problems.replaceChildren(warningBox(el("p", { text: "Write or drop some texts first." })));
      area.focus();
      return;
    }
    const compared = texts.slice(0, MOST_COMPARED);
    const began = performance.now();
    const answer = await busyWith(compare, problems, (signal) =>
      post("v1/similarity", { a: compared, map: true, model: picker.model() }, { signal }),
    );
    if (!answer) return;
    results.replaceChildren(...views(texts, compared, answer, (performance.now() - began) / 1000, picker));
    announce(`${plural(compared.length, "text")} compared in ${duration(answer.seconds)}`);
  });

  section.append(heading("Embeddings", "Turn texts into vectors: texts with similar meaning lie close together, whatever words they use."), form, problems, results);
}

function views(texts, compared, answer, whole, picker) {
  const place = (index) => {
    heat.highlight(index);
    map?.highlight(index);
  };
  const heat = heatMap(answer.similarity, compared, (row) => map?.highlight(row));
  const map = answer.map && compared.length > 2 ? textMap(answer.map, answer.similarity, compared, place) : null;
  const cut = texts.length > compared.length;
  return [
    figures(compared, answer, whole),
    cut ? warningBox(el("p", { text: `The pictures show the first ${compared.length} of ${grouped(texts.length)} texts. The search covers all of them.` })) : null,
    searchCard(texts, picker, place, (hits) => map?.found(hits)),
    el(
      "div",
      { class: "two-charts" },
      el(
        "section",
        { class: "card" },
        el("h2", { text: "How alike" }),
        heat.element,
        tableAlternative("Show as a table", similarityTable(compared, answer.similarity)),
      ),
      map
        ? el(
            "section",
            { class: "card" },
            el("h2", { text: "On a plane" }),
            map.element,
            tableAlternative("Show as a table", placeTable(compared, answer.map)),
          )
        : null,
    ),
  ].filter(Boolean);
}

function figures(texts, answer, whole) {
  const rate = texts.length / answer.seconds;
  const items = [
    [plural(texts.length, "text").split(" ")[0], texts.length === 1 ? "text" : "texts"],
    [grouped(answer.usage.total_tokens), "tokens"],
    [duration(answer.seconds), "computing"],
    [duration(whole), "until shown"],
    [number(rate), "texts a second"],
  ];
  return el("dl", { class: "figures" }, items.map(([value, name]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
}

function similarityTable(texts, values) {
  return {
    caption: "Cosine similarity of every pair of texts",
    columns: ["Text", ...texts.map((_, at) => String(at + 1))],
    rows: texts.map((text, at) => [`${at + 1} ${shorten(text, 40)}`, ...values[at].map((value) => value.toFixed(2))]),
  };
}

function placeTable(texts, places) {
  return {
    caption: "Where each text lies on the plane (its two main components)",
    columns: ["Text", "Across", "Up"],
    rows: texts.map((text, at) => [`${at + 1} ${shorten(text, 60)}`, places[at][0].toFixed(3), places[at][1].toFixed(3)]),
  };
}

/** A search that answers while one types; an answer that was overtaken by a newer one is thrown away. */
function searchCard(texts, picker, place, found) {
  const id = uniqueId("search");
  const field = el("input", { id, type: "search", placeholder: "for example: not enough graphics memory", autocomplete: "off" });
  const list = el("ol", { class: "hits" });
  const words = el("p", { class: "soft small", role: "status" });
  const problems = el("div");
  let newest = 0;
  let aborter = null;

  const search = async () => {
    const query = field.value.trim();
    newest += 1;
    const mine = newest;
    aborter?.abort();
    if (!query) {
      list.replaceChildren();
      words.textContent = "";
      found([]);
      return;
    }
    aborter = new AbortController();
    try {
      const body = { queries: [query], corpus: texts, k: Math.min(5, texts.length), model: picker.model() };
      const { results, seconds } = await post("v1/search", body, { signal: aborter.signal });
      if (mine !== newest) return;
      problems.replaceChildren();
      words.textContent = `${plural(texts.length, "text")} searched in ${duration(seconds)}`;
      list.replaceChildren(...results[0].map((hit) => hitRow(hit, place)));
      found(results[0]);
    } catch (error) {
      if (error.name !== "AbortError") problems.replaceChildren(problemBox(error));
    }
  };
  const soon = debounce(WAIT_MS, search);
  field.addEventListener("input", soon);
  const form = el("form", { class: "search", role: "search" }, icon("search"), field);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    search();
  });
  return el("section", { class: "card" }, el("label", { for: id, class: "as-h2", text: "Search by meaning" }), form, problems, words, list);
}

function hitRow({ index, score, text }, place) {
  const row = el(
    "li",
    { class: "hit" },
    el("span", { class: "hit-score", text: score.toFixed(2) }),
    el("span", { class: "hit-bar" }, el("span", { style: { width: `${Math.max(0, score) * 100}%` } })),
    el("span", { class: "hit-text", text: shorten(text, 160) }),
  );
  row.addEventListener("pointerenter", () => place(index));
  row.addEventListener("pointerleave", () => place(null));
  return row;
}
