// The line that says whether the service is there and where it computes. Panels ask `serviceState()` for its models.

import { getAnyStatus } from "./api.js";

const EVERY = { ready: 10_000, other: 2_000 };
const WORDS = { starting: "Starting…", ready: "Ready", draining: "Shutting down", failed: "Failed" };

let latest = null;
const waiting = [];

/** The last answer of /v1/readyz; waits for the first one. */
export function serviceState() {
  return latest ? Promise.resolve(latest) : new Promise((resolve) => waiting.push(resolve));
}

/** Ask again now, after something that changes the answer (a model was loaded). */
export async function refreshState() {
  const { body } = await getAnyStatus("v1/readyz");
  latest = body;
  return body;
}

export function watchService(place) {
  const words = place.querySelector(".service-text");
  const show = (state, text, title = "") => {
    // A status region is read out when its text changes: every poll must not touch it.
    if (place.dataset.state !== state) place.dataset.state = state;
    if (words.textContent !== text) words.textContent = text;
    place.title = title;
  };
  const look = async () => {
    let wait = EVERY.other;
    try {
      const { body } = await getAnyStatus("v1/readyz");
      if (body.versions) {
        latest = body;
        while (waiting.length) waiting.pop()(body);
        const { anytorch, torch, python } = body.versions;
        const title = `anytorch ${anytorch}, Python ${python}, ${torch ? `torch ${torch}` : "no torch"}`;
        const state = body.device_warning && body.status === "ready" ? "warning" : body.status;
        const place = body.device ? ` on ${body.device}` : "";
        show(state, (WORDS[body.status] ?? body.status) + place, body.detail ?? body.device_warning ?? title);
        if (body.status === "ready") wait = EVERY.ready;
      } else {
        show("failed", body.title ?? "Not reachable");
      }
    } catch (error) {
      show("failed", "Not reachable", error.hint ?? "");
    }
    setTimeout(look, document.hidden ? EVERY.ready : wait);
  };
  look();
}
