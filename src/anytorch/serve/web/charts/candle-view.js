// The candle chart on the page: draws the scene for the width there is, and a crosshair that pointer and keys move.

import { el, onWidth, svg } from "../app/dom.js";
import { candleScene, readings } from "./candles.js";
import { longTime, wallTime } from "./scales.js";
import { drawCanvas, drawSvg, svgShape } from "./scene.js";
import { colourOf } from "../app/theme.js";

/** `options()` gives {shown, paths} at every drawing. Gives {element, redraw, png}. */
export function candleView(answer, options) {
  const drawing = svg("svg", { class: "drawing", "aria-hidden": "true" });
  const cross = svg("g", { class: "cross" });
  const readout = el("div", { class: "readout", role: "status" });
  const frame = el(
    "div",
    {
      class: "chart candles",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "chart",
      "aria-label": "Candles and forecast. Left and right arrow keys read one bar after another.",
    },
    drawing,
  );
  const element = el("div", { class: "candle-view" }, readout, frame);
  let scene = null;
  let at = null;

  const height = () => Math.round(Math.max(300, Math.min(520, innerHeight * 0.56)));
  const draw = (width) => {
    scene = candleScene(answer, { width, height: height(), ...options() });
    drawSvg(drawing, scene.shapes, width, height());
    drawing.append(cross);
    cross.replaceChildren();
    at = null;
    rest();
  };

  const daily = intervalOf(answer.history.timestamps.map(wallTime)) >= 86400e3;
  const read = (index) => {
    readout.replaceChildren(
      el("span", { class: "readout-time", text: longTime(scene.bars[index].time, !daily) }),
      ...readings(scene, index).map(([label, text]) => el("span", {}, el("span", { class: "readout-label", text: label }), text)),
    );
  };
  // With no crosshair the line tells the last bar that is known, so it never jumps between empty and full.
  const rest = () => {
    cross.replaceChildren();
    at = null;
    read(scene.past - 1);
  };
  const move = (index) => {
    if (index === at) return;
    at = index;
    const { plot } = scene;
    const x = scene.place(index);
    const bar = scene.bars[index];
    const y = scene.priceAt(bar.ahead ? scene.median[index - scene.past] : bar.close);
    cross.replaceChildren(
      ...[
        { line: [x, plot.top, x, plot.foot], stroke: "--ink-soft", opacity: 0.6 },
        { line: [plot.left, y, plot.right, y], stroke: "--ink-soft", opacity: 0.6, dash: [2, 3] },
        { circle: [x, y, 3.5], fill: bar.ahead ? "--forecast" : "--ink", stroke: "--surface", width: 1.5 },
      ].map(svgShape),
    );
    read(index);
  };

  frame.addEventListener("pointermove", (event) => move(scene.indexAt(event.clientX - drawing.getBoundingClientRect().left)));
  frame.addEventListener("pointerdown", (event) => move(scene.indexAt(event.clientX - drawing.getBoundingClientRect().left)));
  frame.addEventListener("pointerleave", rest);
  frame.addEventListener("blur", rest);
  frame.addEventListener("keydown", (event) => {
    const from = at ?? scene.past - 1;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: scene.bars.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(Math.max(0, Math.min(scene.bars.length - 1, to)));
  });

  onWidth(frame, draw);
  return { element, redraw: () => draw(Math.floor(frame.clientWidth)), png: () => toPng(answer, options()) };
}

function intervalOf(times) {
  const gaps = times.slice(1).map((time, at) => time - times[at]).sort((a, b) => a - b);
  return gaps[Math.floor(gaps.length / 2)] ?? 0;
}

/** The picture at a fixed size that suits a document, whatever the window is. */
async function toPng(answer, options) {
  const [width, height, sharp] = [1200, 640, 2];
  const canvas = el("canvas", { width: width * sharp, height: height * sharp });
  const context = canvas.getContext("2d");
  context.scale(sharp, sharp);
  context.fillStyle = colourOf("--surface");
  context.fillRect(0, 0, width, height);
  const scene = candleScene(answer, { width: width - 32, height: height - 32, ...options });
  context.translate(16, 16);
  drawCanvas(context, scene.shapes, { colour: colourOf, font: getComputedStyle(document.body).fontFamily });
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
