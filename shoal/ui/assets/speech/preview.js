/** Speaks a sentence with a voice, so that it can be judged before it is chosen. */

import { Player } from "../audio/player.js";
import { Track } from "../audio/track.js";
import { Synthesis } from "./synthesis.js";

const SEED = 1; // always the same, so that two previews differ only in the voice
const KEPT_TRACKS = 24;

/** Dispatches `change` with the name of the voice that plays, undefined for none. */
export class Preview extends EventTarget {
  #player = new Player();
  #tracks = new Map(); // name and sentence -> a complete track
  #synthesis = null;
  playing = undefined;

  constructor() {
    super();
    this.#player.addEventListener("change", () => {
      if (this.#player.state === "ended" && !this.#synthesis) this.#setPlaying(undefined);
    });
  }

  stop() {
    this.#synthesis?.stop();
    this.#synthesis = null;
    this.#player.stop();
    this.#setPlaying(undefined);
  }

  /** Plays the preview of a voice at `rate` Hz; the same voice again stops it. Raises a Problem. */
  async toggle(voice, rate) {
    const again = this.playing === voice.name;
    this.stop();
    if (again) return;
    const text = sentenceOf(voice);
    const key = `${voice.name} ${text}`;
    this.#setPlaying(voice.name);
    const kept = this.#tracks.get(key);
    if (kept?.rate === rate) this.#player.play(kept);
    else await this.#speak(voice.name, text, key, rate);
  }

  async #speak(voice, text, key, rate) {
    const track = new Track(rate);
    const synthesis = (this.#synthesis = new Synthesis([{ text, voice, speaker: 0, turn: 0 }], { seed: SEED }, track));
    synthesis.addEventListener("audio", () => this.#player.follow());
    this.#player.play(track);
    try {
      await synthesis.run();
      if (synthesis.outcome === "whole") this.#keep(key, track);
    } finally {
      if (this.#synthesis === synthesis) this.#synthesis = null;
      if (synthesis.outcome === "broken") this.stop();
    }
  }

  #keep(key, track) {
    this.#tracks.set(key, track);
    if (this.#tracks.size > KEPT_TRACKS) this.#tracks.delete(this.#tracks.keys().next().value);
  }

  #setPlaying(name) {
    if (this.playing === name) return;
    this.playing = name;
    this.dispatchEvent(new CustomEvent("change", { detail: name }));
  }
}

export function sentenceOf({ title, preview }) {
  if (preview) return preview;
  return title ? `Hello, I am ${title}. This is how I sound.` : "Hello. This is how I sound.";
}
