// Labelled inputs. Every one has a visible label tied to it; a hint is tied as its description.

import { el, uniqueId } from "./dom.js";
import { keepField } from "./kept.js";

function labelled(label, control, hint) {
  const id = uniqueId("field");
  control.id = id;
  if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
  return el(
    "div",
    { class: "field" },
    el("label", { for: id, text: label }),
    control,
    hint ? el("small", { id: `${id}-hint`, text: hint }) : null,
  );
}

/** {element, value()}: value() is a number, or null where the field is empty. `keepAs`: a name to keep what is typed under. */
export function numberField(label, { value, min, max, step = 1, hint, placeholder, keepAs }) {
  const input = el("input", { type: "number", min, max, step, value, placeholder, inputmode: step < 1 ? "decimal" : "numeric" });
  if (keepAs) keepField(keepAs, input);
  return {
    element: labelled(label, input, hint),
    input,
    value: () => (input.value === "" ? null : Number(input.value)),
  };
}

export function selectField(label, options, { value, hint, keepAs } = {}) {
  const select = el("select", {}, options.map(([key, text]) => el("option", { value: key, text, selected: key === value })));
  if (keepAs) keepField(keepAs, select);
  return { element: labelled(label, select, hint), input: select, value: () => select.value };
}

/** A row of radio buttons that looks like one switch. `onChange(key)`. */
export function segments(label, options, value, onChange) {
  const name = uniqueId("segments");
  return el(
    "fieldset",
    { class: "segments" },
    el("legend", { class: "unseen", text: label }),
    options.map(([key, text]) => {
      const id = uniqueId("segment");
      const radio = el("input", { type: "radio", name, id, value: key, checked: key === value });
      radio.addEventListener("change", () => onChange(key));
      return [radio, el("label", { for: id, text })];
    }),
  );
}

export function checkbox(text, { checked = false, onChange = () => {}, swatch = null } = {}) {
  const input = el("input", { type: "checkbox", checked });
  input.addEventListener("change", () => onChange(input.checked));
  const element = el("label", { class: "check" }, input, swatch, el("span", { text }));
  return { element, input };
}
