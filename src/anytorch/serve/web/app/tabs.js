// Tabs as the WAI-ARIA practices describe them: arrows move, Home and End jump, only the selected one is a tab stop.

/** `show(name)` is called when a panel comes to the front, `hide(name)` when it leaves. */
export function startTabs(list, { show, hide }) {
  const tabs = [...list.querySelectorAll('[role="tab"]')];
  const nameOf = (tab) => tab.id.replace("tab-", "");
  let selected = null;

  const select = (tab, { focus = false, remember = true } = {}) => {
    if (focus) tab.focus();
    if (tab === selected) return;
    for (const other of tabs) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", String(chosen));
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
    }
    if (selected) hide(nameOf(selected));
    selected = tab;
    document.title = `${tab.textContent.trim()} · anytorch`;
    // replaceState: a tab is a place to come back to by its address, not a step in the history.
    if (remember) history.replaceState(null, "", `#${nameOf(tab)}`);
    show(nameOf(tab));
  };

  list.addEventListener("click", (event) => {
    const tab = event.target.closest('[role="tab"]');
    if (tab) {
      select(tab);
      scrollTo(0, 0);
    }
  });
  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(selected);
    const to = {
      ArrowRight: at + 1,
      ArrowDown: at + 1,
      ArrowLeft: at - 1,
      ArrowUp: at - 1,
      Home: 0,
      End: tabs.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(tabs[(to + tabs.length) % tabs.length], { focus: true });
  });

  // The rail stands upright on a wide window and lies at the foot of a narrow one.
  const wide = matchMedia("(min-width: 60rem)");
  const orient = () => list.setAttribute("aria-orientation", wide.matches ? "vertical" : "horizontal");
  wide.addEventListener("change", orient);
  orient();

  const fromAddress = () => tabs.find((tab) => nameOf(tab) === location.hash.slice(1));
  addEventListener("hashchange", () => {
    const tab = fromAddress();
    if (tab) select(tab);
  });
  select(fromAddress() ?? tabs[0], { remember: false });
}
