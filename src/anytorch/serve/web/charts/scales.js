// From values to places and back, and where an axis has its marks. Pure.

/** A straight line from [from, to] to [start, end]. An empty domain is given some room, so nothing divides by zero. */
export function linear([from, to], [start, end]) {
  const span = to - from || 1;
  const scale = (value) => start + ((value - from) / span) * (end - start);
  scale.invert = (place) => from + ((place - start) / (end - start || 1)) * span;
  scale.domain = [from, to];
  return scale;
}

/** 1, 2 or 5 times a power of ten: the step that makes about `count` marks. */
export function niceStep(span, count) {
  if (!(span > 0)) return 1;
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = raw / power;
  return power * (size < 1.5 ? 1 : size < 3.5 ? 2 : size < 7.5 ? 5 : 10);
}

export function ticks(from, to, count) {
  const step = niceStep(to - from, count);
  const marks = [];
  for (let at = Math.ceil(from / step - 1e-9); at * step <= to + step * 1e-9; at += 1) {
    marks.push(Number((at * step).toPrecision(12)));
  }
  return { marks, step };
}

/** The smallest and largest of finite values, with `share` of the span added at both ends. */
export function extent(values, share = 0) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}

/**
 * Milliseconds of the clock on the wall where the data was made: candles are read by their own exchange's time, so an
 * offset is dropped, not applied. NaN for what is no time.
 */
export function wallTime(text) {
  const match = /^(\d{4})-(\d{2})-(\d{2})(?:[T ](\d{2}):(\d{2})(?::(\d{2}))?)?/.exec(text);
  if (!match) return Number.NaN;
  const [year, month, day, hour, minute, second] = match.slice(1).map((part) => Number(part ?? 0));
  return Date.UTC(year, month - 1, day, hour, minute, second);
}

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const two = (value) => String(value).padStart(2, "0");
const clock = (date) => `${two(date.getUTCHours())}:${two(date.getUTCMinutes())}`;
const day = (date) => `${date.getUTCDate()} ${MONTHS[date.getUTCMonth()]}`;
const month = (date) => (date.getUTCMonth() ? MONTHS[date.getUTCMonth()] : String(date.getUTCFullYear()));

const MINUTE = 60e3;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const monthsOf = (ms) => new Date(ms).getUTCFullYear() * 12 + new Date(ms).getUTCMonth();
const every = (size) => (ms) => Math.floor(ms / size);
// A mark stands at the first candle of each new unit; the finest unit whose marks fit is taken.
const UNITS = [
  ...[5, 15, 30].map((n) => ({ of: every(n * MINUTE), label: clock })),
  ...[1, 2, 4, 6, 12].map((n) => ({ of: every(n * HOUR), label: clock })),
  ...[1, 2].map((n) => ({ of: every(n * DAY), label: day })),
  { of: (ms) => Math.floor((ms / DAY + 3) / 7), label: day }, // weeks begin on Monday; day 0 was a Thursday
  ...[1, 2, 3, 6].map((n) => ({ of: (ms) => Math.floor(monthsOf(ms) / n), label: month })),
  ...[1, 2, 5, 10].map((n) => ({ of: (ms) => Math.floor(monthsOf(ms) / 12 / n), label: (d) => String(d.getUTCFullYear()) })),
];

/**
 * Labels for candles that stand side by side whatever the time between them (nights and weekends take no room):
 * [{index, text, major}]. The first clock time of another day carries the day.
 */
export function timeMarks(times, most) {
  for (const { of, label } of UNITS) {
    const marks = [];
    for (let index = 1; index < times.length; index += 1) {
      if (of(times[index]) !== of(times[index - 1])) marks.push(index);
    }
    if (!marks.length || marks.length > most) continue;
    let last = Math.floor(times[0] / DAY);
    return marks.map((index) => {
      const date = new Date(times[index]);
      const today = Math.floor(times[index] / DAY);
      const major = label === clock && today !== last;
      last = today;
      return { index, text: major ? day(date) : label(date), major };
    });
  }
  return [];
}

/** "Tue 12 May 2026, 14:30" of wall time; without the clock where every candle is a day or more. */
export function longTime(ms, withClock = true) {
  if (!Number.isFinite(ms)) return "";
  const date = new Date(ms);
  const weekday = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"][date.getUTCDay()];
  return `${weekday} ${day(date)} ${date.getUTCFullYear()}${withClock ? `, ${clock(date)}` : ""}`;
}
