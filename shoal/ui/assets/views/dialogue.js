/** Lines for several speakers. Each speaker has a voice and a colour. */

import { readPreference, writePreference } from "../store/preferences.js";
import { byId, element, icon } from "./dom.js";
import { voiceSelect } from "./voices.js";

const MOST_SPEAKERS = 6;
const CROSS = "m7 7 10 10M17 7 7 17";
const FIRST_TURNS = [
  { speaker: 0, text: "Did you hear that?" },
  { speaker: 1, text: "Hear what? It is only the tide." },
  { speaker: 0, text: "The tide does not say my name." },
];

export class DialogueEditor extends EventTarget {
  #voices = [];
  #cast = null; // the voice of each speaker, null for the model's own
  turns = readPreference("turns", FIRST_TURNS);

  constructor() {
    super();
    byId("add-turn").addEventListener("click", () => this.#addTurn(this.turns.length));
    byId("add-speaker").addEventListener("click", () => this.#addSpeaker());
    this.#drawTurns();
  }

  get cast() {
    return this.#cast ?? [null, null];
  }

  /** Turns that have text. */
  get spoken() {
    return this.turns.filter(({ text }) => text.trim());
  }

  /** Speakers whose voice was deleted fall back to the model's own voice. */
  show(voices) {
    this.#voices = voices;
    const known = new Set(voices.map(({ name }) => name));
    const wanted = this.#cast ?? readPreference("cast") ?? this.#firstCast();
    this.#cast = wanted.map((name) => (known.has(name) ? name : null));
    this.#drawCast();
    this.#drawTurns();
  }

  replace(turns, cast) {
    this.turns = turns.map((turn) => ({ ...turn }));
    this.#cast = [...cast];
    this.show(this.#voices);
    this.#changed();
  }

  /** Marks the line that is playing; null for none. */
  mark(turn) {
    byId("turns").childNodes.forEach((row, n) => {
      const now = turn !== null && this.turns[n] === this.spoken[turn];
      if (now) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
  }

  #firstCast() {
    return [0, 1].map((n) => this.#voices[n]?.name ?? null);
  }

  #addTurn(at) {
    const before = this.turns[at - 1];
    const speaker = before ? (before.speaker + 1) % this.cast.length : 0;
    this.turns.splice(at, 0, { speaker, text: "" });
    this.#drawTurns();
    this.#changed();
    byId("turns").children[at].querySelector("textarea").focus();
  }

  #removeTurn(at) {
    this.turns.splice(at, 1);
    this.#drawTurns();
    this.#changed();
    const near = byId("turns").children[Math.min(at, this.turns.length - 1)];
    (near?.querySelector("textarea") ?? byId("add-turn")).focus();
  }

  #addSpeaker() {
    this.#cast = [...this.cast, this.#voices[this.cast.length % Math.max(1, this.#voices.length)]?.name ?? null];
    this.#drawCast();
    if (byId("add-speaker").hidden) byId("cast").lastElementChild.querySelector("select").focus();
    this.#drawTurns();
    this.#changed();
  }

  #drawCast() {
    const rows = this.cast.map((voice, speaker) => {
      const select = voiceSelect(this.#voices, voice, {
        change: ({ target }) => {
          this.#cast[speaker] = target.value || null;
          this.#changed();
        },
      });
      return element(
        "label",
        { class: `cast-row speaker-${speaker}` },
        element("span", {}, `Speaker ${speaker + 1}`),
        select,
      );
    });
    byId("cast").replaceChildren(...rows);
    byId("add-speaker").hidden = this.cast.length >= MOST_SPEAKERS;
  }

  #drawTurns() {
    byId("turns").replaceChildren(...this.turns.map((turn, at) => this.#turn(turn, at)));
  }

  #turn(turn, at) {
    const speakers = this.cast.map((_, n) => {
      const option = element("option", { value: n }, `Speaker ${n + 1}`);
      option.selected = n === turn.speaker;
      return option;
    });
    const row = element("li", { class: `turn speaker-${turn.speaker}` });
    const choose = ({ target }) => {
      turn.speaker = Number(target.value);
      row.className = `turn speaker-${turn.speaker}`;
      this.#changed();
    };
    const words = element("textarea", {
      rows: 1,
      "aria-label": `Line ${at + 1}`,
      placeholder: "What is said",
      input: ({ target }) => {
        turn.text = target.value;
        this.#changed();
      },
    });
    words.value = turn.text;
    row.append(
      element("select", { "aria-label": `Speaker of line ${at + 1}`, change: choose }, ...speakers),
      words,
      element(
        "button",
        { type: "button", class: "icon", "aria-label": `Remove line ${at + 1}`, click: () => this.#removeTurn(at) },
        icon(CROSS),
      ),
    );
    return row;
  }

  #changed() {
    writePreference("turns", this.turns);
    writePreference("cast", this.cast);
    this.dispatchEvent(new Event("change"));
  }
}
