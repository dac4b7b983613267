/** The text of the speech in the player: the current word is marked, and a click on a word plays from there.
 *
 * One list box with one tab stop. The marked word is not announced: a screen reader would talk over the speech.
 */

import { byId, element } from "./dom.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

export class SpokenWords {
  #player;
  #track = null;
  #drawn = []; // one entry per part: { node, state: the words that are drawn }
  #marked = null; // the element of the word that is being spoken
  #cursor = null; // the word that the arrow keys have reached
  #still = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(player) {
    this.#player = player;
    this.box = byId("words");
    this.box.addEventListener("click", ({ target }) => this.#click(target.closest(".word")));
    this.box.addEventListener("keydown", (event) => this.#press(event));
    this.box.addEventListener("focus", () => this.#point(this.#cursor ?? this.#marked ?? this.#words[0]));
    this.box.addEventListener("blur", () => this.#point(null));
  }

  /** Follows the player. Cheap enough for every frame: only a part with new words is drawn again. */
  update() {
    const { track, audiblePosition } = this.#player;
    const timed = track?.parts.some(({ words }) => words) ?? false;
    if (this.#track !== track) this.#clear(track);
    this.box.hidden = !timed;
    if (!timed) return;
    this.#draw(track);
    this.#mark(track.wordAt(audiblePosition));
  }

  get #words() {
    return this.box.getElementsByClassName("word");
  }

  #clear(track) {
    this.#track = track;
    this.#drawn = [];
    this.#mark(null);
    this.#point(null);
    this.box.replaceChildren();
  }

  #draw(track) {
    const { parts } = track;
    if (parts.length < this.#drawn.length) this.#clear(track);
    parts.forEach((part, at) => {
      this.#drawn[at] ??= this.#begin(part, parts[at - 1]);
      const [drawn, words] = [this.#drawn[at], track.wordsOf(at)];
      const state = `${part.words?.length} ${words.length}`;
      if (drawn.state === state) return;
      drawn.state = state;
      drawn.node.replaceChildren(...contentOf(part.text, words, at));
      this.#find(at);
    });
  }

  /** Lines of one turn are one paragraph. */
  #begin(part, before) {
    const node = element("span", {}, part.text ?? "");
    if (before && before.turn === part.turn) this.box.lastChild.append(" ", node);
    else this.box.append(element("p", { role: "group", class: `speaker-${part.speaker}` }, node));
    return { node, state: "" };
  }

  /** Finds the marked word and the cursor again after their part was redrawn with new elements. */
  #find(part) {
    const again = (word) => (word?.dataset.part === String(part) ? byId(word.id) : word);
    [this.#marked, this.#cursor] = [again(this.#marked), again(this.#cursor)];
    this.#marked?.setAttribute("aria-current", "true");
    this.#cursor?.setAttribute("aria-selected", "true");
  }

  #mark(place) {
    const word = place && byId(nameOf(place.part, place.index));
    if (word === this.#marked) return;
    this.#marked?.removeAttribute("aria-current");
    this.#marked = word;
    word?.setAttribute("aria-current", "true");
    // Do not scroll while the user points at the text or navigates in it.
    if (word && !this.box.matches(":hover, :focus-visible")) this.#show(word);
  }

  /** Scrolls the box, never the page. */
  #show(word) {
    const top = word.offsetTop - this.box.offsetTop;
    const [above, below] = [top < this.box.scrollTop, top + word.offsetHeight > this.box.scrollTop + this.box.clientHeight];
    if (!above && !below) return;
    const behavior = this.#still.matches ? "instant" : "smooth";
    this.box.scrollTo({ top: top - this.box.clientHeight / 3, behavior });
  }

  #point(word) {
    this.#cursor?.setAttribute("aria-selected", "false");
    this.#cursor = word;
    word?.setAttribute("aria-selected", "true");
    if (word) this.box.setAttribute("aria-activedescendant", word.id);
    else this.box.removeAttribute("aria-activedescendant");
  }

  #press(event) {
    if (event.key === "Enter" || event.key === " ") this.#play(this.#cursor);
    else if (event.key in STEPS) this.#step(STEPS[event.key]);
    else return;
    // Leave the page's own shortcuts, such as Ctrl+Enter, to the page.
    if (!event.ctrlKey && !event.metaKey) event.preventDefault();
  }

  #step(by) {
    const words = [...this.#words];
    const to = Math.max(0, Math.min(words.length - 1, words.indexOf(this.#cursor) + by));
    this.#point(words[to]);
    this.#show(words[to]);
  }

  #click(word) {
    // A drag selects text and plays nothing.
    if (!word || !getSelection().isCollapsed) return;
    this.#point(word);
    this.#play(word);
  }

  #play(word) {
    if (!word) return;
    const { part, index } = word.dataset;
    this.#player.playFrom(this.#track.wordsOf(Number(part))[index].start);
  }
}

const nameOf = (part, index) => `word-${part}-${index}`;

/** Returns the text of a part: an element for each word with a time, and strings between them. */
function contentOf(text, words, part) {
  const found = [];
  let at = 0;
  words.forEach(({ first, last }, index) => {
    const attributes = { class: "word", role: "option", id: nameOf(part, index), "aria-selected": "false" };
    const word = element("span", attributes, text.slice(first, last));
    Object.assign(word.dataset, { part, index });
    found.push(text.slice(at, first), word);
    at = last;
  });
  return [...found, text.slice(at)];
}
