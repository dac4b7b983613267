/** Handles Speak: from the text to the stored recording. */

import { Track } from "./audio/track.js";
import { characters, expectedSeconds } from "./speech/lines.js";
import { Synthesis, randomSeed } from "./speech/synthesis.js";
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
  #current = null; // the Synthesis in progress

  /** `page`: player, playback, composer, dialogue, sampling, history, download. */
  constructor(page) {
    this.#page = page;
    this.rate = 0; // the model's sample rate in Hz; 0 before it is known
    byId("speak").addEventListener("click", () => this.toggle());
    page.composer.addEventListener("change", () => this.update());
    page.playback.addEventListener("turn", ({ detail }) => page.dialogue.mark(detail));
  }

  toggle() {
    if (this.#current) this.#current.stop();
    else if (!byId("speak").disabled) this.#speak();
  }

  stop() {
    this.#current?.stop();
  }

  update() {
    const busy = this.#current !== null;
    byId("speak").classList.toggle("busy", busy);
    byId("speak").disabled = !busy && (!this.rate || this.#page.composer.lines.length === 0);
    byId("speak-label").textContent = busy ? "Stop" : "Speak";
  }

  async #speak() {
    const { player, playback, composer, sampling, download } = this.#page;
    const recipe = { draft: composer.draft, moved: sampling.moved, seed: sampling.seed ?? randomSeed() };
    const track = new Track(this.rate);
    const options = { ...sampling.options, seed: recipe.seed, ...(sampling.showsText && { show_text: true }) };
    const synthesis = (this.#current = new Synthesis(composer.lines, options, track));
    this.#follow(synthesis);
    playback.expect(expectedSeconds(characters(synthesis.lines)));
    player.play(track);
    download.show(null);
    await synthesis.run().catch((problem) => void this.#explain(problem));
    this.#current = null;
    this.#end(synthesis, recipe);
  }

  #follow(synthesis) {
    const { player, playback } = this.#page;
    synthesis.addEventListener("audio", () => {
      player.follow();
      playback.update();
      this.#show(synthesis);
    });
    synthesis.addEventListener("line", () => this.#show(synthesis));
    showText("");
    synthesis.addEventListener("text", ({ detail }) => showText(`${byId("spoken-text").textContent} ${detail.text}`));
    synthesis.addEventListener("waiting", ({ detail }) => {
      byId("progress-words").textContent = `The server is busy; going on in ${detail.seconds} s`;
    });
    notice.clear();
    this.update();
    announce("Speaking");
  }

  #show(synthesis) {
    const { firstAudio, realTimeFactor: rtf, options } = synthesis;
    this.#page.playback.showFigures({ firstAudio, rtf, seed: options.seed });
    this.#showProgress(synthesis);
  }

  #showProgress({ lines, line, progress, outcome }) {
    byId("progress").hidden = lines.length < 2 || outcome !== null;
    byId("progress-bar").value = progress;
    byId("progress-words").textContent = `Part ${Math.min(line + 1, lines.length)} of ${lines.length}`;
  }

  #end(synthesis, recipe) {
    const { track, outcome } = synthesis;
    this.#showEnd(track, outcome);
    this.#show(synthesis);
    this.#page.playback.update();
    this.update();
    byId("keep-seed").disabled = false;
    byId("keep-seed").onclick = () => (this.#page.sampling.seed = recipe.seed);
    if (track.length) this.#keep(synthesis, recipe);
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

function showText(text) {
  byId("spoken-text").textContent = text.trim();
  byId("spoken-text").hidden = !text;
}

function announce(words) {
  byId("announcer").textContent = words;
}
