/** Finds the word that a speech reaches next, before the server has sent its times. */

const MARKUP = /\[[^\]]*\]|<[^>]*>/g;
const CHARACTER = "[\\p{sc=Han}\\p{sc=Hiragana}\\p{sc=Katakana}]"; // a word of its own, as on the server
const LETTERS = `(?:(?!${CHARACTER})\\S)*`;
const WORD = new RegExp(`${CHARACTER}|${LETTERS}(?!${CHARACTER})[\\p{L}\\p{N}]${LETTERS}`, "u");

/** Returns { first, last } of the first word at or after `from`; null if there is none. */
export function nextWord(text, from) {
  const plain = text.replace(MARKUP, (tag) => " ".repeat(tag.length));
  const found = WORD.exec(plain.slice(from));
  return found && { first: from + found.index, last: from + found.index + found[0].length };
}
