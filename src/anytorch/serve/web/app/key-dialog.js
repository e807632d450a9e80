// The field for the API key, shown when the service answers 401. Several requests may meet that at once: one dialog.

import { el, uniqueId } from "./dom.js";

let asking = null;

/** What the person typed, or null if they closed it. `wrong`: a key was sent and refused. */
export function askForKey(wrong) {
  asking ??= open(wrong).finally(() => (asking = null));
  return asking;
}

function open(wrong) {
  return new Promise((resolve) => {
    const id = uniqueId("key");
    const field = el("input", { id, type: "password", autocomplete: "off", required: true, spellcheck: "false" });
    const dialog = el(
      "dialog",
      { class: "dialog", "aria-labelledby": `${id}-title` },
      el(
        "form",
        { method: "dialog" },
        el("h2", { id: `${id}-title`, text: "This service requires an API key" }),
        el("p", {
          class: "soft",
          text: wrong
            ? "The service does not know this key."
            : "The operator of the service has the keys (--api-key-file). Yours stays in this tab until you close it.",
        }),
        el("label", { for: id, text: "API key" }),
        field,
        el(
          "div",
          { class: "actions" },
          el("button", { class: "button", type: "submit", text: "Use this key" }),
          el("button", { class: "button plain", type: "button", text: "Cancel", on: { click: () => dialog.close() } }),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "used" ? field.value.trim() : null);
    });
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close("used");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
