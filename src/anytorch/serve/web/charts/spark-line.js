// The last two minutes of a share between 0 and 1, as a small filled line.

import { svg } from "../app/dom.js";
import { areaPath, linePath } from "./scene.js";

const KEPT = 60;
const [WIDTH, HEIGHT] = [240, 40];

/** The newest value stands at the right edge; what was not measured yet is empty. Pure. */
export function sparkPoints(values, width = WIDTH, height = HEIGHT) {
  const first = KEPT - values.length;
  return values.map((value, at) => [((first + at) / (KEPT - 1)) * width, height - 1 - Math.max(0, Math.min(1, value)) * (height - 2)]);
}

export function sparkLine() {
  const values = [];
  const area = svg("path", { class: "spark-area" });
  const line = svg("path", { class: "spark-line" });
  const element = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  return {
    element,
    add(value) {
      values.push(value);
      if (values.length > KEPT) values.shift();
      const points = sparkPoints(values);
      line.setAttribute("d", linePath(points));
      area.setAttribute("d", areaPath(points, [[points[0][0], HEIGHT], [points[points.length - 1][0], HEIGHT]]));
    },
  };
}
