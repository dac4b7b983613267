/** Plays a track without gaps, also while it is still growing.
 *
 * The audio context runs at the track's sample rate, so pieces are not resampled separately, and each piece starts at the
 * sample at which the previous one ended. Pieces are scheduled a few seconds ahead of playback.
 */

import { toFloat } from "./pcm.js";

const AHEAD_SECONDS = 4;
const PIECE_SECONDS = 1;
const PUMP_MILLISECONDS = 100;
const LEAD_SECONDS = 0.06;
const MAX_LEAD_SECONDS = 1.5;

export class Player extends EventTarget {
  #context = null;
  #track = null;
  #pieces = new Set();
  #scheduled = 0; // samples handed to the context
  #anchor = { time: 0, sample: 0 }; // this sample plays at this context time
  #lead = LEAD_SECONDS;
  #pump = 0;
  #rest = 0; // position of a track that is not playing

  state = "empty"; // empty, playing, paused, ended

  get track() {
    return this.#track;
  }

  /** The sample that is playing now. */
  get position() {
    if (this.state !== "playing" && this.state !== "paused") return this.#rest;
    const passed = Math.round((this.#context.currentTime - this.#anchor.time) * this.#track.rate);
    return Math.min(this.#anchor.sample + Math.max(0, passed), this.#scheduled);
  }

  /** The sample that is audible now. Wireless loudspeakers delay the sound by up to 0.3 s. */
  get audiblePosition() {
    if (this.state !== "playing") return this.position;
    const late = Math.round((this.#context.outputLatency || 0) * this.#track.rate);
    return Math.max(Math.min(this.#anchor.sample, this.position), this.position - late);
  }

  /** The first call must come from a user gesture: browsers block autoplay. */
  play(track, from = 0) {
    this.stop();
    this.#track = track;
    this.#lead = LEAD_SECONDS;
    this.#context = contextFor(track.rate, this.#context);
    this.#startAt(from);
    this.#setState("playing");
    this.#pump = setInterval(() => this.follow(), PUMP_MILLISECONDS);
    this.follow();
  }

  /** Resets to the empty state. */
  clear() {
    this.stop();
    this.#track = null;
    this.#rest = 0;
    this.#setState("empty");
  }

  async toggle() {
    if (this.state === "playing") {
      await this.#context.suspend();
      this.#setState("paused");
    } else if (this.state === "paused") {
      await this.#context.resume();
      this.#setState("playing");
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

  /** Plays from a sample, also when playback is paused or has ended. */
  async playFrom(sample) {
    this.seek(sample);
    if (this.state === "paused") await this.toggle();
  }

  stop() {
    this.#rest = this.position;
    clearInterval(this.#pump);
    this.#silence();
    if (this.#track) this.#setState("ended");
  }

  /** Schedules samples that arrived since the last call. Called by a timer, and when the track has grown. */
  follow() {
    if (this.state !== "playing") return;
    const { rate, length } = this.#track;
    const horizon = this.position + AHEAD_SECONDS * rate;
    while (this.#scheduled < Math.min(length, horizon)) {
      this.#schedule(Math.min(length, this.#scheduled + PIECE_SECONDS * rate));
    }
    if (this.#track.complete && this.position >= length) this.stop();
  }

  #startAt(sample) {
    this.#scheduled = sample;
    this.#anchor = { time: this.#onSample(this.#context.currentTime + this.#lead), sample };
  }

  #schedule(end) {
    const { rate } = this.#track;
    this.#catchUp();
    const piece = this.#context.createBuffer(1, end - this.#scheduled, rate);
    piece.copyToChannel(toFloat(this.#track.slice(this.#scheduled, end)), 0);
    const source = this.#context.createBufferSource();
    source.buffer = piece;
    source.connect(this.#context.destination);
    source.onended = () => this.#pieces.delete(source);
    source.start(this.#anchor.time + (this.#scheduled - this.#anchor.sample) / rate);
    this.#pieces.add(source);
    this.#scheduled = end;
  }

  /** After an underrun, buffer longer before resuming, so that it does not repeat. */
  #catchUp() {
    const due = this.#anchor.time + (this.#scheduled - this.#anchor.sample) / this.#track.rate;
    if (due >= this.#context.currentTime) return;
    if (this.#scheduled > this.#anchor.sample) this.#lead = Math.min(MAX_LEAD_SECONDS, 2.5 * this.#lead);
    this.#startAt(this.#scheduled);
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

  #setState(state) {
    this.state = state;
    this.dispatchEvent(new Event("change"));
  }
}

/** The context's clock starts once the browser has opened an audio device; do not wait for it. */
function contextFor(rate, current) {
  if (current && current.sampleRate !== rate) current.close();
  const context = current?.sampleRate === rate ? current : new AudioContext({ sampleRate: rate });
  context.resume();
  return context;
}
