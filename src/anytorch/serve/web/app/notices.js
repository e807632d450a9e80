// The pieces that every panel shows: headings, problems, empty and loading states, commands to copy, table alternatives.

import { Problem } from "./api.js";
import { announce, el, icon } from "./dom.js";
import { capitalised } from "./format.js";

/** A panel's heading, one sentence about it, and room for what belongs at its right. */
export function heading(title, sentence, ...actions) {
  return el(
    "header",
    { class: "panel-head" },
    el("div", {}, el("h1", { text: title }), el("p", { class: "lead", text: sentence })),
    actions.length ? el("div", { class: "panel-actions" }, actions) : null,
  );
}

/** A command in a box, with a button that copies it. */
export function command(text) {
  const button = el("button", { class: "copy", type: "button", "aria-label": `Copy: ${text}`, title: "Copy" }, icon("copy"));
  button.addEventListener("click", async () => {
    const copied = await copy(text);
    const use = button.querySelector("use");
    button.classList.toggle("copied", copied);
    use.setAttribute("href", `web/icons/sprite.svg#${copied ? "done" : "warning"}`);
    announce(copied ? "Copied" : "Copying is not allowed here; select the text instead");
    setTimeout(() => {
      button.classList.remove("copied");
      use.setAttribute("href", "web/icons/sprite.svg#copy");
    }, 1600);
  });
  return el("div", { class: "command" }, el("code", { text }), button);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // a page over plain http on another machine has no clipboard object
  }
}

function copyBySelection(text) {
  const field = el("textarea", { class: "unseen", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  return copied;
}

// "hint: … run: anytorch serve --x" and `backticked` words are the two ways our own messages name a command.
const COMMAND = /^(?:pip|anytorch|make|sudo|apt|apt-get|export|docker|conda|curl|modprobe|nvidia-smi|python3?)\s/;

/** What a fix is: a command to copy, or a sentence to read. Pure. */
export function isCommand(text) {
  return COMMAND.test(text.trim());
}

export function fixes(texts) {
  return texts.map((text) => (isCommand(text) ? command(text) : prose(capitalised(text), { class: "fix" })));
}

/** A sentence whose `backticked` parts are shown as code. */
export function prose(text, attributes = {}) {
  const parts = text.split(/`([^`]+)`/);
  return el("p", attributes, parts.map((part, at) => (at % 2 ? el("code", { text: part }) : part)));
}

/** The commands that a hint names, to be shown with a copy button. Pure. */
export function commandsIn(hint) {
  const quoted = [...hint.matchAll(/`([^`]+)`/g)].map((match) => match[1]);
  const after = hint.match(/:\s*((?:pip|anytorch|make|sudo)\s[^`]+)$/);
  return [...quoted, ...(after && !quoted.length ? [after[1].trim()] : [])].filter(isCommand);
}

export function problemBox(error) {
  const problem =
    error instanceof Problem ? error : new Problem({ title: "Something on this page went wrong", detail: String(error) });
  if (!(error instanceof Problem)) console.error(error); // a bug of ours: let the console keep the stack
  return el(
    "div",
    { class: "notice bad", role: "alert" },
    icon("warning"),
    el(
      "div",
      {},
      el("p", { class: "notice-title", text: capitalised(problem.title) }),
      problem.detail ? prose(capitalised(problem.detail)) : null,
      problem.hint ? prose(capitalised(problem.hint)) : null,
      problem.hint ? commandsIn(problem.hint).map(command) : null,
    ),
  );
}

export function warningBox(...content) {
  return el("div", { class: "notice warn" }, icon("warning"), el("div", {}, content));
}

export function emptyState(iconName, title, ...content) {
  return el("div", { class: "empty" }, icon(iconName), el("h2", { text: title }), content);
}

/** Grey lines in the shape of what is to come. */
export function skeleton(lines = 3, className = "") {
  return el(
    "div",
    { class: `skeleton ${className}`, "aria-hidden": "true" },
    Array.from({ length: lines }, () => el("span")),
  );
}

/** `{columns: [text], rows: [[text]]}` behind a button: what a chart shows, for those who do not see it. */
export function tableAlternative(summary, { columns, rows, caption }) {
  const body = el("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": caption });
  const details = el("details", { class: "as-table" }, el("summary", { text: summary }), body);
  // Built when opened: a thousand rows cost time that most visits do not need to spend.
  details.addEventListener("toggle", () => {
    if (!details.open || body.childElementCount) return;
    body.append(
      el(
        "table",
        {},
        el("caption", { text: caption }),
        el("thead", {}, el("tr", {}, columns.map((text) => el("th", { scope: "col", text })))),
        el(
          "tbody",
          {},
          rows.map((row) =>
            el("tr", {}, row.map((text, at) => (at ? el("td", { text }) : el("th", { scope: "row", text })))),
          ),
        ),
      ),
    );
  });
  return details;
}
