// How alike every text is to every other: a canvas, because a hundred texts are ten thousand cells.

import { el, onWidth } from "../app/dom.js";
import { plural, shorten } from "../app/format.js";
import { colourOf } from "../app/theme.js";
import { css, luminance, ramp } from "./ramp.js";

const GUTTER = 26; // room for the numbers at the left and on top

/** What share of the ramp a similarity is: unlike texts lie near 0, and a negative value is not more unlike than that. Pure. */
export const shareOf = (value) => Math.max(0, Math.min(1, value));

/** Two digits in little room: ".66", "−.03", "1.00". Pure. */
export function cellText(value) {
  const text = Math.abs(value).toFixed(2);
  const sign = value < 0 && Number(text) > 0 ? "−" : "";
  return sign + text.replace(/^0/, "");
}

export function theme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

/** `onPick(row, column | null)` hears what is under the pointer or the keys. Gives {element, highlight(row)}. */
export function heatMap(values, texts, onPick) {
  const size = values.length;
  const canvas = el("canvas", { "aria-hidden": "true" });
  const readout = el("p", { class: "readout two", role: "status" });
  const frame = el(
    "div",
    {
      class: "chart heat",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "heat map",
      "aria-label": `Similarity of ${plural(size, "text")}. Arrow keys read one cell after another.`,
    },
    canvas,
  );
  let side = 0;
  let cell = null;
  let lit = null;

  const draw = () => {
    const sharp = devicePixelRatio || 1;
    const gutter = size <= 60 ? GUTTER : 0;
    const room = side - gutter;
    canvas.width = side * sharp;
    canvas.height = side * sharp;
    canvas.style.width = `${side}px`;
    canvas.style.height = `${side}px`;
    const context = canvas.getContext("2d");
    context.scale(sharp, sharp);
    const pitch = room / size;
    const gap = pitch > 9 ? 1 : 0;
    const shade = theme();
    const ink = colourOf("--ink-soft");
    const font = getComputedStyle(document.body).fontFamily;
    for (let row = 0; row < size; row += 1) {
      for (let column = 0; column < size; column += 1) {
        const rgb = ramp(shareOf(values[row][column]), shade);
        context.fillStyle = css(rgb);
        context.fillRect(gutter + column * pitch, gutter + row * pitch, pitch - gap + (gap ? 0 : 0.5), pitch - gap + (gap ? 0 : 0.5));
        if (pitch >= 30) {
          context.fillStyle = luminance(rgb) > 0.32 ? "#10201d" : "#f4faf8";
          context.font = `500 ${Math.min(12, pitch * 0.32)}px ${font}`;
          context.textAlign = "center";
          context.textBaseline = "middle";
          context.fillText(cellText(values[row][column]), gutter + (column + 0.5) * pitch - gap / 2, gutter + (row + 0.5) * pitch);
        }
      }
    }
    if (gutter) {
      context.font = `400 10.5px ${font}`;
      context.textBaseline = "middle";
      const every = Math.ceil(14 / pitch);
      for (let at = 0; at < size; at += every) {
        const strong = lit === at || cell?.row === at || cell?.column === at;
        context.fillStyle = strong ? colourOf("--ink") : ink;
        context.textAlign = "right";
        context.fillText(String(at + 1), gutter - 7, gutter + (at + 0.5) * pitch);
        context.textAlign = "center";
        context.fillText(String(at + 1), gutter + (at + 0.5) * pitch, gutter - 10);
      }
    }
    outline(context, gutter, pitch, gap);
  };

  const outline = (context, gutter, pitch, gap) => {
    context.strokeStyle = colourOf("--ink");
    context.lineWidth = 1.5;
    if (lit !== null && !cell) context.strokeRect(gutter, gutter + lit * pitch - 0.5, size * pitch - gap, pitch - gap + 1);
    if (cell) context.strokeRect(gutter + cell.column * pitch - 0.5, gutter + cell.row * pitch - 0.5, pitch - gap + 1, pitch - gap + 1);
  };

  const say = () => {
    if (!cell) {
      readout.replaceChildren(el("span", { class: "soft", text: "Point at a cell, or use the arrow keys." }));
      return;
    }
    const { row, column } = cell;
    readout.replaceChildren(
      el("strong", { text: values[row][column].toFixed(3) }),
      el("span", { text: `${row + 1} ${shorten(texts[row], 46)}` }),
      el("span", { text: `${column + 1} ${shorten(texts[column], 46)}` }),
    );
  };
  const pick = (next) => {
    if (next?.row === cell?.row && next?.column === cell?.column) return;
    cell = next;
    draw();
    say();
    onPick(cell ? cell.row : null, cell ? cell.column : null);
  };
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const gutter = size <= 60 ? GUTTER : 0;
    const place = (at) => Math.floor(((at - gutter) / (side - gutter)) * size);
    const column = place(event.clientX - box.left);
    const row = place(event.clientY - box.top);
    return column >= 0 && row >= 0 && column < size && row < size ? { row, column } : null;
  };
  frame.addEventListener("pointermove", (event) => pick(under(event)));
  frame.addEventListener("pointerdown", (event) => pick(under(event)));
  frame.addEventListener("pointerleave", () => pick(null));
  frame.addEventListener("blur", () => pick(null));
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = cell ?? { row: 0, column: -step[1] };
    const within = (value) => Math.max(0, Math.min(size - 1, value));
    pick({ row: within(from.row + step[0]), column: within(from.column + step[1]) });
  });
  document.addEventListener("themechange", () => frame.isConnected && side && draw());
  onWidth(frame, (width) => {
    side = Math.min(width, 560);
    draw();
  });
  say();
  return {
    element: el("div", { class: "heat-view" }, frame, scaleBar(), readout),
    highlight(row) {
      if (row === lit) return;
      lit = row;
      if (side) draw();
    },
  };
}

/** The legend: which colour is which similarity. */
function scaleBar() {
  const steps = el("span", { class: "ramp-steps" });
  const paint = () =>
    steps.replaceChildren(
      ...Array.from({ length: 24 }, (_, at) => el("i", { style: { "background-color": css(ramp(at / 23, theme())) } })),
    );
  document.addEventListener("themechange", () => steps.isConnected && paint());
  paint();
  return el("div", { class: "ramp", "aria-hidden": "true" }, el("span", { text: "0 unlike" }), steps, el("span", { text: "1 the same" }));
}
