/** The player: waveform, position and transport controls. */

import { byId } from "./dom.js";
import { advance, draw, schoolOf, settled, sizeFor } from "./school.js";
import { SpokenWords } from "./spoken-words.js";
import { clock, duration, factor } from "./words.js";

const SEEK_SECONDS = 1;
const SWIMMING_MILLISECONDS = 33;
const RESTING_MILLISECONDS = 250; // interval of checks for another size or theme while nothing moves
const QUIET = 0.08; // sound below this peak is not scaled up to the full height

/** Dispatches `turn` when another turn starts playing; null when playback ends. */
export class PlaybackView extends EventTarget {
  #player;
  #words;
  #expected = 0; // seconds, while more audio is expected
  #school = [];
  #outline = { of: null, state: "", bars: [] };
  #drawn = 0;
  #picture = null; // everything that the drawing depends on while nothing moves
  #rest = null; // timer of the next frame while nothing moves
  #inView = true;
  #turn = null;
  #still = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(player) {
    super();
    this.#player = player;
    this.#words = new SpokenWords(player);
    this.canvas = byId("wave");
    this.#listen();
    requestAnimationFrame((now) => this.#frame(now));
  }

  /** `expected` is the estimated duration in seconds until the real one is known. */
  expect(seconds) {
    this.#expected = seconds;
    this.#wake();
  }

  showFigures({ firstAudio, rtf, seed }) {
    byId("first-audio").textContent = firstAudio === null ? "–" : duration(firstAudio);
    byId("rtf").textContent = factor(rtf);
    byId("seed-used").textContent = seed ?? "–";
  }

  /** Also updates the accessible labels: numbers, names and states. */
  update() {
    const { track, state, position } = this.#player;
    const playback = byId("playback");
    playback.dataset.state = state;
    playback.dataset.samples = track?.length ?? 0;
    playback.dataset.rate = track?.rate ?? 0;
    playback.dataset.played = position;
    const here = track ? position / track.rate : 0;
    byId("position").textContent = clock(here);
    byId("duration").textContent = clock(track?.seconds ?? 0);
    this.#updateSlider(here, track?.seconds ?? 0);
    const play = byId("play");
    play.disabled = !track?.length;
    play.setAttribute("aria-label", state === "playing" ? "Pause" : "Play");
    this.#words.update();
    this.#follow(state === "playing" && track.length ? track.partAt(position).turn : null);
  }

  #follow(turn) {
    if (turn === this.#turn) return;
    this.#turn = turn;
    this.dispatchEvent(new CustomEvent("turn", { detail: turn }));
  }

  #updateSlider(here, all) {
    const usable = all > 0;
    this.canvas.tabIndex = usable ? 0 : -1;
    this.canvas.setAttribute("aria-disabled", String(!usable));
    this.canvas.setAttribute("aria-valuemax", all.toFixed(1));
    this.canvas.setAttribute("aria-valuenow", here.toFixed(1));
    this.canvas.setAttribute("aria-valuetext", `${here.toFixed(1)} of ${all.toFixed(1)} seconds`);
  }

  #listen() {
    byId("play").addEventListener("click", () => this.#player.toggle());
    this.#player.addEventListener("change", () => {
      this.update();
      this.#wake();
    });
    this.canvas.addEventListener("keydown", (event) => this.#seekByKey(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#seekByHand(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.#seekByHand(event));
    new IntersectionObserver(([{ isIntersecting }]) => (this.#inView = isIntersecting)).observe(this.canvas);
  }

  #seekByKey(event) {
    const { track, position } = this.#player;
    if (!track?.length) return;
    const step = SEEK_SECONDS * track.rate;
    const places = { ArrowLeft: position - step, ArrowRight: position + step, Home: 0, End: track.length - 1 };
    if (event.key === " " || event.key === "Enter") this.#player.toggle();
    else if (event.key in places) this.#player.seek(Math.round(places[event.key]));
    else return;
    event.preventDefault();
  }

  #seekByHand(event) {
    const { track } = this.#player;
    if (!track?.length) return;
    this.canvas.setPointerCapture(event.pointerId);
    const share = event.offsetX / this.canvas.clientWidth;
    this.#player.seek(Math.round(share * this.#span(track) * track.rate));
  }

  /** Seconds that the full width shows. */
  #span(track) {
    return track.complete ? track.seconds : Math.max(track.seconds, this.#expected);
  }

  /** Draws what has changed. A page on which nothing moves must not keep a core of the visitor's machine busy. */
  #frame(now) {
    const { track, state } = this.#player;
    const moves = this.#inView && (state === "playing" || this.#swims(track));
    this.#requestNext(moves);
    if (!this.#inView || (state !== "playing" && now - this.#drawn < SWIMMING_MILLISECONDS)) return;
    if (!moves && this.#isDrawn(track)) return;
    this.#drawn = now;
    if (moves) this.#picture = null;
    if (state === "playing") this.update();
    this.#paint(track, this.#still.matches ? 0 : now / 1000);
  }

  #requestNext(moves) {
    if (moves) requestAnimationFrame((now) => this.#frame(now));
    else this.#rest = setTimeout(() => this.#wake(), RESTING_MILLISECONDS);
  }

  /** Draws the next frame without waiting for the timer. */
  #wake() {
    if (this.#rest === null) return; // a frame was requested already
    clearTimeout(this.#rest);
    this.#rest = null;
    requestAnimationFrame((now) => this.#frame(now));
  }

  /** Returns whether the school moves while nothing plays. */
  #swims(track) {
    if (this.#still.matches) return false;
    const bars = track ? this.#bars(track, this.#school.length) : [];
    return !track || !settled(this.#school, bars);
  }

  /** Returns whether the canvas shows the current state, and stores this state as drawn. */
  #isDrawn(track) {
    const { clientWidth, clientHeight } = this.canvas;
    const { lead, speakers } = this.#colors();
    const state = [track?.length, track?.complete, this.#player.position, this.#expected];
    const picture = [track, ...state, clientWidth, clientHeight, devicePixelRatio, lead, ...speakers];
    const same = this.#picture?.every((part, n) => part === picture[n]) ?? false;
    this.#picture = picture;
    return same;
  }

  #paint(track, time) {
    const size = sizeFor(this.canvas.clientWidth);
    if (this.#school.length !== size) this.#school = schoolOf(size);
    const bars = track ? this.#bars(track, size) : null;
    advance(
      this.#school,
      bars?.map(({ height }) => height),
      { still: this.#still.matches },
    );
    draw(this.canvas, this.#school, {
      time,
      played: track ? this.#player.position / Math.max(1, this.#span(track) * track.rate) : null,
      colors: this.#colors(),
      speakers: bars?.map(({ speaker }) => speaker),
    });
  }

  /** Height and speaker of each bar; recomputed only when the track has grown. */
  #bars(track, size) {
    const state = `${track.length} ${track.complete} ${size}`;
    if (this.#outline.of === track && this.#outline.state === state) return this.#outline.bars;
    const share = track.length ? track.seconds / this.#span(track) : 0;
    const filled = Math.round(share * size);
    const loud = filled ? track.outline(filled) : [];
    const peak = Math.max(QUIET, ...loud);
    const bars = Array.from({ length: size }, (_, n) => ({
      height: (loud[n] ?? 0) / peak,
      speaker: track.partAt((n / Math.max(1, filled)) * track.length).speaker,
    }));
    this.#outline = { of: track, state, bars };
    return bars;
  }

  #colors() {
    const style = getComputedStyle(this.canvas);
    const color = (name) => style.getPropertyValue(name);
    return { lead: color("--lead"), speakers: [0, 1, 2, 3, 4, 5].map((n) => color(`--speaker-${n}`)) };
  }
}
