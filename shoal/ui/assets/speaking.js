/** Handles Speak: from the text to the stored recording, or to a file. */

import { FileTrack } from "./audio/file-track.js";
import { Track } from "./audio/track.js";
import { FILE_SECONDS, LONG_SECONDS, PLAYED_SECONDS, characters, expectedSeconds } from "./speech/lines.js";
import { requestsOf } from "./speech/snippets.js";
import { Synthesis, randomSeed } from "./speech/synthesis.js";
import { byId } from "./views/dom.js";
import { save } from "./views/download.js";
import { askForKey } from "./views/key-dialog.js";
import * as notice from "./views/notice.js";
import { duration, approximate } from "./views/words.js";

const SILENCE = {
  title: "The model said nothing",
  detail: "It ended before its first sound. Another seed or other words will help.",
};
const NOT_RETRYABLE = [400, 404, 413, 422]; // the same request would fail again

export class Speaking {
  #page;
  #current = null; // the Synthesis in progress
  #makesFile = false;

  /** `page`: player, playback, composer, dialogue, sampling, history, download, picker, refreshVoices. */
  constructor(page) {
    this.#page = page;
    this.rate = 0; // the model's sample rate in Hz; 0 before it is known
    this.timed = false; // the model has word times
    this.shown = null; // the speech in the player: text, requests, options
    byId("speak").addEventListener("click", () => this.toggle());
    page.composer.addEventListener("change", () => this.update());
    // A file exists only when it is complete. A speech that is played has been heard so far.
    addEventListener("beforeunload", (event) => this.#current && this.#makesFile && event.preventDefault());
    page.playback.addEventListener("turn", ({ detail }) => page.dialogue.mark(detail));
  }

  toggle() {
    if (this.#current) this.#current.stop();
    else if (!byId("speak").disabled) this.#ask();
  }

  stop() {
    this.#current?.stop();
  }

  update() {
    const busy = this.#current !== null;
    byId("speak").classList.toggle("busy", busy);
    byId("hint").classList.toggle("busy", busy);
    byId("speak").disabled = !busy && (!this.rate || this.#page.composer.lines.length === 0);
    byId("speak-label").textContent = busy ? "Stop" : "Speak";
  }

  /** Speaks, unless a setting is wrong or the text is so long that the user should choose how. */
  #ask() {
    const { composer, sampling } = this.#page;
    if (sampling.seedProblem) {
      notice.show(sampling.seedProblem);
      return sampling.focusSeed();
    }
    const seconds = expectedSeconds(composer.letters) / (sampling.moved.speed ?? 1);
    if (seconds <= LONG_SECONDS) return this.#speak();
    this.#askAboutLength(seconds);
  }

  #askAboutLength(seconds) {
    const title = `This is ${approximate(seconds)} of speech`;
    if (seconds > FILE_SECONDS) {
      const detail = `A page can make ${approximate(FILE_SECONDS)} at a time. Divide the text, or use the command line: shoal batch.`;
      return notice.show({ title, detail });
    }
    const file = { label: "Make a file", work: () => this.#speak({ file: true }) };
    const here = { label: "Play it here", work: () => this.#speak() };
    const detail = "A file is not played and needs little memory: it is downloaded when it is complete.";
    notice.show({ title, detail }, ...(seconds > PLAYED_SECONDS ? [file] : [file, here]));
  }

  async #speak({ file = false } = {}) {
    const { playback, composer, sampling } = this.#page;
    const seed = sampling.seed ?? randomSeed();
    const job = { draft: composer.draft, moved: sampling.moved, seed, file, kept: null };
    const options = { ...sampling.options, seed, ...(sampling.showsText && { show_text: true }) };
    const track = file ? new FileTrack(this.rate) : new Track(this.rate);
    const synthesis = new Synthesis(composer.lines, options, track, { timed: this.timed && !file });
    this.#follow(synthesis);
    playback.expect(expectedSeconds(characters(synthesis.lines)));
    showText("");
    await this.#run(synthesis, job, 0);
  }

  /** `from` is the sample at which playback starts. */
  async #run(synthesis, job, from) {
    const { player, playback, download } = this.#page;
    this.#current = synthesis;
    this.#makesFile = job.file;
    notice.clear();
    this.update();
    announce(job.file ? "Making a file" : "Speaking");
    if (job.file) player.stop();
    else player.play(synthesis.track, from);
    playback.update();
    download.show(null);
    await synthesis.run().catch((problem) => void this.#explain(problem, synthesis, job));
    this.#current = null;
    this.#end(synthesis, job);
  }

  /** Continues after a failure, from where the speech stopped. Replaces the history entry of the broken speech. */
  async #continue(synthesis, job) {
    const { player, history } = this.#page;
    const resumeAt = player.track === synthesis.track ? player.position : synthesis.track.length;
    const id = await job.kept;
    if (id) await history.remove(id);
    await this.#run(synthesis, job, Math.min(resumeAt, synthesis.track.length));
  }

  #follow(synthesis) {
    const { player, playback } = this.#page;
    synthesis.addEventListener("audio", () => {
      player.follow();
      playback.update();
      this.#show(synthesis);
    });
    synthesis.addEventListener("line", () => this.#show(synthesis));
    synthesis.addEventListener("text", ({ detail }) => showText(`${byId("spoken-text").textContent} ${detail.text}`));
    synthesis.addEventListener("waiting", ({ detail }) => {
      byId("progress-words").textContent = `The server is busy; going on in ${detail.seconds} s`;
    });
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

  #end(synthesis, job) {
    const { track, outcome } = synthesis;
    if (!job.file) this.#showEnd(track, outcome);
    this.#show(synthesis);
    this.#page.playback.update();
    this.update();
    byId("keep-seed").disabled = false;
    byId("keep-seed").onclick = () => (this.#page.sampling.seed = job.seed);
    if (!track.length && outcome === "whole") notice.show(SILENCE);
    else if (job.file && outcome === "whole") save(track.wav(), "shoal.wav");
    else if (job.file && outcome === "stopped") this.#offerFile(synthesis, job);
    else if (track.length && !job.file) this.#keep(synthesis, job);
    announce(outcome === "whole" ? `Done, ${duration(track.seconds)} of audio` : "Stopped");
  }

  /** The history does not keep what goes into a file, so a stop must not lose it. */
  #offerFile(synthesis, job) {
    const { track } = synthesis;
    if (!track.length) return;
    const detail = `${duration(track.seconds)} of audio is ready.`;
    const resume = { label: "Continue", work: () => this.#continue(synthesis, job) };
    notice.show({ title: "Stopped", detail }, resume, { label: "Save it", work: () => save(track.wav(), "shoal.wav") });
  }

  /** Stores the speech in the history. A failure of the storage loses only the history. */
  #keep({ lines, options, track, firstAudio, realTimeFactor, outcome }, job) {
    const text = lines.map((line) => line.text).join(" ");
    const voices = [...new Set(lines.map(({ voice }) => (voice === null ? "Model’s own" : this.#page.picker.titleOf(voice))))];
    const { show_text: _, ...sent } = options;
    const { draft, moved, seed } = job;
    const speech = { draft, moved, seed, text, voices, requests: requestsOf(lines), options: sent };
    this.shown = speech;
    job.kept = this.#page.history
      .add({ ...speech, firstAudio, rtf: realTimeFactor, outcome }, track)
      .catch(() => null);
  }

  /** After an error the audio so far plays to its end; after a stop it does not. */
  #showEnd(track, outcome) {
    const { player, download } = this.#page;
    if (player.track !== track) return; // the user plays something from the history
    if (!track.length) player.clear();
    else if (outcome === "stopped") player.stop();
    download.show(track);
  }

  async #explain(problem, synthesis, job) {
    if (!problem.title) throw problem;
    if (problem.status === 401 && (await askForKey(problem))) return this.#ask();
    if (problem.status === 404) await this.#page.refreshVoices(); // the voice was deleted elsewhere
    if (NOT_RETRYABLE.includes(problem.status)) return notice.show(problem);
    const begun = synthesis.track.length > 0;
    const work = () => (begun ? this.#continue(synthesis, job) : this.#speak({ file: job.file }));
    notice.show(problem, { label: begun ? "Continue" : "Try again", work, after: problem.retryAfter ?? 0 });
  }
}

function showText(text) {
  byId("spoken-text").textContent = text.trim();
  byId("spoken-text").hidden = !text;
}

function announce(words) {
  byId("announcer").textContent = words;
}
