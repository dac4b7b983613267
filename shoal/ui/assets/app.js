/** Assembles the page and polls the server's state. */

import { Player } from "./audio/player.js";
import * as server from "./server/client.js";
import { Speaking } from "./speaking.js";
import { Preview } from "./speech/preview.js";
import { recall, remember } from "./store/preferences.js";
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

const LOOK_SECONDS = { whileAway: 1, whileReady: 5 };
const STATES = {
  starting: "Loading the model…",
  restarting: "The engine is coming back…",
  stopping: "The server is shutting down",
  failed: "The server has failed",
  away: "No server",
};

const player = new Player();
const playback = new PlaybackView(player);
const picker = new VoicePicker();
const dialogue = new DialogueEditor();
const sampling = new SamplingForm();
const composer = new Composer(dialogue, picker);
const history = new HistoryList();
const download = new DownloadMenu((problem) => notice.tell(problem));
const speaking = new Speaking({ player, playback, composer, dialogue, sampling, history, download, picker });
const preview = new Preview();
const shareDialog = new ShareDialog();
const voiceDialog = new VoiceDialog();
const editDialog = new EditDialog();
new EngineView();

let known = false; // the model's description is loaded

async function lookAfterServer() {
  for (;;) {
    const { state, model } = await server.ready().catch(() => ({ state: "away" }));
    if (state === "ready" && !known) await meet();
    if (state !== "ready") known = false;
    showState(state, model);
    const seconds = known ? LOOK_SECONDS.whileReady : LOOK_SECONDS.whileAway;
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
async function meet() {
  try {
    const facts = await server.about();
    speaking.rate = facts.sample_rate;
    speaking.timed = facts.word_times;
    composer.mostCharacters = facts.text_characters;
    sampling.setDefaults(facts.sampling);
    download.offer(facts.formats);
    shareDialog.formats = download.formats;
    voiceDialog.clones = facts.clones;
    byId("clone-note").hidden = facts.clones;
    showVoices(facts.voices);
    byId("version").textContent = `Shoal ${facts.version}`;
    known = true;
  } catch (problem) {
    if (problem.status === 401) await askForKey(server.key.get() ? problem : null);
    else if (problem.title) notice.tell(problem);
    else throw problem;
  }
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
  } catch (problem) {
    notice.tell(problem);
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
    notice.tell(problem);
  });
}

function connectTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const tell = () => byId("theme-button").setAttribute("aria-pressed", String(isDark()));
  byId("theme-button").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    remember("theme", theme);
    tell();
  });
  system.addEventListener("change", tell);
  tell();
}

function connectKeyboard() {
  byId("shortcut").textContent = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      speaking.toggle();
    } else if (event.key === "Escape") {
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
byId("key-button").addEventListener("click", async () => (await askForKey()) && meet());
history.addEventListener("play", ({ detail }) => replay(detail));
history.addEventListener("share", ({ detail: { speech, track } }) => shareDialog.open(speech, track));
history.addEventListener("reuse", ({ detail }) => reuse(detail.speech));
// Remember which sections are open.
for (const section of ["advanced", "engine-card"]) {
  byId(section).open = recall(section, false);
  byId(section).addEventListener("toggle", () => remember(section, byId(section).open));
}
connectTheme();
connectKeyboard();
speaking.update();
lookAfterServer();
