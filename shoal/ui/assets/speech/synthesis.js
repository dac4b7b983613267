/** Requests lines in order and appends their samples to a track as they arrive. */

import { SampleReader, wavFile } from "../audio/pcm.js";
import * as server from "../server/client.js";
import { Problem, streamAborted } from "../server/problem.js";
import { characters, expectedSeconds, splitToDuration } from "./lines.js";
import { timedAudio } from "./timed-audio.js";

const BETWEEN_TURNS_SECONDS = 0.2;
const REFERENCE_SECONDS = { min: 1, max: 45 };
const TRIES = 5;

/** A random seed that a JSON number represents exactly. */
export function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0];
}

export class Synthesis extends EventTarget {
  #abort = new AbortController();
  #began = 0; // when the current request was sent; 0 between lines
  #working = 0; // seconds spent waiting for the server on finished lines
  #references = new Map();
  #partial = null; // the line that broke off: { text, start: sample before its pause, from: its first sample }
  #skip = 0; // samples of a repeated line that the track has already

  /** `options` are the fields of /v1/tts other than text and voice. `timed`: the track receives the times of words. */
  constructor(lines, options, track, { timed = false } = {}) {
    super();
    Object.assign(this, { lines, options, track, timed });
    this.firstAudio = null; // seconds
    this.line = 0; // index of the current line
    this.outcome = null; // whole, stopped, broken
  }

  /** Real-time factor so far: seconds of work per second of audio. */
  get realTimeFactor() {
    if (!this.track.seconds) return null;
    const now = this.#began ? (performance.now() - this.#began) / 1000 : 0;
    return (this.#working + now) / this.track.seconds;
  }

  /** Fraction of the text that is spoken, by characters; estimated within a line. */
  get progress() {
    const letters = this.lines[this.line]?.text.length ?? 0;
    const made = (this.track.length - (this.track.parts.at(-1)?.at ?? 0)) / this.track.rate;
    const share = letters ? Math.min(0.95, made / expectedSeconds(letters)) : 0;
    return (characters(this.lines.slice(0, this.line)) + share * letters) / characters(this.lines);
  }

  /** Resolves when all audio is generated or the user stopped; raises a Problem otherwise, and can be called again. */
  async run() {
    this.#abort = new AbortController();
    this.outcome = null;
    this.track.complete = false;
    try {
      for (; this.line < this.lines.length; this.line++) {
        this.#fit();
        await this.#synthesize(this.lines[this.line]);
      }
      this.outcome = "whole";
    } catch (error) {
      this.outcome = this.#abort.signal.aborted ? "stopped" : "broken";
      if (this.outcome === "broken") throw error;
    } finally {
      this.#endLine();
      this.track.complete = true;
      this.#dispatch("end");
    }
  }

  stop() {
    this.#abort.abort();
  }

  /** Sends shorter requests to a slow machine, since each request has a deadline. */
  #fit() {
    const rtf = this.realTimeFactor;
    if (rtf !== null) this.lines.splice(this.line, 1, ...splitToDuration(this.lines[this.line], rtf));
  }

  async #synthesize(line) {
    const partial = this.#takeUp(line);
    const start = partial?.start ?? this.track.length;
    const from = partial?.from ?? this.#begin(line);
    this.#partial = { text: line.text, start, from };
    const body = await this.#request(line);
    await this.#receive(body, line, from);
    this.#endLine();
    this.#partial = null;
    await this.#keepReference(line, from);
  }

  /** Continues a line that broke off. The seed gives the same samples again; those that were received are skipped.
   *
   * A line that was split since then sounds different and is spoken from its beginning.
   */
  #takeUp({ text }) {
    const partial = this.#partial;
    this.#skip = 0;
    if (!partial) return null;
    if (partial.text !== text) {
      this.track.truncate(partial.start);
      return null;
    }
    this.#skip = this.track.length - partial.from;
    this.#dispatch("line");
    return partial;
  }

  #endLine() {
    if (this.#began) this.#working += (performance.now() - this.#began) / 1000;
    this.#began = 0;
  }

  #begin(line) {
    const before = this.lines[this.line - 1];
    if (before && before.turn !== line.turn) this.track.appendSilence(BETWEEN_TURNS_SECONDS);
    this.track.beginPart(line);
    this.#dispatch("line");
    return this.track.length;
  }

  /** After the first line, waits for a busy server instead of failing half-way. */
  async #request(line) {
    for (let tries = 1; ; tries++) {
      this.#began = performance.now();
      try {
        this.track.beginWords(this.timed);
        const speak = this.timed ? server.speakTimed : server.speak;
        const response = await speak(this.#bodyFor(line), this.#abort.signal);
        this.#check(response);
        this.#dispatchText(response.headers.get("X-Spoken-Text"));
        return response.body;
      } catch (problem) {
        if (this.timed && refusesTimestamps(problem)) {
          this.timed = false;
          continue;
        }
        if (!problem.retryAfter || this.line === 0 || tries === TRIES) throw problem;
        this.#dispatch("waiting", { seconds: problem.retryAfter });
        await sleep(problem.retryAfter, this.#abort.signal);
      }
    }
  }

  #bodyFor({ text, voice, speaker }) {
    if (voice !== null) return { ...this.options, text, reference_id: voice };
    const reference = this.#references.get(speaker);
    return reference ? { ...this.options, text, references: [reference] } : { ...this.options, text };
  }

  /** `encoded` is the text as the model reads it, percent-encoded; null unless `show_text` asks for it. */
  #dispatchText(encoded) {
    if (encoded !== null) this.#dispatch("text", { text: decodeURIComponent(encoded) });
  }

  #check(response) {
    const rate = Number(response.headers.get("X-Sample-Rate"));
    if (rate === this.track.rate) return;
    throw new Problem("The model has changed", "The server now speaks at another rate. Reload the page.");
  }

  /** `from` is the first sample of the line. */
  async #receive(body, { text }, from) {
    const reader = new SampleReader();
    try {
      for await (const { bytes, words } of this.timed ? timedAudio(body, text) : plainAudio(body)) {
        this.#append(reader.feed(bytes));
        if (words.length) this.#addWords(words, from);
        if (bytes.length || words.length) this.#dispatch("audio");
      }
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw streamAborted(this.track.seconds, (performance.now() - this.#began) / 1000);
    }
  }

  #append(received) {
    const samples = received.subarray(this.#skip);
    this.#skip -= received.length - samples.length;
    if (!samples.length) return;
    this.firstAudio ??= (performance.now() - this.#began) / 1000;
    this.track.append(samples);
  }

  #addWords(words, from) {
    const sample = (seconds) => from + Math.round(seconds * this.track.rate);
    this.track.addWords(words.map(({ start, end, ...place }) => ({ ...place, start: sample(start), end: sample(end) })));
  }

  /** Without a reference each request would sample another speaker, so the first line becomes the reference of the rest. */
  async #keepReference({ text, voice, speaker }, from) {
    if (voice !== null || this.#references.has(speaker) || this.line === this.lines.length - 1) return;
    const samples = this.track.slice(from, this.track.length);
    const seconds = samples.length / this.track.rate;
    if (seconds < REFERENCE_SECONDS.min || seconds > REFERENCE_SECONDS.max) return;
    this.#references.set(speaker, { text, audio: await base64(wavFile(samples, this.track.rate)) });
  }

  #dispatch(name, detail = {}) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

async function* plainAudio(body) {
  const stream = body.getReader();
  for (;;) {
    const { done, value } = await stream.read();
    if (done) return;
    yield { bytes: value, words: [] };
  }
}

/** Returns whether the server refuses only word times: a reloaded model may have none. */
function refusesTimestamps({ status, detail }) {
  return status === 400 && /^timestamps: /i.test(detail);
}

async function base64(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let text = "";
  // In slices: the number of call arguments is limited.
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
