// Texts out of what people paste or drop. Pure.

import { parseCsv } from "./csv.js";

/** One text per line; empty lines are left out. */
export function textsOf(text) {
  return text.split(/\r\n|\n|\r/).map((line) => line.trim()).filter(Boolean);
}

/** The texts of a dropped file, by its name: lines, JSON, JSON lines, or the wordiest column of a table. */
export function textsOfFile(name, content) {
  const kind = name.toLowerCase().split(".").pop();
  try {
    if (kind === "json") return ofValues(JSON.parse(content));
    if (kind === "jsonl" || kind === "ndjson") return ofValues(textsOf(content).map((line) => JSON.parse(line)));
  } catch {
    return textsOf(content); // not what its name says: its lines are still texts
  }
  if (kind === "csv" || kind === "tsv") return ofTable(parseCsv(content, kind === "tsv" ? "\t" : undefined));
  return textsOf(content);
}

const FIELDS = ["text", "content", "sentence", "body", "title", "name"];

function ofValues(values) {
  const list = Array.isArray(values) ? values : [values];
  return list
    .map((value) => (typeof value === "string" ? value : FIELDS.map((field) => value?.[field]).find((found) => typeof found === "string")))
    .filter((text) => text && text.trim());
}

function ofTable(rows) {
  const [header = [], ...body] = rows;
  const named = header.findIndex((column) => FIELDS.includes(column.trim().toLowerCase()));
  const lengths = header.map((_, at) => body.reduce((sum, row) => sum + (row[at]?.length ?? 0), 0));
  const column = named >= 0 ? named : lengths.indexOf(Math.max(...lengths));
  const used = named >= 0 || header.length > 1 ? body : rows; // a single column without a known name has no heading
  return used.map((row) => (row[column] ?? "").trim()).filter(Boolean);
}
