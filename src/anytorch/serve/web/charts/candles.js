// Candles with their forecast as a list of shapes (scene.js). Pure: the panel draws it on the page and into a PNG.

import { price, number } from "../app/format.js";
import { areaPath, linePath, round } from "./scene.js";
import { extent, linear, ticks, timeMarks, wallTime } from "./scales.js";

const MARGIN = { top: 10, right: 58, bottom: 26, left: 6 };
const GAP = 14; // between prices and volume
const NARROW = 1.6; // pixels of a bar's body, below which areas are drawn instead

/** [[low level, high level], …] from the widest to the narrowest, of levels that stand symmetrically around the median. */
export function bandsOf(quantiles) {
  const levels = Object.keys(quantiles).map(Number).sort((a, b) => a - b);
  const bands = [];
  for (let at = 0; at < Math.floor(levels.length / 2); at += 1) bands.push([levels[at], levels[levels.length - 1 - at]]);
  return bands;
}

/** A level's columns whatever way the service wrote the number ("0.1", "0.10"). */
export function atLevel(quantiles, level) {
  const key = Object.keys(quantiles).find((name) => Number(name) === level);
  return key === undefined ? undefined : quantiles[key];
}

/**
 * `answer`: {history, forecast?, quantiles?, samples?}, as /v1/forecast gives it. `shown`: how many bars of history.
 * Gives {shapes, bars, place(index), indexAt(x), priceAt, plot, step}.
 */
export function candleScene(answer, { width, height, shown = Infinity, paths = false }) {
  const { history, forecast, quantiles = {}, samples } = answer;
  const first = Math.max(0, history.timestamps.length - shown);
  const past = barsOf(history, first);
  const ahead = forecast ? barsOf(forecast, 0) : [];
  const bars = [...past, ...ahead.map((bar) => ({ ...bar, ahead: true }))];
  const bands = bandsOf(quantiles).map(([low, high]) => ({
    low: atLevel(quantiles, low).close,
    high: atLevel(quantiles, high).close,
    levels: [low, high],
  }));
  const median = forecast ? (atLevel(quantiles, 0.5)?.close ?? forecast.close) : [];

  const hasVolume = bars.some((bar) => bar.volume > 0);
  const bottom = height - MARGIN.bottom;
  const volumeHeight = hasVolume ? Math.min(72, (bottom - MARGIN.top) * 0.18) : 0;
  const plot = {
    left: MARGIN.left,
    right: width - MARGIN.right,
    top: MARGIN.top,
    bottom: bottom - (hasVolume ? volumeHeight + GAP : 0),
    foot: bottom,
  };

  const pitch = (plot.right - plot.left) / Math.max(1, bars.length);
  const x = (index) => plot.left + (index + 0.5) * pitch;
  const seen = [...past.flatMap((bar) => [bar.low, bar.high]), ...median, ...bands.flatMap((band) => [...band.low, ...band.high])];
  if (paths && samples) for (const sample of samples) seen.push(...sample.close);
  const y = linear(extent(seen, 0.04), [plot.bottom, plot.top]);
  const axis = ticks(y.domain[0], y.domain[1], Math.max(3, Math.round((plot.bottom - plot.top) / 56)));

  // The last close and the end of the median are tagged on the axis, one above the other if they are close.
  const tags = tagsOf(last(past)?.close, ahead.length ? last(median) : undefined, y);

  const shapes = [
    ...priceAxis(axis, y, plot, tags),
    ...timeAxis(bars, x, plot, width),
    ...(hasVolume ? volumeBars(bars, x, pitch, plot) : []),
    ...(ahead.length ? todayLine(x(past.length - 1) + pitch / 2, plot) : []),
    ...candleShapes(past, x, y, pitch),
  ];
  if (ahead.length) {
    const joined = (values) => [last(past).close, ...values].map((value, at) => [x(past.length - 1 + at), y(value)]);
    const clipped = paths && samples ? samples : [];
    bands.forEach((band, at) => {
      shapes.push({
        path: areaPath(joined(band.high), joined(band.low)),
        fill: "--forecast",
        opacity: round(0.16 + 0.14 * at),
      });
    });
    for (const sample of clipped) {
      shapes.push({ path: linePath(joined(sample.close)), stroke: "--forecast", width: 0.8, opacity: 0.35 });
    }
    shapes.push({ path: linePath(joined(median)), stroke: "--forecast", width: 2.2 });
    const end = [x(bars.length - 1), y(last(median))];
    shapes.push({ circle: [...end, 3.2], fill: "--forecast", stroke: "--surface", width: 1.5 });
  }
  for (const tag of tags) shapes.push(...priceTag(tag, plot, axis.step));

  return {
    shapes,
    bars,
    bands,
    median,
    past: past.length,
    plot,
    step: axis.step,
    place: x,
    priceAt: y,
    indexAt: (at) => Math.max(0, Math.min(bars.length - 1, Math.floor((at - plot.left) / pitch))),
  };
}

const last = (values) => values[values.length - 1];

function barsOf(series, first) {
  return series.timestamps.slice(first).map((text, at) => ({
    time: wallTime(text),
    open: series.open[first + at],
    high: series.high[first + at],
    low: series.low[first + at],
    close: series.close[first + at],
    volume: series.volume?.[first + at] ?? 0,
  }));
}

function priceAxis({ marks, step }, y, plot, tags) {
  return marks.flatMap((value) => {
    const at = round(y(value));
    const line = { line: [plot.left, at, plot.right, at], stroke: "--grid" };
    if (tags.some((tag) => Math.abs(tag.at - at) < 15)) return [line]; // the tag would stand on it
    return [line, { text: price(value, step), at: [plot.right + 8, at + 4], fill: "--ink-soft", size: 11 }];
  });
}

function timeAxis(bars, x, plot, width) {
  const marks = timeMarks(
    bars.map((bar) => bar.time),
    Math.max(2, Math.floor(width / 84)),
  );
  // After a night the first hours stand close together: a day's name wins over the clock beside it.
  const days = marks.filter((mark) => mark.major).map((mark) => x(mark.index));
  const free = ({ index, major }) => major || days.every((day) => Math.abs(x(index) - day) > 48);
  return marks.filter(free).flatMap(({ index, text, major }) => {
    const at = round(x(index));
    const near = at < plot.left + 18 ? "start" : at > plot.right - 14 ? "end" : "middle";
    return [
      { line: [at, plot.top, at, plot.foot], stroke: "--grid", opacity: major ? 1 : 0.6 },
      { text, at: [at, plot.foot + 17], fill: "--ink-soft", size: 11, anchor: near, weight: major ? 600 : 400 },
    ];
  });
}

function volumeBars(bars, x, pitch, plot) {
  const [, most] = extent([0, ...bars.map((bar) => bar.volume)]);
  const y = linear([0, most], [plot.foot, plot.bottom + GAP]);
  const wide = Math.min(12, pitch * 0.66);
  const shapes =
    wide < NARROW
      ? [{ path: areaPath(bars.map((bar, at) => [x(at), y(bar.volume)]), [[x(0), plot.foot], [x(bars.length - 1), plot.foot]]), fill: "--up", opacity: 0.4 }]
      : bars.map((bar, at) => ({
          rect: [round(x(at) - wide / 2), round(y(bar.volume)), round(wide), round(Math.max(0, plot.foot - y(bar.volume)))],
          fill: bar.ahead ? "--forecast" : bar.close >= bar.open ? "--up" : "--down",
          opacity: 0.4,
        }));
  shapes.push({ text: `Volume, up to ${number(most)}`, at: [plot.left + 2, plot.bottom + GAP - 2], fill: "--ink-soft", size: 10 });
  shapes.push({ line: [plot.left, plot.foot, plot.right, plot.foot], stroke: "--line-strong" });
  return shapes;
}

function todayLine(at, plot) {
  return [{ line: [round(at), plot.top, round(at), plot.foot], stroke: "--line-strong", dash: [3, 4] }];
}

/** Rising candles are hollow and falling ones full: the direction is told by more than the colour. */
function candleShapes(bars, x, y, pitch) {
  const wide = Math.min(13, pitch * 0.68);
  if (wide < NARROW) {
    // Too narrow for a body, and thousands of shapes would be slow: a line of closes over the span of each bar says
    // the same and stays readable.
    return [
      { path: areaPath(bars.map((bar, at) => [x(at), y(bar.high)]), bars.map((bar, at) => [x(at), y(bar.low)])), fill: "--up", opacity: 0.25 },
      { path: linePath(bars.map((bar, at) => [x(at), y(bar.close)])), stroke: "--up", width: 1.4 },
    ];
  }
  return bars.flatMap((bar, at) => {
    const rising = bar.close >= bar.open;
    const colour = rising ? "--up" : "--down";
    const top = round(y(Math.max(bar.open, bar.close)));
    const tall = Math.max(1, round(y(Math.min(bar.open, bar.close)) - top));
    const middle = round(x(at));
    const wick = wide < 4 ? 1 : 1.3;
    return [
      { line: [middle, round(y(bar.high)), middle, top], stroke: colour, width: wick },
      { line: [middle, top + tall, middle, round(y(bar.low))], stroke: colour, width: wick },
      {
        rect: [round(middle - wide / 2), top, round(wide), tall],
        fill: rising && wide > 3 ? "--surface" : colour,
        stroke: wide > 3 ? colour : undefined, // an outline would cover half of a thin neighbour
        width: wick,
        radius: wide > 6 ? 1 : 0,
      },
    ];
  });
}

const TAG = 18; // its height

function tagsOf(now, then, y) {
  const tags = [];
  if (now !== undefined) tags.push({ value: now, at: y(now), fill: "--ink-soft", ink: "--surface" });
  if (then !== undefined) tags.push({ value: then, at: y(then), fill: "--forecast", ink: "--on-forecast" });
  if (tags.length === 2 && Math.abs(tags[0].at - tags[1].at) < TAG + 1) {
    const [upper, lower] = tags[0].at <= tags[1].at ? tags : [tags[1], tags[0]];
    const middle = (upper.at + lower.at) / 2;
    upper.at = middle - (TAG + 1) / 2;
    lower.at = middle + (TAG + 1) / 2;
  }
  return tags;
}

function priceTag({ value, at, fill, ink }, plot, step) {
  const text = price(value, step / 10);
  at = round(at);
  return [
    { rect: [plot.right + 2, at - TAG / 2, 54, TAG], fill, radius: 4 },
    { text, at: [plot.right + 8, at + 4], fill: ink, size: 11, weight: 600 },
  ];
}

/** What the crosshair reads at a bar: pairs of a label and a text. */
export function readings(scene, index) {
  const bar = scene.bars[index];
  const step = scene.step / 10;
  const volume = bar.volume > 0 ? [["Vol", number(bar.volume)]] : [];
  if (!bar.ahead) {
    return [["O", price(bar.open, step)], ["H", price(bar.high, step)], ["L", price(bar.low, step)], ["C", price(bar.close, step)], ...volume];
  }
  const at = index - scene.past;
  const spans = scene.bands.map(({ low, high, levels }) => [
    `${Math.round((levels[1] - levels[0]) * 100)} %`,
    `${price(low[at], step)} – ${price(high[at], step)}`,
  ]);
  return [["Median", price(scene.median[at], step)], ...spans, ...volume];
}
