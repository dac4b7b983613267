"use strict";
// Tooltips of the charts, and the switch between light and dark. The page is complete without scripts.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
document.addEventListener("pointermove", (event) => {
  const mark = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 4 ? above : event.clientY + 18}px`;
});
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
