/** Handles Speak: from the text to the stored recording. */

import { Track } from "./audio/track.js";
import { Performance, drawSeed } from "./speech/perform.js";
import { characters, expectedSeconds } from "./speech/script.js";
import { byId } from "./views/dom.js";
import { askForKey } from "./views/key-dialog.js";
import * as notice from "./views/notice.js";
import { duration } from "./views/words.js";

const SILENCE = {
  title: "The model said nothing",
  detail: "It ended before its first sound. Another seed or other words will help.",
};

export class Speaking {
  #page;
  #now = null; // the current Performance

  /** `page`: player, stage, composer, dialogue, sampling, history, download. */
  constructor(page) {
    this.#page = page;
    this.rate = 0; // the model's sample rate in Hz; 0 before it is known
    byId("speak").addEventListener("click", () => this.toggle());
    page.composer.addEventListener("change", () => this.update());
    page.stage.addEventListener("turn", ({ detail }) => page.dialogue.mark(detail));
  }

  toggle() {
    if (this.#now) this.#now.stop();
    else if (!byId("speak").disabled) this.#speak();
  }

  stop() {
    this.#now?.stop();
  }

  update() {
    const busy = this.#now !== null;
    byId("speak").classList.toggle("busy", busy);
    byId("speak").disabled = !busy && (!this.rate || this.#page.composer.lines.length === 0);
    byId("speak-label").textContent = busy ? "Stop" : "Speak";
  }

  async #speak() {
    const { player, stage, composer, sampling, download } = this.#page;
    const recipe = { draft: composer.draft, moved: sampling.moved, seed: sampling.seed ?? drawSeed() };
    const track = new Track(this.rate);
    const now = (this.#now = new Performance(composer.lines, { ...sampling.wishes, seed: recipe.seed }, track));
    this.#follow(now);
    stage.expect(expectedSeconds(characters(now.lines)));
    player.play(track);
    download.show(null);
    await now.run().catch((problem) => void this.#explain(problem));
    this.#now = null;
    this.#end(now, recipe);
  }

  #follow(now) {
    const { player, stage } = this.#page;
    now.addEventListener("audio", () => {
      player.follow();
      stage.update();
      this.#show(now);
    });
    now.addEventListener("line", () => this.#show(now));
    now.addEventListener("waiting", ({ detail }) => {
      byId("progress-words").textContent = `The server is busy; going on in ${detail.seconds} s`;
    });
    notice.clear();
    this.update();
    announce("Speaking");
  }

  #show(now) {
    this.#page.stage.showFigures({ firstAudio: now.firstAudio, rtf: now.realTimeFactor, seed: now.wishes.seed });
    this.#showProgress(now);
  }

  #showProgress({ lines, line, progress, outcome }) {
    byId("progress").hidden = lines.length < 2 || outcome !== null;
    byId("progress-bar").value = progress;
    byId("progress-words").textContent = `Part ${Math.min(line + 1, lines.length)} of ${lines.length}`;
  }

  #end(now, recipe) {
    const { track, outcome } = now;
    this.#showEnd(track, outcome);
    this.#show(now);
    this.#page.stage.update();
    this.update();
    byId("keep-seed").disabled = false;
    byId("keep-seed").onclick = () => (this.#page.sampling.seed = recipe.seed);
    if (track.length) this.#keep(now, recipe);
    else if (outcome === "whole") notice.tell(SILENCE);
    announce(outcome === "whole" ? `Done, ${duration(track.seconds)} of audio` : "Stopped");
  }

  /** Without storage only the history is lost. */
  #keep({ lines, track, firstAudio, realTimeFactor, outcome }, recipe) {
    const text = lines.map((line) => line.text).join(" ");
    const voices = [...new Set(lines.map(({ voice }) => voice ?? "Model’s own"))];
    const speech = { ...recipe, text, voices, firstAudio, rtf: realTimeFactor, outcome };
    this.#page.history.add(speech, track).catch(() => {});
  }

  /** After an error the audio so far plays to its end; after a stop it does not. */
  #showEnd(track, outcome) {
    const { player, download } = this.#page;
    if (player.track !== track) return; // the user plays something from the history
    if (!track.length) player.clear();
    else if (outcome === "stopped") player.stop();
    download.show(track);
  }

  async #explain(problem) {
    if (!problem.title) throw problem;
    if (problem.status === 401 && (await askForKey(problem))) return this.#speak();
    notice.tell(problem, problem.status === 400 || problem.status === 422 ? null : () => this.#speak());
  }
}

function announce(words) {
  byId("announcer").textContent = words;
}
