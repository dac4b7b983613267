/** Asks for the API key and stores it. */

import { key } from "../server/client.js";
import { byId, closable, showError } from "./dom.js";

const dialog = closable(byId("key-dialog"));

/** Resolves to true when a key was entered, to false when the dialog was cancelled. */
export function askForKey(problem = null) {
  showError(byId("key-error"), problem);
  byId("key").value = key.get();
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  byId("key").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  dialog.close("given");
});

byId("forget-key").addEventListener("click", () => {
  key.set("");
  dialog.close("given");
});
