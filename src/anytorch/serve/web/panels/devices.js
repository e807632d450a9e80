// Devices: every one found, what it is, how full and how busy it is now; and for each missing one, why and what helps.

import { get, getText } from "../app/api.js";
import { el, icon, setStyle } from "../app/dom.js";
import { bytes, capitalised, percent } from "../app/format.js";
import { readable } from "../app/markdown.js";
import { emptyState, fixes, heading, problemBox, prose, skeleton, warningBox } from "../app/notices.js";
import { serviceState } from "../app/service-state.js";
import { sparkLine } from "../charts/spark-line.js";

const EVERY_MS = 2000;
const TRIED_MS = 1000;

export function devicesPanel(section) {
  const waiting = el("p", { class: "soft", role: "status" }, el("span", { class: "spinner" }), " The devices are tried in another process. The first time takes some seconds.");
  const body = el("div", { class: "stack" }, waiting, skeleton(4, "cards"));
  section.append(heading("Devices", "The devices of this machine, the one the service uses, and what the others need to work."), body);

  const meters = new Map();
  let timer = 0;
  let shown = false;

  const load = async () => {
    try {
      const [{ devices, choice, tried }, { findings }] = await Promise.all([get("v1/devices"), get("v1/doctor")]);
      const { device_warning: warning } = await serviceState();
      meters.clear();
      body.replaceChildren(
        ...(warning ? [warningBox(el("p", { text: capitalised(warning) }))] : []),
        ...pageOf(devices, choice, findings, meters),
      );
      // Right after the start the devices are still being tried in another process; what is seen is shown meanwhile.
      if (tried === false) setTimeout(load, TRIED_MS);
    } catch (error) {
      body.replaceChildren(problemBox(error), el("button", { class: "button plain", type: "button", text: "Try again", on: { click: load } }));
    }
  };

  const poll = async () => {
    clearTimeout(timer);
    if (!shown) return;
    if (!document.hidden && meters.size) {
      try {
        const { devices } = await get("v1/devices/live");
        for (const live of devices) meters.get(live.id)?.update(live);
      } catch {
        // One missed reading; the line in the corner says when the service is gone.
      }
    }
    timer = setTimeout(poll, EVERY_MS);
  };

  const first = load().then(poll);
  return {
    show() {
      shown = true;
      first.then(poll);
    },
    hide() {
      shown = false;
      clearTimeout(timer);
    },
  };
}

function pageOf(devices, choice, findings, meters) {
  const usable = devices.filter((device) => device.usable);
  const simplyAbsent = (device) => device.reasons.every((reason) => reason.code === "not-seen");
  const missing = devices.filter((device) => !device.usable && !simplyAbsent(device));
  const absent = devices.filter((device) => !device.usable && simplyAbsent(device));
  const told = new Set(devices.flatMap((device) => device.reasons.map((reason) => reason.code)));
  const others = findings.filter((finding) => !told.has(finding.code));
  return [
    choiceCard(devices, choice),
    usable.length
      ? el("div", { class: "device-grid" }, usable.map((device) => deviceCard(device, meters)))
      : emptyState("devices", "No device can compute here", el("p", { text: "Not even the CPU works; the reasons are below." })),
    missing.length || others.length ? el("h2", { text: "What would help" }) : null,
    ...missing.map(missingCard),
    ...others.map((finding) => reasonCard(finding)),
    absent.length ? absentList(absent) : null,
  ].filter(Boolean);
}

function choiceCard(devices, choice) {
  const device = devices.find((candidate) => candidate.id === choice.device);
  return el(
    "div",
    { class: "choice" },
    icon("devices"),
    el(
      "div",
      {},
      el("p", { class: "choice-title" }, device ? ["The service computes on ", el("b", { text: device.title })] : "No device is chosen yet"),
      prose(choice.why, { class: "soft" }),
    ),
  );
}

function deviceCard(device, meters) {
  const meter = liveMeters(device);
  meters.set(device.id, meter);
  return el(
    "article",
    { class: `card device${device.best ? " best" : ""}` },
    el(
      "header",
      { class: "device-head" },
      el("div", {}, el("h2", { text: device.title }), el("code", { class: "id", text: device.id })),
      el("span", { class: device.best ? "badge good" : "badge", text: device.best ? "Best here" : device.state }),
    ),
    meter.element,
    factList(device.facts.filter(({ label }) => label !== "memory" || !device.memory?.total)), // the meter tells it
    ...device.reasons.map((reason) => reasonCard(reason, "h3")),
  );
}

function factList(facts) {
  if (!facts.length) return null;
  return el("dl", { class: "facts" }, facts.map(({ label, value }) => el("div", {}, el("dt", { text: capitalised(label) }), el("dd", { text: value }))));
}

/** Memory is a level, so it is a bar; utilisation jumps about, so its last two minutes are drawn. */
function liveMeters(device) {
  const bar = el("span", { class: "meter-fill" });
  const memory = meterRow("Memory", el("div", { class: "meter" }, bar));
  const spark = sparkLine();
  const load = meterRow("Utilisation, last two minutes", spark.element);
  const update = (live) => {
    const { used, total, source } = live.memory ?? {};
    const known = Number.isFinite(used) && total > 0;
    memory.update(known ? used / total : null, known ? `${bytes(used)} of ${bytes(total)}` : total ? bytes(total) : null, source);
    if (known) setStyle(bar, { width: `${Math.min(100, (used / total) * 100)}%` });
    bar.classList.toggle("full", known && used / total > 0.9);
    const share = live.utilisation;
    load.update(share, Number.isFinite(share) ? percent(share) : null);
    if (Number.isFinite(share)) spark.add(share);
  };
  update(device);
  return { element: el("div", { class: "meters" }, memory.element, load.element), update };
}

/** `share` null: the amount is known, how much of it is used is not. `words` null: nothing is known. */
function meterRow(name, drawing) {
  const text = el("span", { class: "meter-text" });
  const meter = el("div", { class: "meter-drawing", role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100" }, drawing);
  const element = el("div", { class: "meter-row" }, el("span", { class: "meter-name", text: name }), text, meter);
  return {
    element,
    update(share, words, source) {
      element.hidden = words === null;
      if (element.hidden) return;
      text.textContent = words;
      if (source) text.title = source;
      meter.hidden = !Number.isFinite(share);
      if (meter.hidden) return;
      meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
      meter.setAttribute("aria-valuetext", words);
    },
  };
}

function missingCard(device) {
  return el(
    "article",
    { class: "card missing" },
    el(
      "header",
      { class: "device-head" },
      el("div", {}, el("h3", { text: device.title }), el("code", { class: "id", text: device.id })),
      el("span", { class: "badge warn", text: device.state }),
    ),
    device.reasons.map((reason) => reasonCard(reason, "h4")),
  );
}

const ICONS = { error: "warning", warning: "warning", note: "note" };

function reasonCard(reason, level = "h3") {
  return el(
    "div",
    { class: `reason ${reason.severity ?? "note"}` },
    icon(ICONS[reason.severity] ?? "note"),
    el(
      "div",
      {},
      el(level, { text: capitalised(reason.title) }),
      reason.detail && reason.detail !== reason.title ? prose(capitalised(reason.detail)) : null,
      fixes(reason.fix),
      reason.page ? explanation(reason) : null,
    ),
  );
}

/** The doctor's whole page about it, fetched when it is asked for. */
function explanation({ code, page }) {
  const body = el("div", { class: "explained" });
  const details = el("details", { class: "explanation" }, el("summary", {}, "What it means ", el("code", { text: code })), body);
  details.addEventListener("toggle", async () => {
    if (!details.open || body.childElementCount) return;
    body.replaceChildren(skeleton(3));
    try {
      // Relative, so that the service may live below a prefix.
      body.replaceChildren(...readable(await getText(page.replace(/^\//, ""))));
    } catch (error) {
      body.replaceChildren(problemBox(error));
    }
  });
  return details;
}

/** Kinds of device that are simply not in this machine: named, so that nobody wonders whether they were looked for. */
function absentList(devices) {
  return el(
    "details",
    { class: "card absent" },
    el("summary", { text: `Not found in this machine (${devices.length})` }),
    el("ul", {}, devices.map((device) => el("li", { text: device.title }))),
  );
}
