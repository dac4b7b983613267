/** Renames, describes or deletes a saved voice. */

import { deleteVoice, describeVoice, renameVoice } from "../server/client.js";
import { byId, closable, showError } from "./dom.js";

const WORDS = ["title", "gender", "accent", "description", "preview"];

export class EditDialog extends EventTarget {
  #dialog = closable(byId("edit-dialog"));
  #name = "";

  constructor() {
    super();
    byId("edit-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const to = byId("new-name").value.trim();
      this.#change(() => this.#store(to), to);
    });
    byId("delete-voice").addEventListener("click", (event) => this.#confirmDelete(event.target));
  }

  /** `voice` as listed by /v1/about. */
  open(voice) {
    this.#name = voice.name;
    byId("edit-title").textContent = voice.title || voice.name;
    byId("new-name").value = voice.name;
    for (const word of WORDS) byId(`voice-${word}`).value = voice[word] ?? "";
    byId("delete-voice").textContent = "Delete voice";
    showError(byId("edit-error"), null);
    this.#dialog.showModal();
  }

  /** The first press asks for confirmation, the second deletes. */
  #confirmDelete(button) {
    if (button.textContent === "Delete voice") button.textContent = "Delete for good?";
    else this.#change(() => deleteVoice(this.#name), null);
  }

  async #store(name) {
    if (name !== this.#name) await renameVoice(this.#name, name);
    this.#name = name; // a second try after an error must not rename again
    await describeVoice(name, Object.fromEntries(WORDS.map((word) => [word, byId(`voice-${word}`).value.trim()])));
  }

  async #change(work, now) {
    const was = this.#name;
    try {
      await work();
      this.dispatchEvent(new CustomEvent("changed", { detail: { was, now } }));
      this.#dialog.close();
    } catch (problem) {
      showError(byId("edit-error"), problem);
    }
  }
}
