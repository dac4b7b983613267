/** Sampling settings: a seed, and sliders that start at the model's defaults. */

import { readPreference, writePreference } from "../store/preferences.js";
import { byId, element } from "./dom.js";

/** `field` is the name in /v1/tts; `fallback` is the default if the model has none. */
const SLIDERS = [
  {
    field: "temperature",
    title: "Temperature",
    help: "Higher is livelier, lower is steadier.",
    min: 0.1,
    max: 1.5,
    step: 0.05,
  },
  { field: "top_p", title: "Top-p", help: "Lower allows only the likelier choices.", min: 0.1, max: 1, step: 0.05 },
  { field: "top_k", title: "Top-k", help: "Number of choices; 0 is all.", min: 0, max: 200, step: 1 },
  {
    field: "repetition_penalty",
    title: "Repetition penalty",
    help: "Keeps sounds from getting stuck.",
    min: 0.9,
    max: 2,
    step: 0.05,
  },
  { field: "volume", title: "Volume", help: "Louder or quieter.", min: -20, max: 20, step: 1, fallback: 0, unit: "dB" },
  // This slider is beside the Speak button.
  { field: "speed", title: "Speed", min: 0.5, max: 2, step: 0.05, fallback: 1, unit: "×", place: "speed-place" },
];
const UNITS = { dB: "decibels", "×": "times normal speed" };
const SEED = /^[0-9]{1,15}$/;
const SEED_HELP = "The same seed, text and voice give the same audio.";
const WRONG_SEED = {
  title: "The seed is not a number",
  detail: "Use up to 15 digits, or leave it empty for a new one each time.",
};

export class SamplingForm {
  #defaults = {};

  constructor() {
    for (const slider of SLIDERS) byId(slider.place ?? "sliders").append(this.#row(slider));
    byId("seed").addEventListener("input", () => this.#showSeedProblem());
    byId("show-text").checked = readPreference("show-text", false);
    byId("show-text").addEventListener("change", () => writePreference("show-text", byId("show-text").checked || null));
    byId("sampling").addEventListener("submit", (event) => event.preventDefault());
    byId("sampling").addEventListener("reset", (event) => {
      event.preventDefault();
      this.seed = null;
      this.show({});
    });
    this.show({});
  }

  /** Sets the model's default sampling. */
  setDefaults(sampling) {
    const moved = this.moved;
    this.#defaults = sampling;
    this.show(moved);
  }

  /** The seed, or null for a random one. */
  get seed() {
    const text = byId("seed").value.trim();
    return SEED.test(text) ? Number(text) : null;
  }

  set seed(value) {
    byId("seed").value = value ?? "";
    this.#showSeedProblem();
  }

  /** The problem of the seed; null if it can be used. */
  get seedProblem() {
    const text = byId("seed").value.trim();
    return text === "" || SEED.test(text) ? null : WRONG_SEED;
  }

  /** Opens the settings and focuses the seed, so that the user can correct it. */
  focusSeed() {
    byId("advanced").open = true;
    byId("seed").focus();
  }

  /** True if the page requests the text as the model reads it. */
  get showsText() {
    return byId("show-text").checked;
  }

  /** The sliders that differ from their defaults. */
  get moved() {
    return Object.fromEntries(
      SLIDERS.filter((slider) => Number(input(slider).value) !== this.#defaultOf(slider)).map((slider) => [
        slider.field,
        Number(input(slider).value),
      ]),
    );
  }

  /** Returns the fields of /v1/tts. */
  get options() {
    const { speed, volume, ...sampling } = this.moved;
    if (speed === undefined && volume === undefined) return sampling;
    return { ...sampling, prosody: { speed: speed ?? 1, volume: volume ?? 0 } };
  }

  show(moved) {
    for (const slider of SLIDERS) {
      input(slider).value = moved[slider.field] ?? this.#defaultOf(slider);
      this.#showValue(slider);
    }
  }

  #showSeedProblem() {
    const problem = this.seedProblem;
    byId("seed").setAttribute("aria-invalid", String(problem !== null));
    byId("seed-help").textContent = problem ? `${problem.title}. ${problem.detail}` : SEED_HELP;
    byId("seed-help").classList.toggle("wrong", problem !== null);
  }

  #defaultOf({ field, fallback, min }) {
    return fallback ?? this.#defaults[field] ?? min;
  }

  #row(slider) {
    const { field, title, help, min, max, step } = slider;
    return element(
      "div",
      { class: "field slider" },
      element("label", { for: field }, title),
      element("output", { id: `${field}-value`, for: field }),
      element("input", {
        id: field,
        type: "range",
        min,
        max,
        step,
        "aria-describedby": help ? `${field}-help` : null,
        input: () => this.#showValue(slider),
      }),
      ...(help ? [element("p", { class: "help", id: `${field}-help` }, help)] : []),
    );
  }

  #showValue(slider) {
    const { value, min, max } = input(slider);
    input(slider).style.setProperty("--at", `${(100 * (value - min)) / (max - min)}%`);
    const isDefault = Number(value) === this.#defaultOf(slider);
    const words = byId(`${slider.field}-value`);
    words.textContent = `${Number(value)}${slider.unit === "dB" ? " dB" : (slider.unit ?? "")}`;
    const spoken = [Number(value), UNITS[slider.unit], isDefault ? "(default)" : ""].filter((word) => word !== undefined);
    input(slider).setAttribute("aria-valuetext", spoken.join(" ").trim());
    words.classList.toggle("moved", !isDefault);
  }
}

const input = ({ field }) => byId(field);
