/** Download menu. wav and pcm are encoded in the browser, other formats by the server. */

import { pcmBytes, wavFile } from "../audio/pcm.js";
import { convert } from "../server/client.js";
import { byId, element } from "./dom.js";

const NAMES = {
  wav: "WAV",
  mp3: "MP3",
  opus: "Opus",
  flac: "FLAC",
  aac: "AAC",
  webm: "WebM",
  pcm: "PCM, bare samples",
};

export class DownloadMenu {
  #track = null;
  #onProblem;
  #menu = byId("download");

  constructor(onProblem) {
    this.#onProblem = onProblem;
    this.offer(["wav", "pcm"]);
    this.#menu.addEventListener("keydown", (event) => event.key === "Escape" && this.#close());
    this.#menu.querySelector("summary").addEventListener("click", (event) => this.#track || event.preventDefault());
    document.addEventListener("pointerdown", (event) => this.#menu.contains(event.target) || (this.#menu.open = false));
    this.show(null);
  }

  offer(formats) {
    const known = Object.keys(NAMES).filter((format) => formats.includes(format));
    const choices = known.map((format) =>
      element("button", { type: "button", "data-format": format, click: () => this.#take(format) }, NAMES[format]),
    );
    byId("formats").replaceChildren(...choices.map((button) => element("li", {}, button)));
  }

  /** The track to download; null for none. */
  show(track) {
    this.#track = track?.length ? track : null;
    this.#menu.querySelector("summary").setAttribute("aria-disabled", String(!this.#track));
    if (!this.#track) this.#menu.open = false;
  }

  async #take(format) {
    const { samples, rate } = this.#track;
    this.#close();
    try {
      const wav = () => wavFile(samples, rate);
      const file =
        format === "wav" ? wav() : format === "pcm" ? new Blob([pcmBytes(samples)]) : await convert(wav(), format);
      save(file, `shoal.${format}`);
    } catch (problem) {
      this.#onProblem(problem);
    }
  }

  #close() {
    this.#menu.open = false;
    this.#menu.querySelector("summary").focus();
  }
}

function save(file, name) {
  const link = element("a", { href: URL.createObjectURL(file), download: name });
  link.click();
  // By then the browser has started the download.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
