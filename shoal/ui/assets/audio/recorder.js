/** Records the microphone without echo cancellation, noise suppression or lossy codec, into a wav file. */

import { Problem } from "../server/problem.js";
import { toInteger, wavFile } from "./pcm.js";

const UNPROCESSED = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: true };

export class Recorder {
  #context = null;
  #stream = null;
  #worklet = null;
  #recorded = [];

  seconds = 0;
  level = 0; // the loudest sample of the last few milliseconds, 0 to 1

  /** False while the browser asks for the microphone. */
  get running() {
    return this.#worklet !== null;
  }

  /** Raises a Problem that tells the user what to do. */
  async start() {
    this.#stream = await microphone();
    try {
      await this.#connect();
    } catch {
      await this.release();
      throw new Problem("The browser cannot record here", "Reload the page, or upload a file.");
    }
  }

  async #connect() {
    this.#context = new AudioContext();
    await this.#context.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
    this.#worklet = new AudioWorkletNode(this.#context, "recorder", { numberOfOutputs: 0 });
    this.#worklet.port.onmessage = ({ data }) => this.#onSamples(data);
    this.#context.createMediaStreamSource(this.#stream).connect(this.#worklet);
  }

  /** Switches the microphone off. */
  async release() {
    if (this.#worklet) this.#worklet.port.onmessage = null; // ignore messages that arrive after the stop
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    if (this.#context && this.#context.state !== "closed") await this.#context.close();
  }

  async stop() {
    await this.release();
    if (!this.#recorded.length)
      throw new Problem("Nothing was recorded", "Is the right microphone chosen in the browser?");
    return wavFile(toInteger(joined(this.#recorded)), this.#context.sampleRate);
  }

  #onSamples(samples) {
    this.#recorded.push(samples);
    this.seconds += samples.length / this.#context.sampleRate;
    this.level = Math.max(
      0.85 * this.level,
      samples.reduce((peak, sample) => Math.max(peak, Math.abs(sample)), 0),
    );
  }
}

async function microphone() {
  if (!navigator.mediaDevices) {
    throw new Problem(
      "The browser offers no microphone to this page",
      "Recording needs https or localhost. Upload a file instead.",
    );
  }
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: UNPROCESSED });
  } catch (error) {
    if (error.name === "NotAllowedError") {
      throw new Problem("The microphone is not allowed", "Allow it for this page in the browser, or upload a file.");
    }
    if (error.name === "NotFoundError") {
      throw new Problem("No microphone was found", "Connect one, or upload a file.");
    }
    throw new Problem("The microphone cannot be opened", "Another program may be using it. Close it, or upload a file.");
  }
}

function joined(pieces) {
  const all = new Float32Array(pieces.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const piece of pieces) {
    all.set(piece, at);
    at += piece.length;
  }
  return all;
}
