/** Dialog to add a voice: a recording or a file, its transcript and a name. */

import { Recorder } from "../audio/recorder.js";
import { addVoice, checkRecording } from "../server/client.js";
import { capitalised } from "../server/problem.js";
import { byId, closable, element, showError } from "./dom.js";
import { clock, duration } from "./words.js";

const PASSAGE =
  "The harbour wakes slowly. First the gulls, then the ropes against the masts, and at last the fishermen, " +
  "who greet each other as if the night had lasted a year. By seven the fog is gone, and you can see every island.";
const LONGEST_SECONDS = 60;
const UNUSABLE = "This cannot become a voice as it is";

export class VoiceDialog extends EventTarget {
  #dialog = closable(byId("voice-dialog"));
  #recorder = null;
  #recording = null; // a Blob
  #meter = 0;
  #check = null; // the check of the recording: a promise of its report, or of null if it failed
  clones = true;

  constructor() {
    super();
    byId("passage").textContent = PASSAGE;
    byId("voice-source").addEventListener("change", () => this.#chooseSource());
    byId("record").addEventListener("click", () => this.#pressRecord());
    byId("recording-file").addEventListener("change", ({ target }) =>
      this.#take(target.files[0], target.files[0]?.name),
    );
    byId("transcript").addEventListener("change", () => this.#startCheck());
    byId("voice-form").addEventListener("submit", (event) => this.#save(event));
    this.#dialog.addEventListener("close", () => this.#reset());
    this.#acceptDrops(byId("drop"));
  }

  open() {
    byId("voice-form").reset();
    byId("transcript").value = PASSAGE;
    this.#take(null);
    this.#chooseSource();
    showError(byId("voice-error"), null);
    byId("voice-clone-note").hidden = this.clones;
    this.#dialog.showModal();
  }

  #chooseSource() {
    const uploads = byId("voice-form").elements.source.value === "upload";
    byId("record-pane").hidden = uploads;
    byId("upload-pane").hidden = !uploads;
    if (uploads) this.#discardRecorder();
    const transcript = byId("transcript");
    // The passage is the transcript of a recording made here; a file needs its own.
    if (uploads && transcript.value === PASSAGE) transcript.value = "";
    if (!uploads && !transcript.value) transcript.value = PASSAGE;
  }

  /** Does nothing while the browser asks for the microphone. */
  #pressRecord() {
    if (!this.#recorder) this.#startRecording();
    else if (this.#recorder.running) this.#endRecording();
  }

  async #startRecording() {
    showError(byId("voice-error"), null);
    const recorder = (this.#recorder = new Recorder());
    const problem = await recorder.start().catch((refused) => refused);
    // The dialog was closed, or a file preferred, while the browser asked: the microphone must not stay on.
    if (this.#recorder !== recorder) return recorder.release();
    if (problem) {
      this.#recorder = null;
      return showError(byId("voice-error"), problem);
    }
    this.#showRecording(true);
    this.#meter = requestAnimationFrame(() => this.#measure());
  }

  /** Switches the microphone off and drops what it has recorded. */
  #discardRecorder() {
    this.#recorder?.release();
    this.#recorder = null;
    this.#showRecording(false);
    if (!this.#recording) byId("record-clock").textContent = "0:00";
  }

  async #endRecording() {
    const recorder = this.#recorder;
    this.#recorder = null;
    this.#showRecording(false);
    try {
      this.#take(await recorder.stop());
    } catch (problem) {
      showError(byId("voice-error"), problem);
    }
  }

  #showRecording(on) {
    byId("record").setAttribute("aria-pressed", String(on));
    byId("record-label").textContent = on ? "Stop" : this.#recording ? "Record again" : "Record";
    if (!on) cancelAnimationFrame(this.#meter);
  }

  #measure() {
    if (!this.#recorder) return;
    byId("record-clock").textContent = clock(this.#recorder.seconds);
    drawLevel(byId("level"), this.#recorder.level);
    if (this.#recorder.seconds >= LONGEST_SECONDS) this.#endRecording();
    else this.#meter = requestAnimationFrame(() => this.#measure());
  }

  #take(recording, name = null) {
    this.#recording = recording ?? null;
    const preview = byId("recording-preview");
    if (preview.src) URL.revokeObjectURL(preview.src);
    preview.hidden = !recording;
    if (recording) preview.src = URL.createObjectURL(recording);
    else preview.removeAttribute("src");
    byId("drop-words").replaceChildren(name ?? "Choose a recording, or drop it here");
    byId("record-label").textContent = recording ? "Record again" : "Record";
    this.#startCheck();
  }

  /** Has the server measure the recording, and shows the result before anything is stored. */
  #startCheck() {
    const recording = this.#recording;
    this.#showCheck(recording ? "checking" : "none");
    if (!recording) return;
    const check = checkRecording(recording, byId("transcript").value.trim()).then(
      (report) => ({ report }),
      (problem) => ({ problem }),
    );
    this.#check = check;
    check.then(({ report, problem }) => {
      if (this.#check !== check || this.#recording !== recording) return; // an older recording
      this.#showCheck(problem ? "failed" : report.findings.length ? "findings" : "good", report, problem);
    });
  }

  #showCheck(state, report = null, problem = null) {
    const box = byId("recording-check");
    box.dataset.state = state;
    box.hidden = state === "none";
    box.replaceChildren(...checkWords(state, report, problem));
    byId("save-voice").textContent = state === "findings" ? "Save anyway" : "Save voice";
  }

  async #save(event) {
    event.preventDefault();
    if (this.#recorder?.running) await this.#endRecording();
    if (!this.#recording) {
      return showError(byId("voice-error"), {
        title: "No recording yet",
        detail: "Record something, or choose a file.",
      });
    }
    if (await this.#hasNewFindings()) return;
    const name = byId("voice-name").value.trim();
    byId("save-voice").disabled = true;
    try {
      await addVoice(name, this.#recording, byId("transcript").value.trim());
      this.dispatchEvent(new CustomEvent("saved", { detail: name }));
      this.#dialog.close();
    } catch ({ status, title, detail }) {
      showError(byId("voice-error"), { title: status === 400 ? UNUSABLE : title, detail });
    } finally {
      byId("save-voice").disabled = false;
    }
  }

  /** Waits for a check in progress; findings that the user has not seen yet are shown instead of saving. */
  async #hasNewFindings() {
    const box = byId("recording-check");
    if (box.dataset.state !== "checking") return false;
    await this.#check;
    return box.dataset.state === "findings";
  }

  #reset() {
    this.#check = null;
    this.#take(null);
    this.#discardRecorder();
  }

  #acceptDrops(area) {
    // A file that is dropped beside the area would replace the page, and end a speech in progress.
    for (const name of ["dragover", "drop"]) {
      document.addEventListener(name, (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
    }
    for (const name of ["dragover", "dragleave", "drop"]) {
      area.addEventListener(name, (event) => {
        event.preventDefault();
        area.classList.toggle("over", name === "dragover");
        const file = event.dataTransfer?.files?.[0];
        if (name === "drop" && file) this.#take(file, file.name);
      });
    }
  }
}

function checkWords(state, report, problem) {
  if (state === "none") return [];
  if (state === "checking") return [element("p", {}, "Checking the recording…")];
  // A server that cannot check now may still store the voice, so only its reason for refusing a recording is shown.
  if (state === "failed") return [element("p", {}, problem.status === 400 ? problem.detail : "It could not be checked now.")];
  const facts = `${duration(report.seconds)}, ${Math.round(report.level_db)} dB loud, noise at ${Math.round(report.noise_db)} dB`;
  const found = report.findings.map(({ message }) => element("li", {}, capitalised(message)));
  const verdict = found.length ? "It can be used, but could be better." : "A good recording.";
  return [element("p", {}, element("b", {}, verdict), ` ${facts}`), element("ul", {}, ...found)];
}

function drawLevel(canvas, level) {
  const dots = devicePixelRatio;
  canvas.width = canvas.clientWidth * dots;
  canvas.height = canvas.clientHeight * dots;
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(canvas).color;
  pen.beginPath();
  pen.roundRect(0, 0, Math.max(canvas.height, canvas.width * Math.min(1, level)), canvas.height, canvas.height / 2);
  pen.fill();
}
