// Texts on a plane: near points mean much the same. Pointing at one draws lines to the texts nearest in meaning, because
// a plane cannot keep every distance and the lines tell the truth about them.

import { el, onWidth, svg } from "../app/dom.js";
import { shorten } from "../app/format.js";
import { svgShape } from "./scene.js";
import { extent, linear } from "./scales.js";

const NEAREST = 3;

/** The indices of the texts most like text `at`, best first. Pure. */
export function nearest(similarity, at, count = NEAREST) {
  return similarity[at]
    .map((value, index) => ({ index, value }))
    .filter(({ index }) => index !== at)
    .sort((a, b) => b.value - a.value)
    .slice(0, count);
}

/** Where labels may stand so that none covers another: for each point "right", "left" or null. Pure. */
export function placeLabels(points, widths, { width, height = 15 }) {
  const taken = points.map(([x, y]) => [x - 7, y - 7, x + 7, y + 7]);
  const free = (box, own) => taken.every(([l, t, r, b], at) => at === own || box[2] < l || box[0] > r || box[3] < t || box[1] > b);
  return points.map(([x, y], at) => {
    for (const side of ["right", "left"]) {
      const left = side === "right" ? x + 10 : x - 10 - widths[at];
      const box = [left, y - height / 2, left + widths[at], y + height / 2];
      if (box[0] < 2 || box[2] > width - 2 || !free(box, at)) continue;
      taken.push(box);
      return side;
    }
    return null;
  });
}

/** `onPick(index | null)` hears which text is pointed at. Gives {element, highlight(index), found(hits)}. */
export function textMap(points, similarity, texts, onPick) {
  const drawing = svg("svg", { class: "drawing", "aria-hidden": "true" });
  // One stop for the Tab key, arrows inside: two hundred texts must not be two hundred stops.
  const frame = el(
    "div",
    {
      class: "chart map",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "map",
      "aria-label": `${texts.length} texts on a plane. Arrow keys read one text after another.`,
    },
    drawing,
  );
  const readout = el("p", { class: "readout two", role: "status" });
  let places = [];
  let dots = [];
  let lines = svg("g");
  let lit = null;
  let hits = new Map();

  const draw = (width) => {
    const height = Math.round(Math.min(590, Math.max(300, width + 30))); // as tall as the heat map and its scale beside it
    const room = 26;
    // One scale for both directions: a plane that is stretched in one of them would lie about distances.
    const [left, right] = extent(points.map((point) => point[0]));
    const [low, high] = extent(points.map((point) => point[1]));
    const reach = Math.max((right - left) / (width - 2 * room), (high - low) / (height - 2 * room)) || 1;
    const x = linear([(left + right) / 2, (left + right) / 2 + reach], [width / 2, width / 2 + 1]);
    const y = linear([(low + high) / 2, (low + high) / 2 + reach], [height / 2, height / 2 - 1]);
    places = points.map(([px, py]) => [x(px), y(py)]);

    const labels = texts.map((text) => shorten(text, width < 420 ? 18 : 26));
    const sides = placeLabels(places, labels.map((text) => text.length * 6.1), { width });
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("width", width);
    drawing.setAttribute("height", height);
    lines = svg("g");
    dots = places.map(([px, py], at) => {
      const group = svg("g", { class: "dot" });
      group.append(svg("circle", { class: "reach", cx: px, cy: py, r: 14 }), svg("circle", { cx: px, cy: py, r: 5.5 }));
      if (sides[at]) {
        const right = sides[at] === "right";
        group.append(svg("text", { x: px + (right ? 10 : -10), y: py + 4, "text-anchor": right ? "start" : "end", text: labels[at] }));
      }
      group.addEventListener("pointerenter", () => onPick(at));
      group.addEventListener("pointerleave", () => onPick(null));
      return group;
    });
    drawing.replaceChildren(...grid(width, height), lines, ...dots);
    mark();
  };

  const mark = () => {
    lines.replaceChildren();
    dots.forEach((dot, at) => {
      dot.classList.toggle("lit", at === lit);
      dot.classList.toggle("hit", hits.has(at));
      dot.classList.toggle("faded", hits.size > 0 && !hits.has(at) && at !== lit);
    });
    if (lit === null) {
      readout.replaceChildren(el("span", { class: "soft", text: "Point at a text to see the ones nearest in meaning." }));
      return;
    }
    const near = nearest(similarity, lit);
    for (const { index, value } of near) {
      lines.append(svgShape({ line: [...places[lit], ...places[index]], stroke: "--accent", width: 0.8 + 2.4 * Math.max(0, value), opacity: 0.7 }));
    }
    readout.replaceChildren(
      el("strong", { text: `${lit + 1}` }),
      el("span", { text: shorten(texts[lit], 90) }),
      el("span", { class: "soft", text: `nearest: ${near.map(({ index, value }) => `${index + 1} (${value.toFixed(2)})`).join(", ")}` }),
    );
  };

  frame.addEventListener("blur", () => onPick(null));
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = lit ?? (step > 0 ? -1 : 0);
    onPick((from + step + texts.length) % texts.length);
  });
  onWidth(frame, draw);
  return {
    element: el("div", { class: "map-view" }, frame, readout),
    highlight(index) {
      if (index === lit) return;
      lit = index;
      mark();
    },
    found(results) {
      hits = new Map(results.map(({ index, score }) => [index, score]));
      mark();
    },
  };
}

function grid(width, height) {
  const lines = [];
  for (let x = (width / 2) % 56; x < width; x += 56) lines.push(svgShape({ line: [x, 0, x, height], stroke: "--line", opacity: 0.5 }));
  for (let y = (height / 2) % 56; y < height; y += 56) lines.push(svgShape({ line: [0, y, width, y], stroke: "--line", opacity: 0.5 }));
  return lines;
}
