// A classic script that runs before the first paint: without it a remembered dark theme would flash light.
try {
  const theme = localStorage.getItem("anytorch-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage can be forbidden; then the page follows the system.
}
