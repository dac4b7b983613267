/** Converts between byte streams, 16-bit samples and wav files. */

/** Decodes little-endian bytes in pieces of any size; a piece may end in the middle of a sample. */
export class SampleReader {
  #left = new Uint8Array(0);

  feed(bytes) {
    const all = new Uint8Array(this.#left.length + bytes.length);
    all.set(this.#left);
    all.set(bytes, this.#left.length);
    const whole = all.length - (all.length % 2);
    this.#left = all.slice(whole);
    const view = new DataView(all.buffer, 0, whole);
    return Int16Array.from({ length: whole / 2 }, (_, at) => view.getInt16(2 * at, true));
  }
}

export function toFloat(samples) {
  return Float32Array.from(samples, (sample) => sample / 32768);
}

export function toInteger(samples) {
  return Int16Array.from(samples, (sample) => Math.max(-32768, Math.min(32767, Math.round(sample * 32768))));
}

/** Encodes a mono wav file. */
export function wavFile(samples, rate) {
  return new Blob([wavHeader(samples.length, rate), pcmBytes(samples)], { type: "audio/wav" });
}

/** The header of a mono wav file of 16-bit samples. */
export function wavHeader(length, rate) {
  const header = new DataView(new ArrayBuffer(44));
  const text = (at, word) => [...word].forEach((letter, n) => header.setUint8(at + n, letter.charCodeAt(0)));
  text(0, "RIFF");
  header.setUint32(4, 36 + 2 * length, true);
  text(8, "WAVEfmt ");
  header.setUint32(16, 16, true);
  header.setUint16(20, 1, true); // PCM
  header.setUint16(22, 1, true); // one channel
  header.setUint32(24, rate, true);
  header.setUint32(28, 2 * rate, true);
  header.setUint16(32, 2, true);
  header.setUint16(34, 16, true);
  text(36, "data");
  header.setUint32(40, 2 * length, true);
  return header;
}

/** Encodes raw little-endian samples on any machine. */
export function pcmBytes(samples) {
  const bytes = new DataView(new ArrayBuffer(2 * samples.length));
  samples.forEach((sample, at) => bytes.setInt16(2 * at, sample, true));
  return bytes;
}
