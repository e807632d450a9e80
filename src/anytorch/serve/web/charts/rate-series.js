// Benchmark runs, turned into what the bars show: groups of tests, each with one bar per device and run. Pure.

import { when } from "../app/format.js";

export const COLOURS = 6; // --series-1 … --series-6; after that they begin again
const STRENGTHS = [1, 0.55, 0.32];

/** "matmul, float32 1024×1024" → its kind ("matmul") and the rest, which names the bar. */
export function splitTest(test) {
  const [kind, ...rest] = test.split(", ");
  return { kind, name: rest.join(", ") || kind };
}

/**
 * `runs` newest first. A device has one colour; its earlier runs are paler, so that before and after lie side by side.
 * {series: [{key, label, colour, strength}],
 *  groups: [{kind, unit, lowerIsBetter, tests: [{name, bars: [{series, rate, unit, limit, share, length}]}]}]}
 */
export function seriesOf(runs, now = new Date()) {
  const devices = [...new Set(runs.flatMap((run) => run.rows.map((row) => row.device)))];
  const series = devices.flatMap((device, at) =>
    runs
      .filter((run) => run.rows.some((row) => row.device === device))
      .map((run, age) => ({
        key: `${run.run_id} ${device}`,
        label: runs.length > 1 ? `${device}, ${run.run_id === "live" ? "running now" : when(run.when, now)}` : device,
        colour: `--series-${(at % COLOURS) + 1}`,
        strength: STRENGTHS[Math.min(age, STRENGTHS.length - 1)],
      })),
  );
  const order = new Map(series.map((one, at) => [one.key, at]));

  const groups = new Map();
  for (const run of runs) {
    for (const row of run.rows) {
      const { kind, name } = splitTest(row.test);
      const id = `${kind} ${row.unit}`;
      if (!groups.has(id)) groups.set(id, { kind, unit: row.unit, lowerIsBetter: /^([µmn]?s|seconds)$/.test(row.unit), tests: new Map() });
      const { tests } = groups.get(id);
      if (!tests.has(name)) tests.set(name, []);
      const { rate, unit, limit, share } = row;
      tests.get(name).push({ series: series[order.get(`${run.run_id} ${row.device}`)], rate, unit, limit, share });
    }
  }
  return {
    series,
    groups: [...groups.values()].map(withReadableUnit).map((group) => ({
      ...group,
      tests: [...group.tests].map(([name, bars]) => ({
        name,
        bars: bars
          .sort((a, b) => order.get(a.series.key) - order.get(b.series.key))
          .map((bar) => ({ ...bar, length: lengthOf(bar, bars) })),
      })),
    })),
  };
}

/** A processor's 0.025 TFLOP/s reads better as 25 GFLOP/s; beside a device that reaches whole ones it stays as it is. */
function withReadableUnit(group) {
  const bars = [...group.tests.values()].flat();
  if (group.unit !== "TFLOP/s" || bars.some((bar) => bar.rate >= 1)) return group;
  const unit = "GFLOP/s";
  const scaled = (bar) => ({ ...bar, unit, rate: bar.rate * 1000, limit: bar.limit && bar.limit * 1000 });
  return { ...group, unit, tests: new Map([...group.tests].map(([name, list]) => [name, list.map(scaled)])) };
}

/** How long a bar is, from 0 to 1: the share of the limit; where none is known, against the longest of the same test. */
function lengthOf(bar, bars) {
  if (Number.isFinite(bar.share)) return Math.min(1, bar.share);
  return bars.length > 1 ? bar.rate / Math.max(...bars.map((other) => other.rate)) : null;
}
