// What the charts stand on: scales, marks, scenes and series. Run by tests/web/test_logic.py: node --test.

import assert from "node:assert/strict";
import { test } from "node:test";

const web = "../../../src/anytorch/serve/web/";
const scales = await import(`${web}charts/scales.js`);
const { areaPath, linePath } = await import(`${web}charts/scene.js`);
const { bandsOf, candleScene, readings } = await import(`${web}charts/candles.js`);
const { luminance, ramp } = await import(`${web}charts/ramp.js`);
const { cellText } = await import(`${web}charts/heat-map.js`);
const { nearest, placeLabels } = await import(`${web}charts/text-map.js`);
const { seriesOf, splitTest } = await import(`${web}charts/rate-series.js`);
const { sparkPoints } = await import(`${web}charts/spark-line.js`);
const { ordered, sorted, stepWords, summaryOf } = await import(`${web}charts/tuned.js`);

test("a scale and its inverse meet, and an empty domain is no division by zero", () => {
  const scale = scales.linear([10, 20], [0, 200]);
  assert.equal(scale(15), 100);
  assert.equal(scale.invert(100), 15);
  assert.ok(Number.isFinite(scales.linear([5, 5], [0, 100])(5)));
});

test("ticks are round, inside, and about as many as asked for", () => {
  assert.deepEqual(scales.ticks(0, 1, 5).marks, [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(scales.ticks(88.9, 97.2, 4).marks, [90, 92, 94, 96]);
  for (const [from, to] of [[-3, 17], [0.00012, 0.00019], [1e6, 9e6], [99.9, 100.1]]) {
    const { marks } = scales.ticks(from, to, 5);
    assert.ok(marks.length >= 2 && marks.length <= 11, `${from} to ${to}: ${marks}`);
    assert.ok(marks.every((mark) => mark >= from - 1e-9 && mark <= to + 1e-9));
  }
});

test("an extent ignores what is no number", () => {
  assert.deepEqual(scales.extent([3, Number.NaN, -1, undefined]), [-1, 3]);
  assert.deepEqual(scales.extent([]), [0, 1]);
  assert.deepEqual(scales.extent([2, 4], 0.5), [1, 5]);
});

test("times are those of the clock on the wall", () => {
  assert.equal(scales.wallTime("2026-03-02T09:30:00+02:00"), Date.UTC(2026, 2, 2, 9, 30));
  assert.equal(scales.wallTime("2026-03-02"), Date.UTC(2026, 2, 2));
  assert.ok(Number.isNaN(scales.wallTime("yesterday")));
  assert.equal(scales.longTime(Date.UTC(2026, 2, 2, 9, 30)), "Mon 2 Mar 2026, 09:30");
});

test("marks of time never exceed what fits, and name the day where it changes", () => {
  const start = Date.UTC(2026, 2, 2, 9, 30);
  const fiveMinutes = Array.from({ length: 400 }, (_, at) => start + at * 300e3);
  for (const most of [2, 5, 12]) {
    const marks = scales.timeMarks(fiveMinutes, most);
    assert.ok(marks.length > 0 && marks.length <= most, `${marks.length} of ${most}`);
  }
  const days = scales.timeMarks(fiveMinutes, 12).filter((mark) => mark.major);
  assert.deepEqual(days.map((mark) => mark.text), ["3 Mar"]);
  const months = Array.from({ length: 500 }, (_, at) => Date.UTC(2025, 0, 1 + at));
  assert.ok(scales.timeMarks(months, 6).some((mark) => mark.text === "2026"));
  assert.deepEqual(scales.timeMarks([start], 5), []);
});

test("paths break where a value is missing", () => {
  assert.equal(linePath([[0, 1], [1, 2]]), "M0 1L1 2");
  assert.equal(linePath([[0, 1], [1, Number.NaN], [2, 3]]), "M0 1M2 3");
  assert.equal(areaPath([[0, 1], [1, 1]], [[0, 0], [1, 0]]), "M0 1L1 1L1 0L0 0Z");
});

const HISTORY = {
  timestamps: ["2026-01-01", "2026-01-02", "2026-01-03"],
  open: [1, 2, 3],
  high: [2.5, 3, 3.5],
  low: [0.5, 1.5, 2],
  close: [2, 3, 2.5],
  volume: [10, 20, 30],
};
const AHEAD = { timestamps: ["2026-01-04", "2026-01-05"], open: [2, 2], high: [3, 3], low: [1, 1], close: [2.2, 2.4], volume: [5, 5] };
const QUANTILES = { 0.1: { close: [1.5, 1.4] }, 0.5: { close: [2.1, 2.3] }, 0.9: { close: [3, 3.5] } };

test("bands pair the levels from outside in", () => {
  assert.deepEqual(bandsOf({ 0.95: {}, 0.05: {}, 0.5: {}, 0.25: {}, 0.75: {} }), [[0.05, 0.95], [0.25, 0.75]]);
  assert.deepEqual(bandsOf({}), []);
});

test("the candle scene keeps every shape inside the picture and reads back its bars", () => {
  const scene = candleScene({ history: HISTORY, forecast: AHEAD, quantiles: QUANTILES }, { width: 600, height: 400 });
  assert.equal(scene.bars.length, 5);
  assert.equal(scene.past, 3);
  for (const shape of scene.shapes) {
    const xs = shape.rect ? [shape.rect[0], shape.rect[0] + shape.rect[2]] : shape.line ? [shape.line[0], shape.line[2]] : [];
    assert.ok(xs.every((x) => x >= 0 && x <= 600), JSON.stringify(shape));
    assert.ok(!JSON.stringify(shape).includes("null"), `not finite: ${JSON.stringify(shape)}`);
  }
  for (let index = 0; index < 5; index += 1) assert.equal(scene.indexAt(scene.place(index)), index);
  assert.deepEqual(readings(scene, 0).map(([label]) => label), ["O", "H", "L", "C", "Vol"]);
  assert.deepEqual(readings(scene, 4).slice(0, 2), [["Median", "2.30"], ["80 %", "1.40 – 3.50"]]);
});

test("the candle scene draws a history alone, and only the part asked for", () => {
  const scene = candleScene({ history: { ...HISTORY, volume: undefined } }, { width: 300, height: 200, shown: 2 });
  assert.equal(scene.bars.length, 2);
  assert.equal(scene.bars[0].open, 2);
  assert.ok(!scene.shapes.some((shape) => shape.fill === "--forecast"));
});

test("a long history stays a handful of shapes", () => {
  const many = 20_000;
  const column = (value) => Array.from({ length: many }, (_, at) => value + Math.sin(at));
  const timestamps = Array.from({ length: many }, (_, at) => new Date(Date.UTC(2020, 0, 1, at)).toISOString());
  const history = { timestamps, open: column(10), high: column(12), low: column(8), close: column(11), volume: column(5) };
  const { shapes } = candleScene({ history }, { width: 1000, height: 400 });
  assert.ok(shapes.length < 60, `${shapes.length} shapes`);
});

test("the tags of the last close and of the median never cover each other or a number of the axis", () => {
  const near = { ...QUANTILES, 0.5: { close: [2.5, 2.5] } };
  const { shapes } = candleScene({ history: HISTORY, forecast: AHEAD, quantiles: near }, { width: 600, height: 400 });
  const tags = shapes.filter((shape) => shape.rect && shape.radius === 4).map((shape) => shape.rect[1]);
  assert.equal(tags.length, 2);
  assert.ok(Math.abs(tags[0] - tags[1]) >= 18);
  const numbers = shapes.filter((shape) => shape.text && shape.at[0] > 540 && !shape.weight).map((shape) => shape.at[1] - 4);
  assert.ok(numbers.length > 1 && numbers.every((y) => tags.every((tag) => y < tag - 5 || y > tag + 23)));
});

test("rising and falling candles differ in more than colour", () => {
  const { shapes } = candleScene({ history: HISTORY }, { width: 600, height: 400 });
  const bodies = shapes.filter((shape) => shape.rect && shape.stroke);
  assert.deepEqual(bodies.map((body) => body.fill === body.stroke), [false, false, true]);
});

test("the ramp's lightness only falls on light pages and only rises on dark ones", () => {
  for (const [theme, sign] of [["light", -1], ["dark", 1]]) {
    let before = luminance(ramp(0, theme));
    for (let at = 1; at <= 50; at += 1) {
      const now = luminance(ramp(at / 50, theme));
      assert.ok((now - before) * sign > 0, `${theme} at ${at}`);
      before = now;
    }
  }
  assert.deepEqual(ramp(7, "light"), ramp(1, "light"));
  assert.deepEqual(ramp(Number.NaN, "light"), ramp(0, "light"));
});

test("cells of the heat map are short", () => {
  assert.deepEqual([0.664, -0.031, 1, -0.001, 0].map(cellText), [".66", "−.03", "1.00", ".00", ".00"]);
});

test("neighbours are the most alike, without the text itself", () => {
  const similarity = [[1, 0.2, 0.9], [0.2, 1, 0.1], [0.9, 0.1, 1]];
  assert.deepEqual(nearest(similarity, 0, 1), [{ index: 2, value: 0.9 }]);
});

test("labels cover neither each other nor the edge", () => {
  const sides = placeLabels([[50, 50], [60, 52], [290, 100]], [80, 80, 80], { width: 300 });
  assert.equal(sides[2], "left");
  assert.ok(sides.slice(0, 2).filter((side) => side === "right").length <= 1);
});

test("runs become groups of bars; a device keeps its colour and pales with age", () => {
  const row = (device, test, rate, unit = "GB/s", share = 0.5) => ({ device, test, rate, unit, limit: share && rate / share, share });
  const runs = [
    { run_id: "b", when: "2026-11-15T10:00:00Z", rows: [row("cpu", "copy, 1 MiB", 4), row("webgpu:0", "copy, 1 MiB", 2), row("cpu", "launch", 3, "µs", null)] },
    { run_id: "a", when: "2026-11-14T10:00:00Z", rows: [row("cpu", "copy, 1 MiB", 3), row("cpu", "launch", 6, "µs", null)] },
  ];
  const { series, groups } = seriesOf(runs, new Date("2026-11-15T12:00:00Z"));
  assert.deepEqual(series.map((one) => [one.colour, one.strength]), [["--series-1", 1], ["--series-1", 0.55], ["--series-2", 1]]);
  assert.deepEqual(groups.map((group) => [group.kind, group.unit, group.lowerIsBetter]), [["copy", "GB/s", false], ["launch", "µs", true]]);
  assert.deepEqual(groups[0].tests[0].bars.map((bar) => bar.rate), [4, 3, 2]);
  assert.deepEqual(groups[1].tests[0].bars.map((bar) => bar.length), [0.5, 1]);
  assert.deepEqual(splitTest("matmul, float32 64×64"), { kind: "matmul", name: "float32 64×64" });
  assert.equal(seriesOf([{ run_id: "x", when: "", rows: [row("cpu", "launch", 3, "µs", null)] }]).groups[0].tests[0].bars[0].length, null);
});

test("small rates are told in the smaller unit, unless a large one stands beside them", () => {
  const run = (...rates) => [{ run_id: "x", when: "", rows: rates.map((rate, at) => ({ device: `d${at}`, test: "matmul, a", unit: "TFLOP/s", rate, limit: 2 * rate, share: 0.5 })) }];
  const small = seriesOf(run(0.025, 0.5)).groups[0];
  assert.equal(small.unit, "GFLOP/s");
  assert.deepEqual(small.tests[0].bars.map((bar) => [bar.rate, bar.limit, bar.unit, bar.length]), [[25, 50, "GFLOP/s", 0.5], [500, 1000, "GFLOP/s", 0.5]]);
  assert.equal(seriesOf(run(0.025, 40)).groups[0].unit, "TFLOP/s");
});

test("a spark line grows from the right", () => {
  const points = sparkPoints([0, 1], 59, 40);
  assert.deepEqual(points, [[58, 39], [59, 1]]);
});

test("candidates: fast first, those without a time by the reason they share", () => {
  const one = (name, seconds, chosen = false, correct = true, reason = null) => ({ name, seconds, chosen, correct, reason });
  const found = ordered([
    one("slow", 3), one("no", null, false, false, "wrong: off by 3"), one("fast", 1, true), one("later", null),
    one("a", null, false, true, "no time"), one("b", null, false, true, "no time"),
  ]);
  assert.deepEqual(found.rows.map(({ name }) => name), ["fast", "slow"]);
  assert.deepEqual([found.slowest, found.refused], [3, [{ reason: "off by 3", names: ["no"] }]]);
  assert.deepEqual(found.untimed, [{ reason: "", names: ["later"] }, { reason: "no time", names: ["a", "b"] }]);
  assert.deepEqual(ordered([one("only", null, true)]).rows.length, 1);
});

test("kernel graphs with a record are told from other choices", () => {
  const [a, b] = [{ id: "a", picture: "/v1/graphs/a/picture.svg" }, { id: "b", kind: "kernel graph", picture: null }];
  assert.deepEqual(sorted([b, a]), { searched: [a], others: [b] });
});

test("a step is a kernel of ours or torch's own work", () => {
  assert.equal(stepWords({ ops: ["mul", "exp"], schedule: "m=4", text: "x" }), "2 ops in one kernel, m=4");
  assert.equal(stepWords({ ops: ["exp"], schedule: "m=4", text: "x" }), "exp, m=4");
  assert.equal(stepWords({ ops: ["matmul"], schedule: null, text: null }), "matmul by torch");
  assert.equal(stepWords({ ops: ["attention"], schedule: "handwritten: a", text: null, source: "a.h" }), "handwritten: a, a.h");
});

test("figures over tuned choices", () => {
  assert.deepEqual(summaryOf([{ speedup: 3, candidates: [1, 2] }, { speedup: 1, candidates: [1] }, { speedup: null, candidates: [] }]), { tried: 3, median: 2, best: 3 });
  assert.deepEqual(summaryOf([]), { tried: 0, median: null, best: null });
});
