// Files in (dropped, chosen) and out (saved).

import { el, icon, uniqueId } from "./dom.js";

/** A place to drop a file, with a button that opens the chooser. `onFile(file)` gets each one. */
export function dropZone(words, accept, onFile) {
  const id = uniqueId("file");
  const input = el("input", { id, type: "file", accept, class: "unseen" });
  const zone = el(
    "div",
    { class: "drop" },
    input,
    el("label", { for: id, class: "drop-label" }, icon("file"), el("span", {}, el("b", { text: "Choose a file" }), ` ${words}`)),
  );
  input.addEventListener("change", () => {
    if (input.files[0]) onFile(input.files[0]);
    input.value = ""; // so that choosing the same file again is heard
  });
  acceptDrops(zone, onFile);
  return zone;
}

export function acceptDrops(zone, onFile) {
  // Entering a child fires leave on the parent: count, or the frame flickers.
  let inside = 0;
  const light = (change) => {
    inside = Math.max(0, inside + change);
    zone.classList.toggle("over", inside > 0);
  };
  zone.addEventListener("dragenter", (event) => {
    event.preventDefault();
    light(1);
  });
  zone.addEventListener("dragleave", () => light(-1));
  zone.addEventListener("dragover", (event) => event.preventDefault());
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    light(-inside);
    const file = event.dataTransfer.files[0];
    if (file) onFile(file);
  });
}

export function save(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = el("a", { href: address, download: name, class: "unseen" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
