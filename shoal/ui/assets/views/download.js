/** Download menu. wav and pcm are encoded in the browser, other formats by the server. */

import { pcmBytes, wavFile } from "../audio/pcm.js";
import { convert } from "../server/client.js";
import { byId, element } from "./dom.js";

export const FORMAT_NAMES = {
  wav: "WAV",
  mp3: "MP3",
  opus: "Opus",
  flac: "FLAC",
  aac: "AAC",
  webm: "WebM",
  pcm: "PCM (raw samples)",
};

export class DownloadMenu {
  #track = null;
  #onProblem;
  #menu = byId("download");
  formats = [];

  constructor(onProblem) {
    this.#onProblem = onProblem;
    this.offer(["wav", "pcm"]);
    this.#menu.addEventListener("keydown", (event) => event.key === "Escape" && this.#close());
    this.#menu.querySelector("summary").addEventListener("click", (event) => this.#track || event.preventDefault());
    this.#menu.addEventListener("focusout", ({ relatedTarget: to }) => {
      if (to && !this.#menu.contains(to)) this.#menu.open = false;
    });
    document.addEventListener("pointerdown", (event) => this.#menu.contains(event.target) || (this.#menu.open = false));
    this.show(null);
  }

  offer(formats) {
    this.formats = Object.keys(FORMAT_NAMES).filter((format) => formats.includes(format));
    const choices = this.formats.map((format) =>
      element(
        "button",
        { type: "button", "data-format": format, click: () => this.#take(format) },
        FORMAT_NAMES[format],
      ),
    );
    byId("formats").replaceChildren(...choices.map((button) => element("li", {}, button)));
  }

  /** The track to download; null for none. */
  show(track) {
    this.#track = track?.length ? track : null;
    this.#menu.querySelector("summary").setAttribute("aria-disabled", String(!this.#track));
    byId("share").disabled = !this.#track;
    if (!this.#track) this.#menu.open = false;
  }

  #take(format) {
    this.#close();
    downloadTrack(this.#track, format).catch((problem) => this.#onProblem(problem));
  }

  #close() {
    this.#menu.open = false;
    this.#menu.querySelector("summary").focus();
  }
}

/** Saves samples as a file. Raises a Problem if the server cannot convert them. */
export async function downloadTrack({ samples, rate }, format) {
  if (format === "pcm") return save(new Blob([pcmBytes(samples)]), "shoal.pcm");
  const wav = wavFile(samples, rate);
  save(format === "wav" ? wav : await convert(wav, format), `shoal.${format}`);
}

export function save(file, name) {
  const link = element("a", { href: URL.createObjectURL(file), download: name });
  link.click();
  // After this time the browser has started the download.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
