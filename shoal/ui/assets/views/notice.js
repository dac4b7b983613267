/** Shows an error, or a question, with the next steps to take. */

import { byId } from "./dom.js";

let countdown = 0;

/** `actions` are at most two of { label, work, after }; `after` is the number of seconds to wait before it is offered. */
export function show(problem, ...actions) {
  clear();
  byId("notice-title").textContent = problem.title;
  byId("notice-detail").textContent = problem.detail;
  byId("notice").hidden = false;
  actions.forEach((action, at) => offer(byId(at ? "notice-other" : "notice-action"), action));
}

export function clear() {
  clearInterval(countdown);
  // A hidden button loses the focus, and the keyboard starts again at the top of the page.
  if (byId("notice").contains(document.activeElement)) byId("speak").focus({ preventScroll: true });
  byId("notice").hidden = true;
  byId("notice-action").hidden = true;
  byId("notice-other").hidden = true;
}

function offer(button, { label, work, after = 0 }) {
  let left = Math.ceil(after);
  const show = () => {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `${label} in ${left} s` : label;
    if (left-- <= 0) clearInterval(countdown);
  };
  button.hidden = false;
  button.onclick = () => {
    clear();
    work();
  };
  show();
  if (after > 0) countdown = setInterval(show, 1000);
}

byId("notice-close").addEventListener("click", clear);
