/** Renames or deletes a saved voice. */

import { deleteVoice, renameVoice } from "../server/client.js";
import { byId, closable, showError } from "./dom.js";

export class EditDialog extends EventTarget {
  #dialog = closable(byId("edit-dialog"));
  #name = "";

  constructor() {
    super();
    byId("edit-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const to = byId("new-name").value.trim();
      this.#change(() => renameVoice(this.#name, to), to);
    });
    byId("delete-voice").addEventListener("click", (event) => this.#confirmDelete(event.target));
  }

  open(name) {
    this.#name = name;
    byId("edit-title").textContent = name;
    byId("new-name").value = name;
    byId("delete-voice").textContent = "Delete voice";
    showError(byId("edit-error"), null);
    this.#dialog.showModal();
  }

  /** The first press asks, the second deletes. */
  #confirmDelete(button) {
    if (button.textContent === "Delete voice") button.textContent = "Delete for good?";
    else this.#change(() => deleteVoice(this.#name), null);
  }

  async #change(work, now) {
    try {
      await work();
      this.dispatchEvent(new CustomEvent("changed", { detail: { was: this.#name, now } }));
      this.#dialog.close();
    } catch (problem) {
      showError(byId("edit-error"), problem);
    }
  }
}
