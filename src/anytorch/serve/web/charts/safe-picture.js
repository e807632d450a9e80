// A picture that came as SVG text, without anything that could run or reach outside. The content security policy would
// stop it too; two locks are better than one.

const REFUSED = new Set(["script", "foreignObject", "style", "iframe", "image", "animate", "set", "handler"]);

export function safePicture(text, title) {
  const parsed = new DOMParser().parseFromString(text, "image/svg+xml");
  const root = parsed.documentElement;
  if (root.nodeName !== "svg" || parsed.querySelector("parsererror")) return null;
  for (const node of [root, ...root.querySelectorAll("*")]) {
    if (REFUSED.has(node.localName)) {
      node.remove();
      continue;
    }
    for (const { name, value } of [...node.attributes]) {
      const points = name === "href" || name === "xlink:href";
      if (name.startsWith("on") || name === "style" || (points && !value.startsWith("#"))) node.removeAttribute(name);
    }
  }
  root.setAttribute("role", "img");
  root.setAttribute("aria-label", `Picture of ${title}`);
  return document.importNode(root, true);
}
