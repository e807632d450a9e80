// As much of Markdown as the doctor's pages use: headings, paragraphs, lists, code and links. Built as elements, so that
// nothing in a page can become markup of ours.

import { el } from "./dom.js";

/** [{kind: "heading" | "paragraph" | "list" | "code", level?, text?, items?}]. Pure. */
export function blocksOf(markdown) {
  const blocks = [];
  let open = null; // the paragraph or list that the next line may go on with
  let fence = null;
  for (const line of markdown.split(/\r?\n/)) {
    if (line.startsWith("```")) {
      if (fence) blocks.push(fence);
      fence = fence ? null : { kind: "code", text: "" };
      open = null;
    } else if (fence) fence.text += `${line}\n`;
    else if (!line.trim()) open = null;
    else if (/^#{1,6} /.test(line)) {
      const level = line.indexOf(" ");
      blocks.push({ kind: "heading", level, text: line.slice(level + 1) });
      open = null;
    } else if (/^[*-] /.test(line)) {
      if (open?.kind !== "list") blocks.push((open = { kind: "list", items: [] }));
      open.items.push(line.slice(2));
    } else if (open?.kind === "list") open.items[open.items.length - 1] += ` ${line.trim()}`;
    else if (open) open.text += ` ${line.trim()}`;
    else blocks.push((open = { kind: "paragraph", text: line.trim() }));
  }
  return blocks;
}

/** [{text} | {code} | {link, text}]: what stands inside a line. Pure. */
export function spansOf(text) {
  const pattern = /`([^`]+)`|<(https?:[^>]+)>|\[([^\]]+)\]\((https?:[^)]+)\)/g;
  const spans = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > at) spans.push({ text: text.slice(at, match.index) });
    if (match[1]) spans.push({ code: match[1] });
    else spans.push({ link: match[2] ?? match[4], text: match[3] ?? match[2] });
    at = match.index + match[0].length;
  }
  if (at < text.length) spans.push({ text: text.slice(at) });
  return spans;
}

function inside(text) {
  return spansOf(text).map((span) => {
    if (span.code) return el("code", { text: span.code });
    if (span.link) return el("a", { href: span.link, rel: "noreferrer", target: "_blank", text: span.text });
    return span.text;
  });
}

/** Elements for everything below the title and the line under it, which the reader has seen already. */
export function readable(markdown) {
  return blocksOf(markdown)
    .filter((block) => (block.kind === "heading" ? block.level > 1 : !/^`[a-z-]+` · /.test(block.text ?? "")))
    .map((block) => {
      if (block.kind === "heading") return el("h5", {}, inside(block.text));
      if (block.kind === "list") return el("ul", {}, block.items.map((item) => el("li", {}, inside(item))));
      if (block.kind === "code") return el("pre", { tabindex: "0" }, el("code", { text: block.text }));
      return el("p", {}, inside(block.text));
    });
}
