/** Voice selection: the model's built-in voices, stored voices, or the model's own. */

import { recall, remember } from "../store/preferences.js";
import { byId, drawing, element, icon } from "./dom.js";
import { hash } from "./words.js";

const PENCIL = "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3";
const OWN = { name: null, title: "Model’s own", note: "No reference; the seed decides" };

/** Holds the name of the selected voice; null is the model's own. Dispatches `change` and `edit`. */
export class VoicePicker extends EventTarget {
  voices = [];
  chosen = null;

  /** `voices` as listed by /v1/about. Without a stored choice, selects the default or the first built-in voice. */
  show(voices) {
    this.voices = voices;
    const usual = voices.find(({ usual }) => usual)?.name;
    const wanted = recall("voice") ?? usual ?? voices.find(({ builtin }) => builtin)?.name;
    this.chosen = voices.some(({ name }) => name === wanted) ? wanted : (usual ?? null);
    this.#draw();
    this.dispatchEvent(new Event("change"));
  }

  choose(name) {
    remember("voice", name ?? "");
    this.show(this.voices);
  }

  #draw() {
    const focused = document.activeElement?.closest?.(".voice")?.dataset.name;
    const built = this.voices
      .filter(({ builtin }) => builtin)
      .map(({ name }) => ({ name, title: name, note: "Built in" }));
    const saved = this.voices
      .filter(({ builtin }) => !builtin)
      .map(({ name }) => ({ name, title: name, note: "Saved", editable: true }));
    const rows = [...unnamed(this.voices), ...built, ...saved];
    byId("voices").replaceChildren(...rows.map((voice) => this.#row(voice)));
    if (focused !== undefined)
      byId("voices")
        .querySelector(`[data-name="${CSS.escape(focused)}"] input`)
        ?.focus();
  }

  #row({ name, title, note, editable }) {
    const input = element("input", {
      type: "radio",
      name: "voice",
      value: name ?? "",
      change: () => this.choose(name),
    });
    input.checked = name === this.chosen;
    const words = element("span", { class: "voice-words" }, element("b", {}, title), element("small", {}, note));
    const label = element("label", {}, input, portrait(name), words);
    const edit =
      editable &&
      element(
        "button",
        {
          type: "button",
          class: "icon",
          "aria-label": `Edit ${title}`,
          click: () => this.dispatchEvent(new CustomEvent("edit", { detail: name })),
        },
        icon(PENCIL),
      );
    return element("div", { class: "voice", "data-name": name ?? "" }, label, ...(edit ? [edit] : []));
  }
}

/** Icon derived from the name: five bars of varying height, in one of six colours. */
export function portrait(name) {
  const number = name === null ? 0 : hash(name);
  const bars = [0, 1, 2, 3, 4].map((n) => {
    const height = name === null ? 4 : 5 + ((number >>> (3 * n + 4)) % 8) * 1.7;
    return drawing("rect", { x: 7 + 4.1 * n, y: 16 - height / 2, width: 2.4, height, rx: 1.2 });
  });
  const tint = name === null ? "own" : `tint-${number % 6}`;
  return drawing("svg", { class: `portrait ${tint}`, viewBox: "0 0 32 32", "aria-hidden": "true" }, ...bars);
}

/** A model with a default voice has no voice of its own. */
function unnamed(voices) {
  return voices.some(({ usual }) => usual) ? [] : [OWN];
}

/** Creates a select element for a form. */
export function voiceSelect(voices, chosen, attributes) {
  const known = voices.map(({ name }) => ({ name, title: name }));
  const options = [...unnamed(voices), ...known].map(({ name, title }) => {
    const option = element("option", { value: name ?? "" }, title);
    option.selected = name === chosen;
    return option;
  });
  return element("select", attributes, ...options);
}
