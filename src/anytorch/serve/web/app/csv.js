// Reading and writing comma-separated files, as far as the page needs it. The service reads the file itself and decides;
// this is the look at it before it is sent. Pure.

const SEPARATORS = [",", ";", "\t", "|"];

/** The separator that the first line has most of, outside quotes. */
export function separatorOf(text) {
  const line = (text.match(/^[^\r\n]*/) ?? [""])[0].replace(/"[^"]*"/g, "");
  return SEPARATORS.reduce((best, candidate) => (line.split(candidate).length > line.split(best).length ? candidate : best));
}

/** Rows of fields. Quoted fields may hold separators, line breaks and doubled quotes; empty lines are left out. */
export function parseCsv(text, separator = separatorOf(text)) {
  const rows = [];
  let row = [];
  let field = "";
  let quoted = false;
  const endField = () => {
    row.push(field);
    field = "";
  };
  const endRow = () => {
    endField();
    if (row.length > 1 || row[0] !== "") rows.push(row);
    row = [];
  };
  for (let at = text.charCodeAt(0) === 0xfeff ? 1 : 0; at < text.length; at += 1) {
    const sign = text[at];
    if (quoted) {
      if (sign !== '"') field += sign;
      else if (text[at + 1] === '"') {
        field += '"';
        at += 1;
      } else quoted = false;
    } else if (sign === '"' && field === "") quoted = true;
    else if (sign === separator) endField();
    else if (sign === "\n") endRow();
    else if (sign !== "\r") field += sign;
  }
  if (field !== "" || row.length) endRow();
  return rows;
}

/** A file's text out of rows. A field with a separator, a quote or a line break is quoted. */
export function writeCsv(rows) {
  const quote = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(quote).join(",")).join("\r\n") + "\r\n";
}

const NAMES = {
  timestamps: /^(timestamps?|date_?time|datetime|date|time|day|open_?time)$/i,
  open: /^(open|o|open_price)$/i,
  high: /^(high|h|high_price|max)$/i,
  low: /^(low|l|low_price|min)$/i,
  close: /^(close|c|close_price|last|price_close)$/i,
  volume: /^(volume|vol|v)$/i,
};

/**
 * What the file looks like: {rows, columns, from, to, candles | null}. `candles` is there when the columns' names are the
 * usual ones and the times are ISO dates: enough to draw the history before it is sent.
 */
export function lookAtCandles(text) {
  const [header = [], ...rows] = parseCsv(text);
  const at = {};
  for (const [name, pattern] of Object.entries(NAMES)) at[name] = header.findIndex((column) => pattern.test(column.trim()));
  const summary = { rows: rows.length, columns: header, from: "", to: "", candles: null };
  if (at.timestamps < 0 || !rows.length) return summary;
  summary.from = rows[0][at.timestamps];
  summary.to = rows[rows.length - 1][at.timestamps];
  const needed = ["open", "high", "low", "close"];
  if (needed.some((name) => at[name] < 0) || !/^\d{4}-\d{2}-\d{2}/.test(summary.from)) return summary;
  const candles = { timestamps: rows.map((row) => row[at.timestamps]) };
  for (const name of [...needed, ...(at.volume < 0 ? [] : ["volume"])]) {
    candles[name] = rows.map((row) => Number.parseFloat(row[at[name]]));
  }
  const whole = needed.every((name) => candles[name].every(Number.isFinite));
  return { ...summary, candles: whole ? candles : null };
}

/** The forecast as a table: times, the forecast's columns, then the closes of every quantile. */
export function forecastRows({ forecast, quantiles = {} }) {
  const columns = ["open", "high", "low", "close", "volume", "amount"].filter((name) => forecast[name]);
  const levels = Object.keys(quantiles).sort((a, b) => a - b);
  const header = ["timestamps", ...columns, ...levels.map((level) => `close_q${level}`)];
  const rows = forecast.timestamps.map((time, at) => [
    time,
    ...columns.map((name) => forecast[name][at]),
    ...levels.map((level) => quantiles[level].close[at]),
  ]);
  return [header, ...rows];
}
