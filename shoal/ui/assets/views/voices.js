/** Voice selection: stored voices, the model's built-in voices, or the model's own. */

import { readPreference, writePreference } from "../store/preferences.js";
import { byId, drawing, element, icon } from "./dom.js";
import { hash } from "./words.js";

const PENCIL = "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3";
const LISTEN = "M8.5 6v12l9.5-6z";
const OWN = { name: null, title: "Model’s own", note: "No reference; the seed decides" };
const SEARCH_FROM = 7; // voices; a shorter list is read faster than searched

/** Holds the name of the selected voice; null is the model's own. Dispatches `change`, `edit` and `preview`. */
export class VoicePicker extends EventTarget {
  voices = [];
  chosen = null;

  constructor() {
    super();
    byId("voice-search").addEventListener("input", () => this.#filter());
    byId("voice-search").addEventListener("keydown", (event) => this.#clearSearch(event));
  }

  /** `voices` as listed by /v1/about. Without a stored choice, selects the default or the first built-in voice. */
  show(voices) {
    this.voices = inOrder(voices);
    const standard = voices.find(isDefault)?.name;
    const wanted = readPreference("voice") ?? standard ?? this.voices.find(({ builtin }) => builtin)?.name;
    this.chosen = voices.some(({ name }) => name === wanted) ? wanted : (standard ?? null);
    this.#draw();
    this.dispatchEvent(new Event("change"));
  }

  choose(name) {
    writePreference("voice", name ?? "");
    this.show(this.voices);
  }

  /** Selects a voice and scrolls it into view, also if the search would hide it. */
  reveal(name) {
    byId("voice-search").value = "";
    this.choose(name);
    rowOf(name)?.scrollIntoView({ block: "nearest" });
  }

  /** Focuses the selected voice, if the element that had the focus is gone. */
  keepFocus() {
    if (document.activeElement !== document.body) return;
    rowOf(this.chosen)?.querySelector("input").focus({ preventScroll: true });
  }

  /** Returns the title of a voice, or its name if it has none. */
  titleOf(name) {
    return titleOf(this.voices.find((voice) => voice.name === name) ?? { name, title: "" });
  }

  /** Marks the voice whose preview plays; undefined for none. */
  markPreview(name) {
    for (const row of byId("voices").querySelectorAll(".voice")) {
      row.querySelector(".preview")?.setAttribute("aria-pressed", String(row.dataset.name === name));
    }
  }

  #draw() {
    const focused = document.activeElement?.closest?.(".voice")?.dataset.name;
    const groups = [
      ["", unnamed(this.voices)],
      ["Yours", this.voices.filter(({ builtin }) => !builtin)],
      ["Built in", this.voices.filter(({ builtin }) => builtin)],
    ];
    const rows = groups.flatMap(([title, voices]) => [
      ...(title && voices.length ? [element("p", { class: "group" }, title)] : []),
      ...voices.map((voice) => this.#row(voice)),
    ]);
    byId("voices").replaceChildren(...rows);
    byId("voice-search").hidden = this.voices.length < SEARCH_FROM;
    this.#filter();
    if (focused !== undefined) rowOf(focused)?.querySelector("input").focus();
  }

  /** Escape clears a search first; elsewhere on the page it stops the speech. */
  #clearSearch(event) {
    if (event.key !== "Escape" || !event.target.value) return;
    event.preventDefault();
    event.target.value = "";
    this.#filter();
  }

  #filter() {
    const wanted = byId("voice-search").value.trim().toLowerCase();
    const found = new Set(this.voices.filter((voice) => matches(voice, wanted)).map(({ name }) => name));
    for (const row of byId("voices").querySelectorAll(".voice")) {
      row.hidden = wanted !== "" && !found.has(row.dataset.name);
    }
    for (const group of byId("voices").querySelectorAll(".group")) group.hidden = wanted !== "";
    byId("voices-none").hidden = wanted === "" || found.size > 0;
  }

  #row(voice) {
    const { name } = voice;
    const input = element("input", {
      type: "radio",
      name: "voice",
      value: name ?? "",
      change: () => this.choose(name),
    });
    input.checked = name === this.chosen;
    const facts = [voice.accent, voice.gender].filter(Boolean).join(", ");
    const note = voice.note ?? (voice.description || (facts ? "" : voice.builtin ? "Built in" : "Saved"));
    const words = element(
      "span",
      { class: "voice-words" },
      element("b", {}, titleOf(voice), ...(facts ? [" ", element("small", {}, facts)] : [])),
      ...(note ? [element("small", {}, note)] : []),
    );
    const label = element("label", {}, input, portrait(name), words);
    return element("div", { class: "voice", "data-name": name ?? "" }, label, ...this.#buttons(voice));
  }

  #buttons(voice) {
    if (voice.name === null) return [];
    const button = (label, path, event, attributes = {}) =>
      element(
        "button",
        {
          type: "button",
          "aria-label": `${label} ${titleOf(voice)}`,
          title: label,
          click: () => this.dispatchEvent(new CustomEvent(event, { detail: voice })),
          ...attributes,
        },
        icon(path, event === "preview"),
      );
    const listen = button("Listen to", LISTEN, "preview", { class: "icon preview", "aria-pressed": "false" });
    return voice.builtin ? [listen] : [listen, button("Edit", PENCIL, "edit", { class: "icon" })];
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

/** Creates a select element for a form. */
export function voiceSelect(voices, chosen, attributes) {
  const options = [...unnamed(voices), ...inOrder(voices)].map((voice) => {
    const option = element("option", { value: voice.name ?? "" }, titleOf(voice));
    option.selected = voice.name === chosen;
    return option;
  });
  return element("select", attributes, ...options);
}

/** The user's voices first, then the default voice, then the other built-in voices by title. */
export function inOrder(voices) {
  const rank = (voice) => (voice.builtin ? (isDefault(voice) ? 1 : 2) : 0);
  return [...voices].sort((a, b) => rank(a) - rank(b) || titleOf(a).localeCompare(titleOf(b)));
}

/** Returns whether every typed word begins a word of the voice's names or description. */
export function matches(voice, wanted) {
  const { name, title, description, gender, accent, openai_names: names } = voice;
  const known = [name, title, description, gender, accent, ...(names ?? [])].join(" ").toLowerCase();
  // Only at the start of a word, so that "male" does not find "female".
  return wanted.split(/\s+/).every((word) => ` ${known}`.includes(` ${word}`));
}

const isDefault = (voice) => voice.default;
const titleOf = ({ name, title }) => title || name;
const rowOf = (name) => byId("voices").querySelector(`[data-name="${CSS.escape(name ?? "")}"]`);

/** Returns the row of the model's own voice. A model with a default voice has none. */
function unnamed(voices) {
  return voices.some(isDefault) ? [] : [OWN];
}
