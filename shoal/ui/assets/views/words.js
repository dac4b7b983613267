/** Formats numbers for display. */

export function clock(seconds) {
  const whole = Math.floor(seconds);
  const rest = String(whole % 60).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}:${rest}`;
  return `${Math.floor(whole / 3600)}:${String(Math.floor(whole / 60) % 60).padStart(2, "0")}:${rest}`;
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : clock(seconds);
}

/** Formats an estimated duration. */
export function approximate(seconds) {
  if (seconds < 90) return `about ${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `about ${minutes} min` : `about ${(seconds / 3600).toFixed(1).replace(/\.0$/, "")} h`;
}

export function factor(value) {
  if (value === null) return "–";
  return value < 0.1 ? value.toFixed(3) : value.toFixed(2);
}

const counting = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => counting.format(value);

export function plural(number, thing) {
  return `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
}

/** Formats an approximate age. */
export function ago(date, now = Date.now()) {
  const minutes = Math.floor((now - date) / 60_000);
  if (minutes < 1) return "just now";
  if (minutes < 60) return `${minutes} min ago`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ago`;
  return new Date(date).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

/** Hashes a name to a number, deterministically. */
export function hash(name) {
  let sum = 2166136261;
  for (const letter of name) sum = Math.imul(sum ^ letter.codePointAt(0), 16777619) >>> 0;
  return sum;
}
