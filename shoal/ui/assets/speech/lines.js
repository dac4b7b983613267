/** Splits text into lines that are requested one after the other.
 *
 * A long text is split at sentence ends into passages, so that no request exceeds the server's deadline, progress
 * is visible, and a text of any length can be spoken.
 */

export const PASSAGE_CHARACTERS = 480;
export const LONG_SECONDS = 20 * 60; // from here on a file is offered
export const PLAYED_SECONDS = 2 * 3600; // the longest speech that is kept in the page's memory
export const FILE_SECONDS = 8 * 3600; // well below the 4 GB that a wav file can hold, at any rate
// About twelve seconds: enough to measure the machine's speed, and a good length for a voice reference.
const FIRST_CHARACTERS = 180;
const FEWEST_CHARACTERS = 60;
const COMFORTABLE_SECONDS = 25; // well within the server's default deadline
const LETTERS_PER_SECOND = 15; // of speech; only to estimate a duration in advance

/** Splits text into passages of at most `most` characters; only surrounding spaces are lost.
 *
 * The first passage ends at the sentence that passes `first` characters.
 */
export function passages(text, most, first = most) {
  const found = [];
  for (const piece of pieces(text, most)) {
    const [last, room] = [found.at(-1), found.length === 1 ? first : most];
    if (last !== undefined && last.length + piece.length <= room) found[found.length - 1] = last + piece;
    else found.push(piece);
  }
  return found.map((passage) => passage.trim()).filter(Boolean);
}

/** One line per passage, all with one voice; null is the model's own. */
export function monologue(text, voice, most = PASSAGE_CHARACTERS) {
  return passages(text, most, FIRST_CHARACTERS).map((passage) => ({ text: passage, voice, speaker: 0, turn: 0 }));
}

/** One line per turn, or several where a turn is long. `cast` has the voice of each speaker. */
export function dialogue(turns, cast, most = PASSAGE_CHARACTERS) {
  return turns.flatMap(({ speaker, text }, turn) =>
    passages(text, most).map((passage) => ({ text: passage, voice: cast[speaker] ?? null, speaker, turn })),
  );
}

export function characters(lines) {
  return lines.reduce((sum, { text }) => sum + text.length, 0);
}

export function expectedSeconds(letters) {
  return letters / LETTERS_PER_SECOND;
}

/** Splits a line so that no part should take longer than `seconds` at that real-time factor. */
export function fitted(line, realTimeFactor, seconds = COMFORTABLE_SECONDS) {
  const most = Math.max(FEWEST_CHARACTERS, Math.floor((LETTERS_PER_SECOND * seconds) / realTimeFactor));
  return passages(line.text, most).map((text) => ({ ...line, text }));
}

function pieces(text, most) {
  return segments(text, "sentence").flatMap((sentence) => {
    if (sentence.length <= most) return [sentence];
    return segments(sentence, "word").flatMap((word) => cut(word, most));
  });
}

function segments(text, granularity) {
  return Array.from(new Intl.Segmenter(undefined, { granularity }).segment(text), ({ segment }) => segment);
}

/** Counts grapheme clusters, not code units, so that an emoji is never split. */
function cut(word, most) {
  if (word.length <= most) return [word];
  const letters = segments(word, "grapheme");
  const half = Math.ceil(letters.length / 2);
  if (half === letters.length) return [word];
  return [letters.slice(0, half), letters.slice(half)].flatMap((part) => cut(part.join(""), most));
}
