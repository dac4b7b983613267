/** Text input: plain text or a dialogue. */

import { LONG_SECONDS, PASSAGE_CHARACTERS, characters, dialogue, expectedSeconds, monologue } from "../speech/lines.js";
import { readPreference, writePreference } from "../store/preferences.js";
import { byId, element } from "./dom.js";
import { plural, approximate } from "./words.js";

const TRIES = {
  "A greeting": "Hello! I am a small voice from a large shoal. It is good to be heard.",
  "A report": "On 3 May at 6:45, the buoy measured 12.5 °C and waves of 2 m. By noon, 128 boats had left the harbour.",
  "A story":
    "There was once a fisherman who never cast his net. Every morning he rowed out past the last buoy, laid his oars " +
    "across his knees, and listened.\n\nThe others laughed at him, at first. They came home with herring and mackerel; he came " +
    "home with stories. But in the year when the sea was empty, it was his door they knocked on, one after the other, " +
    "with bread under their arms, and asked him what the water had said.\n\nHe told them. It took all winter. And when the ice " +
    "broke, nobody in the village was afraid of the quiet any more.",
};

const LONG_CHARACTERS = 280; // longer texts have a smaller font, so that the player stays in view

export class Composer extends EventTarget {
  #dialogue;
  #picker;
  #maxCharacters = PASSAGE_CHARACTERS;

  constructor(dialogueEditor, picker) {
    super();
    this.#dialogue = dialogueEditor;
    this.#picker = picker;
    this.text = readPreference("text", TRIES["A greeting"]);
    byId("tries").replaceChildren(...Object.entries(TRIES).map(([name, text]) => this.#try(name, text)));
    byId("text").addEventListener("input", () => this.#changed());
    byId("mode").addEventListener("change", () => this.#changed());
    dialogueEditor.addEventListener("change", () => this.#changed());
    this.mode = readPreference("mode", "speech");
  }

  /** Sets the server's maximum text length in characters. */
  set maxCharacters(max) {
    this.#maxCharacters = Math.min(PASSAGE_CHARACTERS, max);
  }

  get mode() {
    return document.querySelector("input[name=mode]:checked").value;
  }

  set mode(value) {
    document.querySelector(`input[name=mode][value=${value === "dialogue" ? value : "speech"}]`).checked = true;
    this.#changed();
  }

  get text() {
    return byId("text").value;
  }

  set text(value) {
    byId("text").value = value;
  }

  /** The length of the text in characters: the counter and the notice about its length agree. */
  get letters() {
    return this.mode === "speech" ? this.text.length : characters(this.#dialogue.spoken);
  }

  get lines() {
    if (this.mode === "speech") return monologue(this.text, this.#picker.chosen, this.#maxCharacters);
    return dialogue(this.#dialogue.spoken, this.#dialogue.cast, this.#maxCharacters);
  }

  /** Returns the state needed to restore this input later. */
  get draft() {
    const { turns, cast } = this.#dialogue;
    return {
      mode: this.mode,
      text: this.text,
      voice: this.#picker.chosen,
      turns: turns.map((turn) => ({ ...turn })),
      cast: [...cast],
    };
  }

  take({ mode, text, voice, turns, cast }) {
    if (mode === "dialogue") this.#dialogue.replace(turns, cast);
    else {
      this.text = text;
      this.#picker.choose(voice);
    }
    this.mode = mode;
  }

  #try(name, text) {
    const take = () => {
      this.text = text;
      this.mode = "speech";
      byId("text").focus();
    };
    return element("button", { type: "button", class: "chip", click: take }, name);
  }

  #changed() {
    const speech = this.mode === "speech";
    byId("speech-editor").hidden = !speech;
    byId("text").classList.toggle("long", this.text.length > LONG_CHARACTERS);
    byId("tries").hidden = !speech;
    byId("dialogue-editor").hidden = speech;
    byId("voices-note").hidden = speech;
    writePreference("text", this.text);
    writePreference("mode", this.mode);
    byId("count").textContent = sizeInWords(this.letters);
    byId("count").classList.toggle("wrong", expectedSeconds(this.letters) > LONG_SECONDS);
    this.dispatchEvent(new Event("change"));
  }
}

function sizeInWords(letters) {
  if (!letters) return "Nothing to say yet";
  return `${plural(letters, "character")}, ${approximate(expectedSeconds(letters))}`;
}
