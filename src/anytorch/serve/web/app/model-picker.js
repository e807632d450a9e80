// Which model a panel uses: a plain line where there is one, a choice where the service could load others.

import { get, post } from "./api.js";
import { el } from "./dom.js";
import { selectField } from "./fields.js";
import { compact, duration, grouped } from "./format.js";
import { problemBox, warningBox } from "./notices.js";
import { refreshState } from "./service-state.js";

/**
 * {element, model(): id or undefined, refresh()}. `onChange(models)` is called when the list is known or has changed.
 * A model that the service was started with loads by itself at the first request, others when somebody says so.
 */
export function modelPicker(job, onChange = () => {}) {
  const place = el("div", { class: "model" });
  let current;

  const show = (models) => {
    const ready = models.filter((model) => model.loaded);
    const loaded = ready.find((model) => model.id === current) ?? ready.find((model) => model.default) ?? ready[0];
    current = loaded?.id;
    place.replaceChildren();
    const waits = loaded ? null : models.find((model) => model.default) ?? (models.length === 1 && job !== "text" ? models[0] : null);
    if (models.length > 1 || (models.length && !loaded && !waits)) place.append(choice(models, loaded ?? waits));
    if (loaded ?? waits) place.append(line(loaded ?? waits));
    if (loaded?.device_warning) place.append(warningBox(el("p", { text: loaded.device_warning })));
    onChange(models);
  };

  const choice = (models, loaded) => {
    const options = models.map((model) => [model.id, `${model.id}${model.loaded || model === loaded ? "" : " (load)"}`]);
    const field = selectField("Model", loaded ? options : [["", "Choose a model to load"], ...options], { value: loaded?.id ?? "" });
    field.input.addEventListener("change", () => load(field.value(), models));
    return field.element;
  };

  const load = async (id, models) => {
    const wanted = models.find((model) => model.id === id);
    if (!wanted) return;
    if (wanted.loaded) {
      current = id;
      show(models);
      place.querySelector("select").focus();
      return;
    }
    place.replaceChildren(el("p", { class: "soft", role: "status" }, el("span", { class: "spinner" }), ` Loading ${id}…`));
    try {
      const answer = await post("api/load-model", { model: id, job });
      current = answer.model.id;
      await refreshState();
      await refresh();
      place.append(el("p", { class: "soft", role: "status", text: `Loaded in ${duration(answer.seconds)}.` }));
    } catch (error) {
      await refresh();
      place.append(problemBox(error));
    }
  };

  const refresh = async () => {
    try {
      const { models } = await get("api/models");
      show(models.filter((model) => model.job === job));
    } catch (error) {
      place.replaceChildren(problemBox(error));
    }
  };

  refresh();
  return { element: place, model: () => current, refresh };
}

function line(model) {
  const parts = [
    model.loaded ? null : "is loaded at the first request",
    model.device,
    model.quantization ?? model.dtype,
    model.parameters ? `${compact(model.parameters)} parameters` : null,
    model.dim ? `${model.dim} dimensions` : null,
    model.max_length ? `${grouped(model.max_length)} ${model.job === "forecast" ? "bars" : "tokens"} at once` : null,
  ];
  return el(
    "p",
    { class: "model-line" },
    el("b", { text: model.id }),
    parts.filter(Boolean).map((text) => el("span", { text })),
  );
}
