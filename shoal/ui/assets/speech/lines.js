/** Splits text into lines that are requested one after the other.
 *
 * A long text is split at sentence ends into passages, so that no request exceeds the server's deadline, progress
 * is visible, and a text of any length can be spoken.
 */

export const PASSAGE_CHARACTERS = 480;
export const LONG_SECONDS = 20 * 60; // the page offers a file for longer speech
export const PLAYED_SECONDS = 2 * 3600; // the longest speech that is kept in the page's memory
export const FILE_SECONDS = 8 * 3600; // well below the 4 GB that a wav file can hold, at any rate
// About twelve seconds: enough to measure the machine's speed, and a good length for a voice reference.
const FIRST_CHARACTERS = 180;
const MIN_CHARACTERS = 60;
const TARGET_SECONDS = 25; // well within the server's default deadline
const CHARACTERS_PER_SECOND = 15; // speaking rate, only to estimate a duration in advance

/** Splits text into passages of at most `max` characters; only surrounding spaces are lost.
 *
 * The first passage ends at the sentence that passes `first` characters.
 */
export function passages(text, max, first = max) {
  const found = [];
  for (const piece of pieces(text, max)) {
    const [last, room] = [found.at(-1), found.length === 1 ? first : max];
    if (last !== undefined && last.length + piece.length <= room) found[found.length - 1] = last + piece;
    else found.push(piece);
  }
  return found.map((passage) => passage.trim()).filter(Boolean);
}

/** One line per passage, all with one voice; null is the model's own. */
export function monologue(text, voice, max = PASSAGE_CHARACTERS) {
  return passages(text, max, FIRST_CHARACTERS).map((passage) => ({ text: passage, voice, speaker: 0, turn: 0 }));
}

/** One line per turn, or several where a turn is long. `cast` has the voice of each speaker. */
export function dialogue(turns, cast, max = PASSAGE_CHARACTERS) {
  return turns.flatMap(({ speaker, text }, turn) =>
    passages(text, max).map((passage) => ({ text: passage, voice: cast[speaker] ?? null, speaker, turn })),
  );
}

export function characters(lines) {
  return lines.reduce((sum, { text }) => sum + text.length, 0);
}

export function expectedSeconds(letters) {
  return letters / CHARACTERS_PER_SECOND;
}

/** Splits a line so that no part should take longer than `seconds` at that real-time factor. */
export function splitToDuration(line, realTimeFactor, seconds = TARGET_SECONDS) {
  const max = Math.max(MIN_CHARACTERS, Math.floor((CHARACTERS_PER_SECOND * seconds) / realTimeFactor));
  return passages(line.text, max).map((text) => ({ ...line, text }));
}

function pieces(text, max) {
  return segments(text, "sentence").flatMap((sentence) => {
    if (sentence.length <= max) return [sentence];
    return segments(sentence, "word").flatMap((word) => cut(word, max));
  });
}

function segments(text, granularity) {
  return Array.from(new Intl.Segmenter(undefined, { granularity }).segment(text), ({ segment }) => segment);
}

/** Counts grapheme clusters, not code units, so that an emoji is never split. */
function cut(word, max) {
  if (word.length <= max) return [word];
  const letters = segments(word, "grapheme");
  const half = Math.ceil(letters.length / 2);
  if (half === letters.length) return [word];
  return [letters.slice(0, half), letters.slice(half)].flatMap((part) => cut(part.join(""), max));
}
