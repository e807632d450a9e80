// Numbers as people read them. Pure.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  let unit = 0;
  let amount = value;
  while (amount >= 1024 && unit < BINARY.length - 1) {
    amount /= 1024;
    unit += 1;
  }
  return `${amount >= 100 || unit === 0 ? amount.toFixed(0) : amount.toFixed(1)} ${BINARY[unit]}`;
}

/** Three significant digits, no exponent for what people write without one; thousands are grouped by a thin space. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-4) return value.toExponential(digits - 1).replace("e+", "e");
  if (size >= 10 ** digits) return grouped(Math.round(value));
  return String(Number(value.toPrecision(digits)));
}

export function grouped(value) {
  return String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

export function percent(share, digits = 0) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = share * 100;
  return `${value > 0 && value < 1 && digits === 0 ? "<1" : value.toFixed(digits)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 1e-3) return `${number(seconds * 1e6)} µs`;
  if (seconds < 1) return `${number(seconds * 1e3)} ms`;
  if (seconds < 100) return `${number(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} days`;
}

/** A price with as many decimals as tell two neighbouring ticks of `step` apart. */
export function price(value, step = 0.01) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const decimals = Math.max(0, Math.min(8, Math.ceil(-Math.log10(step) - 1e-9)));
  return value.toFixed(decimals);
}

/** "22.7 M", "630 K": parameters of a model. */
export function compact(value) {
  for (const [size, name] of [[1e9, "B"], [1e6, "M"], [1e3, "K"]]) {
    if (value >= size) return `${number(value / size)} ${name}`;
  }
  return String(value);
}

export function plural(count, one, many = `${one}s`) {
  return `${grouped(count)} ${count === 1 ? one : many}`;
}

/** Messages of programs begin with a small letter; a heading does not. A path or an option keeps the one it has. */
export function capitalised(text) {
  return /^[a-z]+(?=[\s,;:]|$)/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
}

export function shorten(text, length) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length <= length ? line : `${line.slice(0, length - 1).trimEnd()}…`;
}

/** "today 14:05", "yesterday 09:12" or "3 Nov 14:05" of an ISO time, in the reader's own zone. */
export function when(iso, now = new Date()) {
  const time = new Date(iso);
  if (Number.isNaN(time.getTime())) return iso;
  const clock = `${String(time.getHours()).padStart(2, "0")}:${String(time.getMinutes()).padStart(2, "0")}`;
  const midnight = (date) => new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime();
  const days = Math.round((midnight(now) - midnight(time)) / 86400e3);
  if (days === 0) return `today ${clock}`;
  if (days === 1) return `yesterday ${clock}`;
  const month = time.toLocaleString("en-GB", { month: "short" });
  const year = time.getFullYear() === now.getFullYear() ? "" : ` ${time.getFullYear()}`;
  return `${time.getDate()} ${month}${year} ${clock}`;
}
