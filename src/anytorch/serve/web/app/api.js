// Talking to the service. Every failure becomes a Problem with a title, a detail and a hint, so that panels show one.

import { readEvents } from "./sse.js";

const KEY = "anytorch-api-key";

export class Problem extends Error {
  constructor({ title, detail = "", hint = "", status = 0 }) {
    super(title);
    Object.assign(this, { title, detail, hint, status });
  }
}

/** A Problem out of what a service answered: problem+json, OpenAI's error object, or a proxy's own page. Pure. */
export function problemOf(status, type, body) {
  if (/json/.test(type)) {
    try {
      const found = JSON.parse(body);
      const { title, hint } = found;
      const detail = typeof found.detail === "string" ? found.detail : "";
      if (title) return new Problem({ title, detail: detail === title ? "" : detail, hint, status });
      if (found.error?.message) return new Problem({ title: found.error.message, status });
    } catch {
      // Not JSON after all: the words below say what is known.
    }
  }
  return new Problem({
    title: `The service answered ${status}`,
    detail: /html/.test(type) ? "" : body.slice(0, 300),
    status,
  });
}

let askForKey = async () => null;

/** `ask(wrong)` shows the field for the key and gives what was typed, or null. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function storeKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Then it is asked for again; a key is never put anywhere that outlives the tab.
  }
}

async function send(path, { method = "GET", json, form, signal } = {}, key = storedKey()) {
  const headers = {};
  if (json !== undefined) headers["Content-Type"] = "application/json";
  if (key) headers["Authorization"] = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: json === undefined ? form : JSON.stringify(json) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      title: "The service does not answer",
      detail: "Could not connect.",
      hint: "is it still running? start it with: anytorch serve",
    });
  }
  if (response.status === 401) {
    const typed = await askForKey(Boolean(key));
    if (typed) {
      storeKey(typed);
      return send(path, { method, json, form, signal }, typed);
    }
  }
  return response;
}

async function checked(path, options) {
  const response = await send(path, options);
  if (response.ok) return response;
  throw problemOf(response.status, response.headers.get("Content-Type") ?? "", await response.text());
}

export async function get(path, options = {}) {
  return (await checked(path, options)).json();
}

export async function getText(path, options = {}) {
  return (await checked(path, options)).text();
}

export async function post(path, json, options = {}) {
  return (await checked(path, { ...options, method: "POST", json })).json();
}

/** The events of a streamed answer; see readEvents. */
export async function* stream(path, json, options = {}) {
  yield* readEvents(await checked(path, { ...options, method: "POST", json }));
}

/** The events of a streamed answer that is asked for with GET. */
export async function* streamAgain(path, options = {}) {
  yield* readEvents(await checked(path, options));
}

export async function remove(path, options = {}) {
  await checked(path, { ...options, method: "DELETE" });
}

/** The answer whatever its status: readiness is told by a body that comes with 503 as well. */
export async function getAnyStatus(path, options = {}) {
  const response = await send(path, options);
  try {
    return { status: response.status, body: await response.clone().json() };
  } catch {
    throw problemOf(response.status, "", await response.text());
  }
}
