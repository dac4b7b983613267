/** Dialog for a speech: download it, or copy the requests that generate it again. */

import { key } from "../server/client.js";
import { LANGUAGES, snippet } from "../speech/snippets.js";
import { readPreference, writePreference } from "../store/preferences.js";
import { byId, closable, element, showError } from "./dom.js";
import { FORMAT_NAMES, downloadTrack } from "./download.js";

const NOT_COPIED = { title: "Not copied", detail: "The page may not copy here. Select the text and copy it." };

export class ShareDialog {
  #dialog = closable(byId("share-dialog"));
  #speech = null;
  #track = null;
  formats = ["wav", "pcm"];

  constructor() {
    const choices = Object.entries(LANGUAGES).map(([value, name]) => {
      const input = element("input", { type: "radio", name: "language", value, change: () => this.#showCode(value) });
      return element("label", {}, input, element("span", {}, name));
    });
    byId("share-languages").append(...choices);
    byId("copy-code").addEventListener("click", () => this.#copy());
  }

  /** `speech` has text, requests and options; `track` its samples and rate. */
  open(speech, track) {
    this.#speech = speech;
    this.#track = track;
    byId("share-text").textContent = speech.text;
    byId("share-formats").replaceChildren(...this.formats.map((format) => this.#download(format)));
    const language = readPreference("language", "curl");
    byId("share-languages").querySelector(`[value=${language in LANGUAGES ? language : "curl"}]`).checked = true;
    this.#showCode(language in LANGUAGES ? language : "curl");
    showError(byId("share-error"), null);
    this.#dialog.showModal();
  }

  #download(format) {
    const take = () => downloadTrack(this.#track, format).catch((problem) => showError(byId("share-error"), problem));
    return element("li", {}, element("button", { type: "button", class: "chip", click: take }, FORMAT_NAMES[format]));
  }

  #showCode(language) {
    writePreference("language", language);
    const server = { url: document.baseURI, needsKey: key.get() !== "" };
    byId("share-code").textContent = snippet(language, this.#speech, server);
    byId("copy-code").textContent = "Copy";
  }

  async #copy() {
    const copied = await copyText(byId("share-code"));
    byId("copy-code").textContent = copied ? "Copied" : "Copy";
    showError(byId("share-error"), copied ? null : NOT_COPIED);
  }
}

/** Copies a text. Browsers offer the clipboard only over https and on localhost; elsewhere the selection is copied. */
async function copyText(node) {
  try {
    await navigator.clipboard.writeText(node.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(node);
    return document.execCommand("copy");
  }
}
