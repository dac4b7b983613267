/** Client for the server's routes. Failures raise a Problem; an abort signal raises an AbortError. */

import { readPreference, writePreference } from "../store/preferences.js";
import { problemOf, unreachable } from "./problem.js";

const JSON_BODY = { "Content-Type": "application/json" };

export const key = {
  get: () => readPreference("key", ""),
  set: (value) => writePreference("key", value || null),
};

export const about = (signal) => json("v1/about", { signal });
export const metrics = async (signal) => (await ask("metrics", { signal })).text();

/** Returns the server's state, also while it is not ready. Needs no key. */
export async function ready() {
  const response = await send("ready", {});
  return response.json().catch(() => ({ state: "failed" }));
}

/** Returns a response that streams 16-bit samples as they are generated. */
export function speak(fields, signal) {
  const body = JSON.stringify({ ...fields, format: "pcm", streaming: true });
  return ask("v1/tts", { method: "POST", headers: JSON_BODY, body, signal });
}

/** Returns a response that streams events of 16-bit samples, each with the words that have ended in it. */
export function speakTimed(fields, signal) {
  const body = JSON.stringify({ ...fields, format: "pcm" });
  return ask("v1/tts/stream/with-timestamp", { method: "POST", headers: JSON_BODY, body, signal });
}

/** Measures a recording without storing it; resolves to its length, level and findings. */
export async function checkRecording(recording, transcript, signal) {
  const form = new FormData();
  form.set("audio", recording, "recording");
  if (transcript) form.set("text", transcript);
  return json("v1/references/check?format=json", { method: "POST", body: form, signal });
}

export async function addVoice(name, recording, transcript) {
  const form = new FormData();
  form.set("id", name);
  form.set("audio", recording, "recording");
  form.set("text", transcript);
  return json("v1/references/add?format=json", { method: "POST", body: form });
}

export function renameVoice(from, to) {
  const body = JSON.stringify({ old_reference_id: from, new_reference_id: to });
  return json("v1/references/update?format=json", { method: "POST", headers: JSON_BODY, body });
}

/** `words`: title, description, gender, accent, preview. */
export function describeVoice(name, words) {
  const body = JSON.stringify({ reference_id: name, ...words });
  return json("v1/references/describe?format=json", { method: "POST", headers: JSON_BODY, body });
}

export function deleteVoice(name) {
  const body = JSON.stringify({ reference_id: name });
  return json("v1/references/delete?format=json", { method: "DELETE", headers: JSON_BODY, body });
}

/** Converts a wav file to another format. */
export async function convert(wav, format) {
  const form = new FormData();
  form.set("audio", wav, "speech.wav");
  form.set("format", format);
  return (await ask("v1/convert", { method: "POST", body: form })).blob();
}

async function json(path, options) {
  return (await ask(path, options)).json();
}

async function ask(path, options) {
  const response = await send(path, options);
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function send(path, { headers = {}, ...options }) {
  const secret = key.get();
  const shown = secret ? { ...headers, Authorization: `Bearer ${secret}` } : headers;
  try {
    return await fetch(path, { ...options, headers: shown, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
}
