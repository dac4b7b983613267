// Applies the stored theme before the first paint; without one, the system's theme is used.
(() => {
  try {
    const chosen = JSON.parse(localStorage.getItem("shoal.theme"));
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is blocked or broken: use the system's theme.
  }
})();
