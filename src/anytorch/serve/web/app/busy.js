// Waiting for an answer: the button turns, after a moment the time is counted beside a way to stop, a problem is shown.

import { el, icon } from "./dom.js";
import { problemBox } from "./notices.js";

const QUICK_MS = 700; // an answer within it needs no more than the turning button
const TICK_MS = 100;

/**
 * Run `work(signal)`; `place` shows how long it takes, then its problem if there is one. Gives undefined on a problem, when
 * it was stopped, and when the button is busy already (it stays focusable meanwhile: a disabled one would lose the focus).
 */
export async function busyWith(button, place, work) {
  if (button.getAttribute("aria-busy") === "true") return undefined;
  const aborter = new AbortController();
  button.setAttribute("aria-busy", "true");
  button.setAttribute("aria-disabled", "true");
  place.replaceChildren();
  const stopCounting = countIn(place, () => aborter.abort());
  try {
    return await work(aborter.signal);
  } catch (error) {
    stopCounting();
    if (error.name !== "AbortError") place.replaceChildren(problemBox(error));
    return undefined;
  } finally {
    stopCounting();
    button.removeAttribute("aria-busy");
    button.removeAttribute("aria-disabled");
  }
}

function countIn(place, stop) {
  const began = performance.now();
  const seconds = el("span", { "aria-hidden": "true" }); // a number that changes ten times a second is not read out
  const line = el(
    "div",
    { class: "notice waiting" },
    el("span", { class: "spinner" }),
    el("p", { role: "status" }, "Computing… ", seconds),
    el("button", { class: "button plain small", type: "button", on: { click: stop } }, icon("stop"), "Stop"),
  );
  const timer = setInterval(() => {
    const passed = performance.now() - began;
    seconds.textContent = `${(passed / 1000).toFixed(1)} s`;
    if (passed > QUICK_MS && !line.isConnected) place.replaceChildren(line);
  }, TICK_MS);
  return () => {
    clearInterval(timer);
    line.remove();
  };
}
