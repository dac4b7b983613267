/** Plays a track, also one that is still growing, without a gap between its pieces.
 *
 * The audio context runs at the track's own rate, so no piece is resampled by itself, and each piece begins on the very
 * sample on which the one before it ended. Pieces are laid out a few seconds ahead of what is heard.
 */

import { toFloat } from "./pcm.js";

const AHEAD_SECONDS = 4;
const PIECE_SECONDS = 1;
const PUMP_MILLISECONDS = 100;
const LEAD_SECONDS = 0.06;
const LONGEST_LEAD = 1.5;

export class Player extends EventTarget {
  #context = null;
  #track = null;
  #pieces = new Set();
  #laid = 0; // samples handed to the context
  #anchor = { time: 0, sample: 0 }; // this sample is heard at this time
  #lead = LEAD_SECONDS;
  #pump = 0;
  #rest = 0; // where a track that is not playing stands

  state = "empty"; // empty, playing, paused, ended

  get track() {
    return this.#track;
  }

  /** The sample that is heard now. */
  get position() {
    if (this.state !== "playing" && this.state !== "paused") return this.#rest;
    const passed = Math.round((this.#context.currentTime - this.#anchor.time) * this.#track.rate);
    return Math.min(this.#anchor.sample + Math.max(0, passed), this.#laid);
  }

  /** Must first be called while a person presses something: browsers let no page speak by itself. */
  play(track, from = 0) {
    this.stop();
    this.#track = track;
    this.#lead = LEAD_SECONDS;
    this.#context = contextFor(track.rate, this.#context);
    this.#startAt(from);
    this.#enter("playing");
    this.#pump = setInterval(() => this.follow(), PUMP_MILLISECONDS);
    this.follow();
  }

  /** Nothing to hear, as at the beginning. */
  clear() {
    this.stop();
    this.#track = null;
    this.#rest = 0;
    this.#enter("empty");
  }

  async toggle() {
    if (this.state === "playing") {
      await this.#context.suspend();
      this.#enter("paused");
    } else if (this.state === "paused") {
      await this.#context.resume();
      this.#enter("playing");
    } else if (this.#track) {
      this.play(this.#track, this.#rest < this.#track.length ? this.#rest : 0);
    }
  }

  seek(sample) {
    const to = Math.max(0, Math.min(sample, this.#track.length - 1));
    if (this.state !== "playing" && this.state !== "paused") return this.play(this.#track, to);
    this.#silence();
    this.#startAt(to);
    this.follow();
    this.dispatchEvent(new Event("change"));
  }

  stop() {
    this.#rest = this.position;
    clearInterval(this.#pump);
    this.#silence();
    if (this.#track) this.#enter("ended");
  }

  /** Lay out what has come since the last time. Called by the clock, and when a track has grown. */
  follow() {
    if (this.state !== "playing") return;
    const { rate, length } = this.#track;
    const horizon = this.position + AHEAD_SECONDS * rate;
    while (this.#laid < Math.min(length, horizon)) this.#layOut(Math.min(length, this.#laid + PIECE_SECONDS * rate));
    if (this.#track.complete && this.position >= length) this.stop();
  }

  #startAt(sample) {
    this.#laid = sample;
    this.#anchor = { time: this.#onSample(this.#context.currentTime + this.#lead), sample };
  }

  #layOut(end) {
    const { rate } = this.#track;
    this.#catchUp();
    const piece = this.#context.createBuffer(1, end - this.#laid, rate);
    piece.copyToChannel(toFloat(this.#track.slice(this.#laid, end)), 0);
    const source = this.#context.createBufferSource();
    source.buffer = piece;
    source.connect(this.#context.destination);
    source.onended = () => this.#pieces.delete(source);
    source.start(this.#anchor.time + (this.#laid - this.#anchor.sample) / rate);
    this.#pieces.add(source);
    this.#laid = end;
  }

  /** When all that was laid out has been heard already, wait a little longer this time, so that it happens once. */
  #catchUp() {
    const due = this.#anchor.time + (this.#laid - this.#anchor.sample) / this.#track.rate;
    if (due >= this.#context.currentTime) return;
    if (this.#laid > this.#anchor.sample) this.#lead = Math.min(LONGEST_LEAD, 2.5 * this.#lead);
    this.#startAt(this.#laid);
  }

  #onSample(time) {
    return Math.ceil(time * this.#track.rate) / this.#track.rate;
  }

  #silence() {
    for (const piece of this.#pieces) {
      piece.onended = null;
      piece.stop();
      piece.disconnect();
    }
    this.#pieces.clear();
  }

  #enter(state) {
    this.state = state;
    this.dispatchEvent(new Event("change"));
  }
}

/** Its clock starts when the browser has a sound device for it; nobody needs to wait for that. */
function contextFor(rate, current) {
  if (current && current.sampleRate !== rate) current.close();
  const context = current?.sampleRate === rate ? current : new AudioContext({ sampleRate: rate });
  context.resume();
  return context;
}
