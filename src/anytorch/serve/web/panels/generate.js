// Generate: text as it comes, how fast it comes, and what share of the memory's bandwidth that speed uses.

import { Problem, stream } from "../app/api.js";
import { announce, el, icon, setStyle, uniqueId } from "../app/dom.js";
import { numberField, segments } from "../app/fields.js";
import { grouped, number, percent, plural } from "../app/format.js";
import { keep, keepField, kept } from "../app/kept.js";
import { modelPicker } from "../app/model-picker.js";
import { command, emptyState, heading, problemBox } from "../app/notices.js";

const EXAMPLE = "What does textwrap.dedent do?";

export function generatePanel(section) {
  const id = uniqueId("prompt");
  const prompt = el("textarea", { id, rows: "4" });
  prompt.value = EXAMPLE;
  keepField("generate-prompt", prompt);
  // Answering needs a model with a chat template: what it is not made for is not offered first.
  let asked = kept("generate-mode");
  let mode = asked ?? "chat";
  const place = el("div");
  const showModes = () => {
    const pick = (key) => {
      mode = asked = key;
      keep("generate-mode", key);
    };
    place.replaceChildren(segments("Kind", [["chat", "Answer"], ["plain", "Continue the text"]], mode, pick));
  };
  showModes();
  const most = numberField("At most", { value: 128, min: 1, max: 4096, keepAs: "generate-most", hint: "tokens" });
  const temperature = numberField("Temperature", { value: 0.7, min: 0, max: 10, step: 0.1, keepAs: "generate-temperature", hint: "0 is always the same" });
  const start = el("button", { class: "button", type: "submit" }, icon("play"), "Generate");
  const stop = el("button", { class: "button plain", type: "button", hidden: true }, icon("stop"), "Stop");
  const problems = el("div");
  const output = outputCard();
  let aborter = null;

  const form = el(
    "form",
    { class: "card" },
    el("div", { class: "field" }, el("div", { class: "prompt-head" }, el("label", { for: id, text: "Prompt" }), place), prompt),
    el("div", { class: "fields" }, most.element, temperature.element),
    el("div", { class: "actions" }, start, stop),
  );
  const body = el("div", { class: "stack" }, form, problems, output.element);
  const empty = el("div", { hidden: true });

  let picker = null;
  picker = modelPicker("text", (models) => {
    const usable = models.some((model) => model.loaded || model.default);
    body.hidden = !usable;
    empty.hidden = usable;
    if (!usable) empty.replaceChildren(noModel(models));
    const used = models.find((model) => model.id === picker?.model()) ?? models.find((model) => model.loaded);
    const fitting = asked ?? (used?.chat === false ? "plain" : "chat");
    if (fitting !== mode) {
      mode = fitting;
      showModes();
    }
  });

  const run = async () => {
    aborter = new AbortController();
    start.disabled = true;
    stop.hidden = false;
    problems.replaceChildren();
    output.begin();
    announce("Writing");
    const request = { model: picker.model(), max_tokens: most.value() ?? 128, temperature: temperature.value() ?? 1, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const [path, more] =
      mode === "chat" ? ["v1/chat/completions", { messages: [{ role: "user", content: prompt.value }] }] : ["v1/completions", { prompt: prompt.value }];
    try {
      for await (const { data } of stream(path, { ...request, ...more }, { signal: aborter.signal })) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error || chunk.title) throw new Problem({ title: chunk.title ?? chunk.error.message, detail: chunk.detail, hint: chunk.hint });
        const choice = chunk.choices?.[0];
        const text = choice?.delta?.content ?? choice?.text ?? "";
        if (text) output.add(text);
        if (chunk.usage) output.usage(chunk.usage);
      }
    } catch (error) {
      if (error.name !== "AbortError") problems.replaceChildren(problemBox(error));
    }
    output.end();
    announce(output.summary());
    start.disabled = false;
    stop.hidden = true;
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  // Enter alone is a line break; with Ctrl or Cmd it sends, as everywhere.
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !start.disabled) form.requestSubmit();
  });
  stop.addEventListener("click", () => aborter?.abort());

  section.append(heading("Generate", "Generate text, and see what share of the memory bandwidth its speed uses."), picker.element, empty, body);
  return { show: () => picker.refresh() };
}

function noModel(models) {
  return emptyState(
    "generate",
    "No text model is loaded",
    el("p", {
      text: models.length
        ? "Choose one above; the service keeps working while it loads."
        : "Start the service with a folder that holds a causal language model (config.json and safetensors):",
    }),
    models.length ? null : command("anytorch serve --text-model path/to/model"),
  );
}

/** The text as it comes and its speed. The text is no live region: reading it out token by token would be unbearable. */
function outputCard() {
  const text = el("div", { class: "written", tabindex: "0", role: "region", "aria-label": "Generated text" });
  const speed = el("dd", { text: "–" });
  const amount = el("dd", { text: "–" });
  const asked = el("dd", { text: "–" });
  const share = el("dd", { text: "–" });
  const fill = el("span", { class: "meter-fill" });
  const meter = el("div", { class: "meter", role: "meter", "aria-label": "Share of bandwidth", "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": "0", hidden: true }, fill);
  const element = el(
    "section",
    { class: "card", hidden: true },
    text,
    el(
      "dl",
      { class: "figures inner" },
      el("div", {}, el("dt", { text: "tokens a second" }), speed),
      el("div", {}, el("dt", { text: "tokens written" }), amount),
      el("div", {}, el("dt", { text: "tokens of the prompt" }), asked),
      el("div", {}, el("dt", { text: "of memory bandwidth" }), share),
    ),
    meter,
  );
  let pieces = 0;
  let told = null;
  return {
    element,
    begin() {
      element.hidden = false;
      text.replaceChildren();
      text.classList.add("writing");
      pieces = 0;
      told = null;
      meter.hidden = true;
      for (const place of [speed, amount, asked, share]) place.textContent = "–";
    },
    add(piece) {
      pieces += 1;
      const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
      text.append(piece);
      if (atEnd) text.scrollTop = text.scrollHeight; // follow, unless the reader has scrolled up
    },
    /** The service's own figures: with every piece, and at the end. */
    usage(usage) {
      told = usage;
      amount.textContent = grouped(usage.completion_tokens);
      asked.textContent = grouped(usage.prompt_tokens);
      if (Number.isFinite(usage.tokens_per_second)) speed.textContent = number(usage.tokens_per_second);
      const known = Number.isFinite(usage.bandwidth_share);
      if (known) share.textContent = percent(usage.bandwidth_share);
      else if (Number.isFinite(usage.tokens_per_second)) share.textContent = "not known here";
      meter.hidden = !known;
      if (known) {
        meter.setAttribute("aria-valuenow", String(Math.round(usage.bandwidth_share * 100)));
        setStyle(fill, { width: `${Math.min(1, usage.bandwidth_share) * 100}%` });
      }
    },
    end() {
      text.classList.remove("writing");
    },
    summary() {
      const rate = told?.tokens_per_second;
      return `${plural(told?.completion_tokens ?? pieces, "token")} written${rate ? `, ${number(rate)} a second` : ""}`;
    },
  };
}
