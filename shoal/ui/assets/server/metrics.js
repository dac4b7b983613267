/** Parses the server's Prometheus metrics into the engine's current figures. */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Returns the samples by name: Map(name -> [{ labels, value }]). */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries(Array.from((match[2] ?? "").matchAll(LABEL), ([, name, value]) => [name, value]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** Returns the sum of all samples of a name; null if there are none. */
export function total(samples, name) {
  return samples.get(name)?.reduce((sum, { value }) => sum + value, 0) ?? null;
}

/** Estimates a quantile of a histogram from its buckets; null before the first observation. */
export function quantile(samples, name, share) {
  const buckets = new Map();
  for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    buckets.set(bound, (buckets.get(bound) ?? 0) + value);
  }
  const all = buckets.get(Infinity) ?? 0;
  if (!all) return null;
  return interpolate(
    [...buckets].sort(([a], [b]) => a - b),
    share * all,
  );
}

/** Interpolates linearly within a bucket, like Prometheus; above the last bound, returns that bound. */
function interpolate(buckets, rank) {
  let [lower, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= rank) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (rank - below)) / Math.max(1e-9, count - below);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

/** Returns the figures to show. `before` is the previous reading, for rates; both have `at` in seconds. */
export function readMetrics(text, at, before = null) {
  const samples = parse(text);
  const of = (name) => total(samples, name);
  const audioMade = of("shoal_audio_seconds_total") ?? 0;
  const frames = of("shoal_frames_total") ?? 0;
  const passed = before ? at - before.at : 0;
  // A counter decreases only when the server was restarted.
  const rate = (now, then) => (passed > 0 && now >= then ? (now - then) / passed : 0);
  return {
    at,
    audioMade,
    frames,
    slots: of("shoal_engine_slots"),
    running: of("shoal_engine_running") ?? 0,
    waiting: of("shoal_engine_waiting") ?? 0,
    inFlight: of("shoal_requests_in_flight") ?? 0,
    blocks: of("shoal_kv_blocks"),
    blocksUsed: of("shoal_kv_blocks_used") ?? 0,
    blocksCached: of("shoal_kv_blocks_cached") ?? 0,
    tokensSaved: of("shoal_prefix_tokens_saved_total") ?? 0,
    prefixHits: of("shoal_prefix_hits_total") ?? 0,
    voiceHits: of("shoal_voice_cache_hits_total") ?? 0,
    voiceMisses: of("shoal_voice_cache_misses_total") ?? 0,
    spoken: of("shoal_utterances_completed_total") ?? 0,
    throughput: before ? rate(audioMade, before.audioMade) : 0,
    frameRate: before ? rate(frames, before.frames) : 0,
    firstAudio: quantile(samples, "shoal_time_to_first_audio_seconds", 0.5),
    realTimeFactor: quantile(samples, "shoal_real_time_factor", 0.5),
  };
}
