// Building the page without a framework and without innerHTML, so that no text from anywhere can become markup.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. Attributes are set as they are, except `text`, `on` (listeners by event) and `style` (an object, set
 * through the CSS object model: the content security policy forbids style attributes). null and false are left out.
 */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") node.textContent = value;
    else if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (key === "style") setStyle(node, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function setStyle(node, properties) {
  for (const [name, value] of Object.entries(properties)) node.style.setProperty(name, value);
}

export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `web/icons/sprite.svg#${name}` }));
}

let counter = 0;

/** An id nobody else has, to tie a label or a description to what it belongs to. */
export function uniqueId(prefix) {
  counter += 1;
  return `${prefix}-${counter}`;
}

/** Tell those who do not see the page. Said again even if the words are the same as last time. */
export function announce(words) {
  const place = document.getElementById("announcer");
  place.textContent = "";
  setTimeout(() => (place.textContent = words), 60);
}

/** Call `listener(width)` now and whenever the element's width changes; charts are drawn for the width they have. */
export function onWidth(element, listener) {
  let last = 0;
  const look = () => {
    const width = Math.floor(element.clientWidth);
    if (width > 0 && width !== last) {
      last = width;
      listener(width);
    }
  };
  new ResizeObserver(look).observe(element);
  look();
}

export function debounce(wait, action) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), wait);
  };
}
