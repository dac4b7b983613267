/** Live engine view: slots, queue, memory, throughput. Polls /metrics while it is visible. */

import { metrics, ready } from "../server/client.js";
import { readMetrics } from "../server/metrics.js";
import { byId, drawing, element } from "./dom.js";
import { count, duration, factor } from "./words.js";

const EVERY_MILLISECONDS = 1000;
/** Texts of the card for an engine process that has ended because the server was idle. */
const SLEEP = { asleep: "asleep to save memory; the next text wakes it up", waking: "waking up" };
const KEPT_READINGS = 60;
const MAX_DRAWN_SLOTS = 96;

export class EngineView {
  #readings = [];
  #looking = false;

  constructor() {
    // Poll only while the card is in view. A closed card is never in view.
    new IntersectionObserver(([{ isIntersecting }]) => (this.#looking = isIntersecting)).observe(byId("engine"));
    this.#watch();
  }

  async #watch() {
    for (;;) {
      if (this.#looking && !document.hidden) await this.#look();
      await new Promise((resolve) => setTimeout(resolve, EVERY_MILLISECONDS));
    }
  }

  async #look() {
    try {
      const [text, { backend, codec_backend: codec, engine }] = [await metrics(), await ready()];
      this.#readings = [...this.#readings, readMetrics(text, performance.now() / 1000, this.#readings.at(-1))].slice(
        -KEPT_READINGS,
      );
      const backends = backend ? `Computed by: ${backend === codec ? backend : `${backend}, codec on ${codec}`}` : "";
      byId("engine-backend").textContent = SLEEP[engine] ?? backends;
      this.#draw(this.#readings.at(-1));
    } catch (problem) {
      this.#readings = [];
      byId("engine").replaceChildren(element("p", { class: "empty" }, failureText(problem)));
    }
  }

  #draw(now) {
    const node = byId("engine");
    node.dataset.running = now.running;
    node.dataset.waiting = now.waiting;
    node.replaceChildren(
      tile("Speaking now", `${now.running} of ${now.slots ?? "–"}`, slotRow(now), "Requests that are computed together"),
      tile("Waiting", String(now.waiting), element("small", {}, `${now.inFlight} requests in all`)),
      tile(
        "Speed",
        `${now.throughput.toFixed(1)}×`,
        sparkline(this.#readings.map(({ throughput }) => throughput)),
        "Seconds of audio generated per second",
      ),
      tile(
        "Memory in use",
        share(now.blocksUsed, now.blocks),
        memoryBar(now),
        "KV cache: in use, kept for reuse, free",
      ),
      tile("First audio", now.firstAudio === null ? "–" : duration(now.firstAudio), element("small", {}, "typical wait")),
      tile("RTF", factor(now.realTimeFactor), element("small", {}, "seconds per second of audio"), "Real-time factor"),
      tile("Saved by reuse", count(now.tokensSaved), element("small", {}, "prompt tokens"), "Prefix cache"),
      tile(
        "Voices ready",
        share(now.voiceHits, now.voiceHits + now.voiceMisses),
        element("small", {}, "found in memory"),
      ),
    );
  }
}

function failureText(problem) {
  if (problem.status === 401) return "Enter an API key to see the engine.";
  if (problem.status === 404) return "This server does not publish its metrics.";
  return problem.title ? `${problem.title}.` : "No figures.";
}

function tile(title, value, picture, hint = null) {
  return element(
    "div",
    { class: "tile", title: hint },
    element("h3", {}, title),
    element("p", { class: "value" }, value),
    picture,
  );
}

const share = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");

/** One fish per slot; slots in use are lit. */
function slotRow({ slots, running }) {
  const drawn = Math.min(slots ?? 0, MAX_DRAWN_SLOTS);
  const lit = slots ? Math.round((running / slots) * drawn) : 0;
  const fish = Array.from({ length: drawn }, (_, n) => element("i", { class: n < lit ? "slot on" : "slot" }));
  return element("div", { class: "slots", "aria-hidden": "true" }, ...fish);
}

function memoryBar({ blocks, blocksUsed, blocksCached }) {
  const part = (number, from, kind) =>
    drawing("rect", {
      class: kind,
      x: (100 * from) / (blocks || 1),
      y: 0,
      width: (100 * number) / (blocks || 1),
      height: 6,
    });
  return drawing(
    "svg",
    { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
    part(blocksUsed, 0, "used"),
    part(blocksCached, blocksUsed, "known"),
  );
}

function sparkline(values) {
  const peak = Math.max(1, ...values);
  const place = (value, n) =>
    `${100 - (values.length - 1 - n) * (100 / (KEPT_READINGS - 1))},${27 - (25 * value) / peak}`;
  const points = values.map(place).join(" ");
  return drawing(
    "svg",
    { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" },
    drawing("polyline", { points }),
  );
}
