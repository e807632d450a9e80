// The switch between the system's theme, light and dark. Charts that resolve colours themselves hear "themechange".

const KEY = "anytorch-theme";
const CHOICES = ["system", "light", "dark"];
const SAID = { system: "as the system", light: "light", dark: "dark" };

export function startTheme(button) {
  let choice = document.documentElement.dataset.theme ?? "system";
  const show = () => {
    if (choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.setAttribute("aria-label", `Theme: ${SAID[choice]}`);
    button.title = `Theme: ${SAID[choice]}`;
    button.querySelector("use").setAttribute("href", `web/icons/sprite.svg#theme-${choice}`);
    document.dispatchEvent(new CustomEvent("themechange"));
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    try {
      localStorage.setItem(KEY, choice);
    } catch {
      // Not remembered, then; the switch itself still works.
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.dispatchEvent(new CustomEvent("themechange")),
  );
  show();
}

/** What a colour variable is now, as the browser computes it: canvas understands no var() and no light-dark(). */
export function colourOf(variable) {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}
