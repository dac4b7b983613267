/** Sampling settings: a seed, and sliders that start at the model's defaults. */

import { recall, remember } from "../store/preferences.js";
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
  { field: "top_p", title: "Top-p", help: "How unlikely a choice may be.", min: 0.1, max: 1, step: 0.05 },
  { field: "top_k", title: "Top-k", help: "Number of choices; 0 is all.", min: 0, max: 200, step: 1 },
  {
    field: "repetition_penalty",
    title: "Repetition penalty",
    help: "Keeps sounds from getting stuck.",
    min: 0.9,
    max: 2,
    step: 0.05,
  },
  { field: "speed", title: "Speed", help: "At the same pitch.", min: 0.5, max: 2, step: 0.05, fallback: 1 },
  { field: "volume", title: "Volume", help: "Decibels.", min: -20, max: 20, step: 1, fallback: 0 },
];

export class SamplingForm {
  #defaults = {};

  constructor() {
    byId("sliders").replaceChildren(...SLIDERS.map((slider) => this.#row(slider)));
    byId("show-text").checked = recall("show-text", false);
    byId("show-text").addEventListener("change", () => remember("show-text", byId("show-text").checked || null));
    byId("sampling").addEventListener("submit", (event) => event.preventDefault());
    byId("sampling").addEventListener("reset", (event) => {
      event.preventDefault();
      byId("seed").value = "";
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

  /** The seed, or null for a random one; input that is not a number counts as none. */
  get seed() {
    const text = byId("seed").value.trim();
    return /^[0-9]{1,15}$/.test(text) ? Number(text) : null;
  }

  set seed(value) {
    byId("seed").value = value ?? "";
  }

  /** Whether the server is asked for the text as the model reads it. */
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
      this.#tell(slider);
    }
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
        "aria-describedby": `${field}-help`,
        input: () => this.#tell(slider),
      }),
      element("p", { class: "help", id: `${field}-help` }, help),
    );
  }

  #tell(slider) {
    const { value, min, max } = input(slider);
    input(slider).style.setProperty("--at", `${(100 * (value - min)) / (max - min)}%`);
    const isDefault = Number(value) === this.#defaultOf(slider);
    const words = byId(`${slider.field}-value`);
    words.textContent = `${Number(value)}${slider.field === "speed" ? "×" : slider.field === "volume" ? " dB" : ""}`;
    words.classList.toggle("moved", !isDefault);
  }
}

const input = ({ field }) => byId(field);
