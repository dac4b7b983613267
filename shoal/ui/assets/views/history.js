/** History list: play a recording again, save it, or reuse its text and settings. */

import { Track } from "../audio/track.js";
import * as store from "../store/history.js";
import { byId, drawing, element, icon } from "./dom.js";
import * as notice from "./notice.js";
import { ago, duration, factor } from "./words.js";

const PLAY = "M8 5.2v13.6l11-6.8z";
const AGAIN = "M4 12a8 8 0 1 0 2.6-5.9M4 4v4.5h4.5";
const SHARE = "M12 4v11m0 0-4-4m4 4 4-4M5 19h14";
const CROSS = "m7 7 10 10M17 7 7 17";
const CLEAR = "Clear";
const ENDINGS = { stopped: "stopped early", broken: "broke off" };
const OUTLINE_BARS = 40;
const GONE = {
  title: "This speech is no longer kept",
  detail: "It was deleted in another tab, or removed to make room for newer speech.",
};

/** Dispatches `play` and `share` with a speech and its track, `reuse` with a speech. */
export class HistoryList extends EventTarget {
  constructor() {
    super();
    byId("clear-history").addEventListener("click", () => this.#pressClear());
    byId("clear-history").addEventListener("blur", () => (byId("clear-history").textContent = CLEAR));
    this.draw();
  }

  async add(speech, track) {
    const { samples, rate, parts } = track;
    const outline = track.outline(OUTLINE_BARS).map((height) => Math.round(100 * height) / 100);
    const { id } = await store.add({ ...speech, rate, parts, outline, samples: samples.slice(), made: Date.now() });
    await this.draw();
    return id;
  }

  async remove(id) {
    await store.remove(id);
    await this.draw();
  }

  /** The first press asks for confirmation if there is more than one speech to delete. */
  async #pressClear() {
    const [button, count] = [byId("clear-history"), byId("history").childElementCount];
    if (count > 1 && button.textContent === CLEAR) {
      button.textContent = `Delete all ${count}?`;
      return;
    }
    await store.clear();
    await this.draw();
  }

  async draw() {
    const speeches = await store.list().catch(() => []);
    byId("history").replaceChildren(...speeches.map((speech) => this.#row(speech)));
    byId("history-empty").hidden = speeches.length > 0;
    byId("clear-history").hidden = speeches.length === 0;
    byId("clear-history").textContent = CLEAR;
  }

  #row(speech) {
    const name = speech.text.slice(0, 60);
    const button = (label, path, work, solid = false) =>
      element(
        "button",
        { type: "button", class: "icon", "aria-label": `${label}: ${name}`, title: label, click: work },
        icon(path, solid),
      );
    return element(
      "li",
      { class: "speech" },
      button("Play", PLAY, () => this.#read(speech.id, "play"), true),
      element("div", { class: "speech-words" }, element("p", {}, speech.text), element("small", {}, facts(speech))),
      outlineOf(speech.outline),
      button("Use again", AGAIN, () => this.#dispatch("reuse", { speech })),
      button("Download or copy as code", SHARE, () => this.#read(speech.id, "share")),
      button("Delete", CROSS, ({ target }) => this.#delete(speech.id, target.closest("li"))),
    );
  }

  /** Moves the focus to the next speech: the button that had it is gone. */
  async #delete(id, row) {
    const rows = byId("history").children;
    const at = [...rows].indexOf(row);
    await this.remove(id);
    const near = rows[Math.min(at, rows.length - 1)]?.querySelector("button:last-child");
    (near ?? byId("speak")).focus({ preventScroll: true });
  }

  async #read(id, event) {
    const speech = await store.read(id);
    if (!speech) {
      notice.show(GONE);
      return this.draw();
    }
    this.#dispatch(event, { speech: withRequests(speech), track: Track.of(speech.samples, speech.rate, speech.parts) });
  }

  #dispatch(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/** Adds the requests to a speech that an earlier version of the page stored without them. */
function withRequests(speech) {
  const { requests, options, text, seed, draft } = speech;
  if (requests) return speech;
  return { ...speech, requests: [{ text, voice: draft?.voice ?? null }], options: options ?? { seed } };
}

function facts({ voices, seconds, rtf, outcome, made }) {
  const words = [voices.join(", "), duration(seconds), `RTF ${factor(rtf)}`, ENDINGS[outcome], ago(made)];
  return words.filter(Boolean).join(" · ");
}

function outlineOf(heights) {
  const peak = Math.max(0.1, ...heights);
  const bars = heights.map((height, n) => {
    const tall = Math.max(1.5, (22 * height) / peak);
    return drawing("rect", { x: 3 * n, y: 12 - tall / 2, width: 1.8, height: tall, rx: 0.9 });
  });
  return drawing("svg", { class: "outline", viewBox: `0 0 ${3 * heights.length} 24`, "aria-hidden": "true" }, ...bars);
}
