/** Creates elements. Children are text or nodes, never markup, so user input cannot inject HTML. */

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

export function icon(path, solid = false) {
  const shape = drawing("path", { d: path, ...(solid ? { class: "solid" } : {}) });
  return drawing("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, shape);
}

/** Functions become listeners, true an empty attribute; null and false are omitted. */
function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A dialog that closes by its buttons, by Escape, and by a click outside. */
export function closable(dialog) {
  for (const button of dialog.querySelectorAll("[data-close]")) button.addEventListener("click", () => dialog.close());
  dialog.addEventListener("pointerdown", (event) => {
    if (event.target === dialog) dialog.close();
  });
  return dialog;
}

export function showError(node, problem) {
  node.hidden = !problem;
  node.textContent = problem ? `${problem.title}. ${problem.detail}` : "";
}
