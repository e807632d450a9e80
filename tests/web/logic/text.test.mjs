// Reading what people paste, drop and stream. Run by tests/web/test_logic.py: node --test.

import assert from "node:assert/strict";
import { test } from "node:test";

const web = "../../../src/anytorch/serve/web/";
const { forecastRows, lookAtCandles, parseCsv, separatorOf, writeCsv } = await import(`${web}app/csv.js`);
const { textsOf, textsOfFile } = await import(`${web}app/texts.js`);
const { EventParser } = await import(`${web}app/sse.js`);
const { problemOf } = await import(`${web}app/api.js`);
const { commandsIn, isCommand } = await import(`${web}app/notices.js`);
const { blocksOf, spansOf } = await import(`${web}app/markdown.js`);
const format = await import(`${web}app/format.js`);

test("csv: quotes, separators and line ends", () => {
  assert.deepEqual(parseCsv('a,b\r\n"x, y","say ""hi"""\n\n"two\nlines",\n'), [
    ["a", "b"],
    ["x, y", 'say "hi"'],
    ["two\nlines", ""],
  ]);
  assert.deepEqual(parseCsv("\ufeffa;b\n1;2"), [["a", "b"], ["1", "2"]]);
  assert.equal(separatorOf('"a,b,c";d;e'), ";");
  assert.deepEqual(parseCsv(""), []);
});

test("csv: what is written is read back", () => {
  const rows = [["plain", 'with "quotes"'], ["a,b", "line\nbreak"], ["", "0.5"]];
  assert.deepEqual(parseCsv(writeCsv(rows)), rows);
});

test("candles are found by the usual names, and left to the service otherwise", () => {
  const look = lookAtCandles("Date,Open,High,Low,Close,Vol\n2026-01-02,1,2,0.5,1.5,10\n2026-01-03,1.5,2,1,1.2,11\n");
  assert.equal(look.rows, 2);
  assert.deepEqual(look.candles.close, [1.5, 1.2]);
  assert.deepEqual(look.candles.volume, [10, 11]);
  assert.equal(look.to, "2026-01-03");
  assert.equal(lookAtCandles("when,price\n1,2\n").candles, null);
  assert.equal(lookAtCandles("date,open,high,low,close\n2026-01-02,1,2,x,1\n").candles, null);
  assert.equal(lookAtCandles("date,open,high,low,close\n02.01.2026,1,2,1,1\n").candles, null);
});

test("the forecast's table has the quantiles in order", () => {
  const rows = forecastRows({
    forecast: { timestamps: ["t"], open: [1], high: [2], low: [0], close: [1.5] },
    quantiles: { 0.9: { close: [3] }, 0.05: { close: [1] } },
  });
  assert.deepEqual(rows, [
    ["timestamps", "open", "high", "low", "close", "close_q0.05", "close_q0.9"],
    ["t", 1, 2, 0, 1.5, 1, 3],
  ]);
});

test("texts come out of lines, tables and json", () => {
  assert.deepEqual(textsOf(" a \n\n b\r\nc"), ["a", "b", "c"]);
  assert.deepEqual(textsOfFile("x.csv", "id,text\n1,one\n2,two"), ["one", "two"]);
  assert.deepEqual(textsOfFile("x.csv", "id,note\n1,a long note\n2,another note"), ["a long note", "another note"]);
  assert.deepEqual(textsOfFile("x.csv", "one text\nanother text"), ["one text", "another text"]);
  assert.deepEqual(textsOfFile("x.jsonl", '{"text":"one"}\n"two"'), ["one", "two"]);
  assert.deepEqual(textsOfFile("x.json", '["one", {"title": "two"}, {"n": 3}]'), ["one", "two"]);
  assert.deepEqual(textsOfFile("x.json", "not json\nat all"), ["not json", "at all"]);
});

test("events survive any cut", () => {
  const wire = 'event: progress\ndata: {"a":1}\n\n: a comment\r\ndata: one\r\ndata: two\r\n\r\ndata:[DONE]\n\n';
  const expected = [
    { event: "progress", data: '{"a":1}' },
    { event: "message", data: "one\ntwo" },
    { event: "message", data: "[DONE]" },
  ];
  for (let size = 1; size <= wire.length; size += 1) {
    const parser = new EventParser();
    const found = [];
    for (let at = 0; at < wire.length; at += size) found.push(...parser.push(wire.slice(at, at + size)));
    assert.deepEqual(found, expected, `pieces of ${size}`);
  }
});

test("every kind of failure becomes a problem with words", () => {
  const told = problemOf(422, "application/problem+json", '{"title":"No","detail":"because","hint":"do `x`","status":422}');
  assert.deepEqual([told.title, told.detail, told.hint, told.status], ["No", "because", "do `x`", 422]);
  assert.equal(problemOf(400, "application/json", '{"error":{"message":"OpenAI says no"}}').title, "OpenAI says no");
  assert.equal(problemOf(502, "text/html", "<h1>bad gateway</h1>").detail, "");
  assert.equal(problemOf(500, "application/json", "{broken").title, "The service answered 500");
});

test("commands are told from sentences", () => {
  assert.ok(isCommand("pip install torch"));
  assert.ok(!isCommand("use the cpu device"));
  assert.deepEqual(commandsIn("start it with: anytorch serve"), ["anytorch serve"]);
  assert.deepEqual(commandsIn("run `anytorch doctor` or wait"), ["anytorch doctor"]);
  assert.deepEqual(commandsIn("the field `model` is wrong"), []);
});

test("markdown of the doctor's pages", () => {
  const blocks = blocksOf("# Title\n\none\ntwo\n\n## Part\n* a\n  b\n* c\n```\nx = 1\n```\nend");
  assert.deepEqual(blocks, [
    { kind: "heading", level: 1, text: "Title" },
    { kind: "paragraph", text: "one two" },
    { kind: "heading", level: 2, text: "Part" },
    { kind: "list", items: ["a b", "c"] },
    { kind: "code", text: "x = 1\n" },
    { kind: "paragraph", text: "end" },
  ]);
  assert.deepEqual(spansOf("run `x`, see <https://a.b> or [this](https://c.d)."), [
    { text: "run " },
    { code: "x" },
    { text: ", see " },
    { link: "https://a.b", text: "https://a.b" },
    { text: " or " },
    { link: "https://c.d", text: "this" },
    { text: "." },
  ]);
  assert.deepEqual(spansOf("[no](javascript:alert(1))"), [{ text: "[no](javascript:alert(1))" }]);
});

test("numbers read as people write them", () => {
  assert.equal(format.bytes(23 * 2 ** 30), "23.0 GiB");
  assert.equal(format.bytes(null), "–");
  assert.equal(format.number(1234567), "1\u202f234\u202f567");
  assert.equal(format.number(0.012345), "0.0123");
  assert.equal(format.percent(0.004), "<1 %");
  assert.equal(format.duration(0.0000042), "4.2 µs");
  assert.equal(format.duration(3725), "1 h 2 min");
  assert.equal(format.price(91.23456, 0.05), "91.23");
  assert.equal(format.price(50000, 500), "50000");
  assert.deepEqual([22713216, 31000, 1.7e9, 12].map(format.compact), ["22.7 M", "31 K", "1.7 B", "12"]);
  assert.equal(format.capitalised("the card"), "The card");
  assert.equal(format.capitalised("/dev/shm is small"), "/dev/shm is small");
  assert.equal(format.shorten("a  long\ntext here", 8), "a long…");
  const now = new Date(2026, 10, 15, 12, 0);
  assert.equal(format.when(new Date(2026, 10, 14, 9, 5).toISOString(), now), "yesterday 09:05");
});
