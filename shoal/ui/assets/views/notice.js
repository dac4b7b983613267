/** Shows an error with the next step to take. */

import { byId } from "./dom.js";

let countdown = 0;

/** `retry` is offered when the server sent Retry-After, or when a retry may help. */
export function tell(problem, retry = null) {
  clear();
  byId("notice-title").textContent = problem.title;
  byId("notice-detail").textContent = problem.detail;
  byId("notice").hidden = false;
  if (retry) offer(retry, problem.retryAfter ?? 0);
}

export function clear() {
  clearInterval(countdown);
  byId("notice").hidden = true;
  byId("notice-action").hidden = true;
}

function offer(retry, seconds) {
  const button = byId("notice-action");
  let left = Math.ceil(seconds);
  const show = () => {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left-- <= 0) clearInterval(countdown);
  };
  button.hidden = false;
  button.onclick = () => {
    clear();
    retry();
  };
  show();
  if (seconds > 0) countdown = setInterval(show, 1000);
}

byId("notice-close").addEventListener("click", clear);
