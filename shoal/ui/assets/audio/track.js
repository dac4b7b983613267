/** Audio of an utterance that may still be growing: samples, loudness over time, and speaker positions. */

import { nextWord } from "../speech/next-word.js";

const PEAKS_PER_SECOND = 50;
const FIRST_ROOM = 1 << 16;

export class Track {
  #samples = new Int16Array(FIRST_ROOM);
  #peaks = [];

  constructor(rate) {
    this.rate = rate;
    this.length = 0;
    this.complete = false;
    this.parts = []; // one entry per line: { at: first sample, speaker, turn, text, words: null without word times }
  }

  static of(samples, rate, parts = []) {
    const track = new Track(rate);
    track.parts = parts;
    track.append(samples);
    track.complete = true;
    return track;
  }

  get seconds() {
    return this.length / this.rate;
  }

  /** The samples received so far; a view, not a copy. */
  get samples() {
    return this.#samples.subarray(0, this.length);
  }

  beginPart({ speaker, turn, text }) {
    this.parts.push({ at: this.length, speaker, turn, text, words: null });
  }

  /** Begins the words of the last part; with `timed` false it has none. */
  beginWords(timed) {
    this.parts.at(-1).words = timed ? [] : null;
  }

  /** Adds words to the last part: { first, last } in its text, { start, end } in samples of the track. */
  addWords(words) {
    this.parts.at(-1).words.push(...words);
  }

  /** Returns the words of a part. While it is being received, they include the next word, whose end is not known. */
  wordsOf(part) {
    const { words, text, at } = this.parts[part];
    if (!words || this.complete || part < this.parts.length - 1) return words ?? [];
    const next = nextWord(text, words.at(-1)?.last ?? 0);
    return next ? [...words, { ...next, start: words.at(-1)?.end ?? at, end: Infinity }] : words;
  }

  append(samples) {
    if (this.length + samples.length > this.#samples.length) this.#grow(this.length + samples.length);
    this.#samples.set(samples, this.length);
    this.length += samples.length;
    this.#measure();
  }

  appendSilence(seconds) {
    this.append(new Int16Array(Math.round(seconds * this.rate)));
  }

  slice(from, to) {
    return this.samples.slice(from, to);
  }

  /** Drops the samples, and the parts, from a sample on. */
  truncate(length) {
    this.length = length;
    this.parts = this.parts.filter(({ at }) => at < length);
    this.#peaks.length = Math.min(this.#peaks.length, Math.ceil(length / Math.round(this.rate / PEAKS_PER_SECOND)));
  }

  partAt(sample) {
    return this.parts.findLast(({ at }) => at <= sample) ?? { at: 0, speaker: 0, turn: 0 };
  }

  /** Returns the word at a sample: its part and its index in the part; null between words and without word times. */
  wordAt(sample) {
    if (sample >= this.length) return null;
    const part = this.parts.findLastIndex(({ at }) => at <= sample);
    const words = part < 0 ? [] : this.wordsOf(part);
    const index = words.findLastIndex(({ start }) => start <= sample);
    return index >= 0 && sample < words[index].end ? { part, index } : null;
  }

  /** Peak amplitude, 0 to 1, of each of `count` equal segments. */
  outline(count) {
    const share = this.#peaks.length / count;
    return Array.from({ length: count }, (_, n) => {
      const from = Math.floor(n * share);
      return Math.max(0, ...this.#peaks.slice(from, Math.max(from + 1, Math.floor((n + 1) * share))));
    });
  }

  #grow(needed) {
    const larger = new Int16Array(Math.max(needed, 2 * this.#samples.length));
    larger.set(this.samples);
    this.#samples = larger;
  }

  /** The last segment is measured again when it has grown. */
  #measure() {
    const stretch = Math.round(this.rate / PEAKS_PER_SECOND);
    const all = Math.ceil(this.length / stretch);
    for (let n = Math.max(0, this.#peaks.length - 1); n < all; n++) {
      const segment = this.samples.subarray(n * stretch, (n + 1) * stretch);
      this.#peaks[n] = segment.reduce((peak, sample) => Math.max(peak, Math.abs(sample)), 0) / 32768;
    }
  }
}
