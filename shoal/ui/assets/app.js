/** Assembles the page and polls the server's state. */

import { Player } from "./audio/player.js";
import * as server from "./server/client.js";
import { Speaking } from "./speaking.js";
import { Preview } from "./speech/preview.js";
import { readPreference, writePreference } from "./store/preferences.js";
import { Composer } from "./views/composer.js";
import { DialogueEditor } from "./views/dialogue.js";
import { byId } from "./views/dom.js";
import { DownloadMenu } from "./views/download.js";
import { EditDialog } from "./views/edit-dialog.js";
import { EngineView } from "./views/engine.js";
import { HistoryList } from "./views/history.js";
import { askForKey } from "./views/key-dialog.js";
import * as notice from "./views/notice.js";
import { PlaybackView } from "./views/playback.js";
import { SamplingForm } from "./views/sampling.js";
import { ShareDialog } from "./views/share-dialog.js";
import { VoiceDialog } from "./views/voice-dialog.js";
import { VoicePicker } from "./views/voices.js";

const POLL_SECONDS = { notReady: 1, ready: 5 };
const STATES = {
  starting: "Loading the model…",
  restarting: "The engine is restarting…",
  stopping: "The server is shutting down",
  failed: "The server has failed",
  unreachable: "No server",
};
const NO_KEY = { title: "This server asks for a key", detail: "Without one, the page cannot speak." };

const player = new Player();
const playback = new PlaybackView(player);
const picker = new VoicePicker();
const dialogue = new DialogueEditor();
const sampling = new SamplingForm();
const composer = new Composer(dialogue, picker);
const history = new HistoryList();
const download = new DownloadMenu((problem) => notice.show(problem));
const speaking = new Speaking({
  player,
  playback,
  composer,
  dialogue,
  sampling,
  history,
  download,
  picker,
  refreshVoices,
});
const preview = new Preview();
const shareDialog = new ShareDialog();
const voiceDialog = new VoiceDialog();
const editDialog = new EditDialog();
new EngineView();

let loaded = false; // the model's description is loaded
let reported = ""; // the last failure to load it; the page tries again, but does not show it again
let declined = false; // the user closed the key dialog without a key; do not ask again

async function pollServer() {
  for (;;) {
    const { state, model } = await server.ready().catch(() => ({ state: "unreachable" }));
    if (state === "ready" && !loaded && !declined) await loadModelInfo();
    if (state !== "ready") loaded = false;
    showState(state, model);
    const seconds = loaded ? POLL_SECONDS.ready : POLL_SECONDS.notReady;
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  }
}

function showState(state, model) {
  const words =
    state === "ready" ? (speaking.rate ? `${model} · ${speaking.rate / 1000} kHz` : `${model}`) : STATES[state];
  byId("status").dataset.state = state;
  const line = byId("status").querySelector(".words");
  // Write only changes: screen readers announce every write.
  if (line.textContent !== words) line.textContent = words;
}

/** Loads the model's description: voices, defaults and limits. */
async function loadModelInfo() {
  try {
    const facts = await server.about();
    speaking.rate = facts.sample_rate;
    speaking.timed = facts.word_times;
    composer.maxCharacters = facts.text_characters;
    sampling.setDefaults(facts.sampling);
    download.offer(facts.formats);
    shareDialog.formats = download.formats;
    voiceDialog.clones = facts.clones;
    byId("clone-note").hidden = facts.clones;
    showVoices(facts.voices);
    byId("version").textContent = `Shoal ${facts.version}`;
    loaded = true;
    reported = "";
  } catch (problem) {
    if (problem.status === 401) await requireKey(problem);
    else if (problem.title) reportOnce(problem);
    else throw problem;
  }
}

function reportOnce(problem) {
  if (reported !== problem.detail) notice.show(problem);
  reported = problem.detail;
}

/** The polling loads the model's description when there is a key. */
async function requireKey(problem) {
  declined = !(await askForKey(server.key.get() ? problem : NO_KEY));
  if (declined) notice.show(NO_KEY, { label: "Enter a key", work: () => requireKey(problem) });
}

async function changeKey() {
  if (!(await askForKey())) return;
  if (declined) notice.clear();
  declined = false;
  await loadModelInfo();
}

function showVoices(voices) {
  picker.show(voices);
  dialogue.show(voices);
  speaking.update();
}

async function refreshVoices(choose) {
  try {
    showVoices((await server.about()).voices);
    if (choose !== undefined) picker.reveal(choose);
    picker.keepFocus();
  } catch (problem) {
    notice.show(problem);
  }
}

function reuse({ draft, seed, moved }) {
  composer.take(draft);
  sampling.seed = seed;
  sampling.show(moved);
  byId("text").scrollIntoView({ block: "center" });
  byId(draft.mode === "dialogue" ? "add-turn" : "text").focus();
}

function replay({ speech, track }) {
  speaking.stop();
  preview.stop();
  speaking.shown = speech;
  player.play(track);
  playback.showFigures(speech);
  playback.update();
  download.show(track);
}

async function listen(voice) {
  if (player.state === "playing") await player.toggle();
  await preview.toggle(voice, speaking.rate).catch((problem) => {
    if (!problem.title) throw problem;
    notice.show(problem);
  });
}

function connectTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => byId("theme-button").setAttribute("aria-pressed", String(isDark()));
  byId("theme-button").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    writePreference("theme", theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}

function connectKeyboard() {
  byId("shortcut").textContent = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      speaking.toggle();
    } else if (event.key === "Escape" && !event.defaultPrevented) {
      speaking.stop();
      preview.stop();
    }
  });
}

picker.addEventListener("edit", ({ detail }) => editDialog.open(detail));
picker.addEventListener("preview", ({ detail }) => listen(detail));
picker.addEventListener("change", () => picker.markPreview(preview.playing));
preview.addEventListener("change", ({ detail }) => picker.markPreview(detail));
byId("share").addEventListener("click", () => speaking.shown && shareDialog.open(speaking.shown, player.track));
editDialog.addEventListener("changed", ({ detail: { was, now } }) =>
  refreshVoices(picker.chosen === was ? now : undefined),
);
voiceDialog.addEventListener("saved", ({ detail }) => refreshVoices(detail));
byId("add-voice").addEventListener("click", () => voiceDialog.open());
byId("key-button").addEventListener("click", changeKey);
history.addEventListener("play", ({ detail }) => replay(detail));
history.addEventListener("share", ({ detail: { speech, track } }) => shareDialog.open(speech, track));
history.addEventListener("reuse", ({ detail }) => reuse(detail.speech));
// Remember which sections are open.
for (const section of ["advanced", "engine-card"]) {
  byId(section).open = readPreference(section, false);
  byId(section).addEventListener("toggle", () => writePreference(section, byId(section).open));
}
connectTheme();
connectKeyboard();
speaking.update();
pollServer();
