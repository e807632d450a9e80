// A chart is a list of shapes with colour names; one list, two ways to draw it. The page gets SVG (sharp, follows the
// theme by itself). A PNG gets a canvas, because the content security policy rightly forbids loading an SVG as a blob.

import { svg } from "../app/dom.js";

/**
 * Shapes, all plain data:
 *   {rect: [x, y, width, height], fill, stroke?, radius?, opacity?}
 *   {line: [x1, y1, x2, y2], stroke, width?, dash?, opacity?}
 *   {path: "M…", fill?, stroke?, width?, dash?, opacity?}
 *   {circle: [x, y, r], fill, stroke?, width?, opacity?}
 *   {text: "…", at: [x, y], fill, size?, weight?, anchor?}
 * Colours are names of variables in styles/colours.css ("--up").
 */
export function drawSvg(target, shapes, width, height) {
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.setAttribute("width", width);
  target.setAttribute("height", height);
  target.replaceChildren(...shapes.map(svgShape));
}

export function svgShape(shape) {
  const node = svgNode(shape);
  node.style.fill = shape.fill ? `var(${shape.fill})` : "none";
  if (shape.stroke) node.style.stroke = `var(${shape.stroke})`;
  if (shape.width) node.setAttribute("stroke-width", shape.width);
  if (shape.dash) node.setAttribute("stroke-dasharray", shape.dash.join(" "));
  if (shape.opacity !== undefined) node.setAttribute("opacity", shape.opacity);
  return node;
}

function svgNode(shape) {
  if (shape.rect) {
    const [x, y, width, height] = shape.rect;
    return svg("rect", { x, y, width, height, rx: shape.radius });
  }
  if (shape.line) {
    const [x1, y1, x2, y2] = shape.line;
    return svg("line", { x1, y1, x2, y2 });
  }
  if (shape.circle) {
    const [cx, cy, r] = shape.circle;
    return svg("circle", { cx, cy, r });
  }
  if (shape.path) return svg("path", { d: shape.path, "stroke-linejoin": "round" });
  const [x, y] = shape.at;
  const { size = 11, weight, anchor = "start" } = shape;
  return svg("text", { x, y, "font-size": size, "font-weight": weight, "text-anchor": anchor, text: shape.text });
}

const ANCHORS = { start: "left", middle: "center", end: "right" };

/** `colour(name)` gives what a variable is now; `font` is a CSS family. */
export function drawCanvas(context, shapes, { colour, font }) {
  for (const shape of shapes) {
    context.save();
    context.globalAlpha = shape.opacity ?? 1;
    context.lineWidth = shape.width ?? 1;
    context.lineJoin = "round";
    context.setLineDash(shape.dash ?? []);
    if (shape.fill) context.fillStyle = colour(shape.fill);
    if (shape.stroke) context.strokeStyle = colour(shape.stroke);
    if (shape.text !== undefined) {
      context.font = `${shape.weight ?? 400} ${shape.size ?? 11}px ${font}`;
      context.textAlign = ANCHORS[shape.anchor ?? "start"];
      context.fillText(shape.text, ...shape.at);
    } else {
      const path = canvasPath(shape);
      if (shape.fill) context.fill(path);
      if (shape.stroke) context.stroke(path);
    }
    context.restore();
  }
}

function canvasPath(shape) {
  if (shape.path) return new Path2D(shape.path);
  const path = new Path2D();
  if (shape.rect) path.roundRect(...shape.rect, shape.radius ?? 0);
  else if (shape.circle) path.arc(...shape.circle, 0, 2 * Math.PI);
  else if (shape.line) {
    path.moveTo(shape.line[0], shape.line[1]);
    path.lineTo(shape.line[2], shape.line[3]);
  }
  return path;
}

/** "M…L…" through points; where a value is missing the line is broken. Pure. */
export function linePath(points) {
  let pen = "M";
  let path = "";
  for (const [x, y] of points) {
    if (!Number.isFinite(y)) {
      pen = "M";
      continue;
    }
    path += `${pen}${round(x)} ${round(y)}`;
    pen = "L";
  }
  return path;
}

/** The closed shape between two lines over the same places. Pure. */
export function areaPath(upper, lower) {
  return `${linePath(upper)}${linePath([...lower].reverse()).replace("M", "L")}Z`;
}

export const round = (value) => Math.round(value * 100) / 100;
