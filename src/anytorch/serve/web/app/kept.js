// What was typed survives a reload: kept in the tab's own storage, which ends with the tab and is never sent anywhere.

const PREFIX = "anytorch-typed-";
const LARGEST = 1 << 20; // characters: a tab has five million in all

/** What was kept under a name, or null. */
export function kept(name) {
  try {
    return sessionStorage.getItem(PREFIX + name);
  } catch {
    return null; // no storage: then nothing is kept
  }
}

/** Keep a text under a name; what is too long, or empty of meaning (null), is forgotten instead. */
export function keep(name, text) {
  try {
    if (text === null || text.length > LARGEST) sessionStorage.removeItem(PREFIX + name);
    else sessionStorage.setItem(PREFIX + name, text);
  } catch {
    // The storage is full or there is none: what is typed is still there until the page is left.
  }
}

/** Give a field back what was typed into it, and keep what will be. */
export function keepField(name, input) {
  const before = kept(name);
  if (before !== null) {
    if (input.type === "checkbox") input.checked = before === "true";
    else input.value = before;
  }
  const note = () => keep(name, input.type === "checkbox" ? String(input.checked) : input.value);
  input.addEventListener("input", note);
  input.addEventListener("change", note);
  return input;
}
