// The chosen theme, before anything is painted; without a choice the system's is used.
(() => {
  try {
    const chosen = JSON.parse(localStorage.getItem("shoal.theme"));
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Nothing is kept here, or nothing readable: the system's theme will do.
  }
})();
