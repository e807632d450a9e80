// The candidates of one choice: those with a time as bars, and below them why the others have none.

import { el, setStyle } from "../app/dom.js";
import { duration, plural } from "../app/format.js";
import { ordered } from "./tuned.js";

/** The timed ones (and whichever was chosen) as rows; those that were refused or never timed as lines with the reasons. */
export function candidateTable({ candidates, title }) {
  const { rows, slowest, refused, untimed } = ordered(candidates);
  return [
    el(
      "table",
      { class: "candidates" },
      el("caption", { class: "unseen", text: `${plural(candidates.length, "candidate")} for ${title}` }),
      el("thead", { class: "unseen" }, el("tr", {}, ["Candidate", "Time as a bar", "Time"].map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, rows.map((candidate) => candidateRow(candidate, slowest))),
    ),
    reasons("Refused, not exact enough", refused),
    reasons("Not timed", untimed),
  ];
}

function reasons(lead, groups) {
  if (!groups.length) return null;
  const words = groups.map(({ names, reason }) => names.join(", ") + (reason ? ` (${reason})` : ""));
  return el("p", { class: "soft small reasons", text: `${lead}: ${words.join("; ")}` });
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
