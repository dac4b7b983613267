/** Audio of a long text on its way into a file. Like a Track, but the samples are in blobs, which the browser moves to disk. */

import { pcmBytes, wavHeader } from "./pcm.js";

const BLOB_SAMPLES = 1 << 19;
const KEPT_SECONDS = 60; // seconds of the beginning that are kept, to cut a voice reference from them

export class FileTrack {
  #blobs = [];
  #open = []; // samples that are not in a blob yet
  #openLength = 0;
  #beginning = new Int16Array(0);

  constructor(rate) {
    this.rate = rate;
    this.length = 0;
    this.complete = false;
    this.parts = []; // { at: first sample, speaker, turn }
  }

  get seconds() {
    return this.length / this.rate;
  }

  beginPart({ speaker, turn }) {
    this.parts.push({ at: this.length, speaker, turn });
  }

  /** Does nothing: the page shows no words for a file, because it does not play it. */
  beginWords() {}

  append(samples) {
    if (this.#beginning.length < KEPT_SECONDS * this.rate) this.#beginning = joined(this.#beginning, samples);
    this.#open.push(pcmBytes(samples));
    this.#openLength += samples.length;
    this.length += samples.length;
    if (this.#openLength >= BLOB_SAMPLES) this.#close();
  }

  appendSilence(seconds) {
    this.append(new Int16Array(Math.round(seconds * this.rate)));
  }

  /** Samples of the beginning; empty beyond it. */
  slice(from, to) {
    return this.#beginning.slice(from, to);
  }

  /** Drops the samples, and the parts, from a sample on. */
  truncate(length) {
    this.#close();
    this.#blobs = [new Blob(this.#blobs).slice(0, 2 * length)];
    this.length = length;
    this.#beginning = this.#beginning.slice(0, length);
    this.parts = this.parts.filter(({ at }) => at < length);
  }

  wav() {
    this.#close();
    return new Blob([wavHeader(this.length, this.rate), ...this.#blobs], { type: "audio/wav" });
  }

  #close() {
    if (this.#openLength) this.#blobs.push(new Blob(this.#open));
    this.#open = [];
    this.#openLength = 0;
  }
}

function joined(first, second) {
  const all = new Int16Array(first.length + second.length);
  all.set(first);
  all.set(second, first.length);
  return all;
}
