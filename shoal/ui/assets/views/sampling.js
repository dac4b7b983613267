/** How codes are drawn: a seed, and sliders that stand at the model's usual until they are moved. */

import { byId, element } from "./dom.js";

/** `field` is the name in /v1/tts; without a usual value of the model's, `usual` is ours. */
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
  {
    field: "repetition_penalty",
    title: "Repetition penalty",
    help: "Keeps sounds from getting stuck.",
    min: 0.9,
    max: 2,
    step: 0.05,
  },
  { field: "speed", title: "Speed", help: "At the same pitch.", min: 0.5, max: 2, step: 0.05, usual: 1 },
  { field: "volume", title: "Volume", help: "Decibels.", min: -20, max: 20, step: 1, usual: 0 },
];

export class SamplingForm {
  #usual = {};

  constructor() {
    byId("sliders").replaceChildren(...SLIDERS.map((slider) => this.#row(slider)));
    byId("sampling").addEventListener("submit", (event) => event.preventDefault());
    byId("sampling").addEventListener("reset", (event) => {
      event.preventDefault();
      byId("seed").value = "";
      this.show({});
    });
    this.show({});
  }

  /** What the model does when nobody asks otherwise. */
  setUsual(sampling) {
    const moved = this.moved;
    this.#usual = sampling;
    this.show(moved);
  }

  /** Null for a seed that is to be drawn. Raises nothing: what is no number is no seed. */
  get seed() {
    const text = byId("seed").value.trim();
    return /^[0-9]{1,15}$/.test(text) ? Number(text) : null;
  }

  set seed(value) {
    byId("seed").value = value ?? "";
  }

  /** The sliders that do not stand at the usual value. */
  get moved() {
    return Object.fromEntries(
      SLIDERS.filter((slider) => Number(input(slider).value) !== this.#usualOf(slider)).map((slider) => [
        slider.field,
        Number(input(slider).value),
      ]),
    );
  }

  /** In the words of /v1/tts. */
  get wishes() {
    const { speed, volume, ...sampling } = this.moved;
    if (speed === undefined && volume === undefined) return sampling;
    return { ...sampling, prosody: { speed: speed ?? 1, volume: volume ?? 0 } };
  }

  show(moved) {
    for (const slider of SLIDERS) {
      input(slider).value = moved[slider.field] ?? this.#usualOf(slider);
      this.#tell(slider);
    }
  }

  #usualOf({ field, usual, min }) {
    return usual ?? this.#usual[field] ?? min;
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
    const usual = Number(value) === this.#usualOf(slider);
    const words = byId(`${slider.field}-value`);
    words.textContent = `${Number(value)}${slider.field === "speed" ? "×" : slider.field === "volume" ? " dB" : ""}`;
    words.classList.toggle("moved", !usual);
  }
}

const input = ({ field }) => byId(field);
