/** Errors with a title and a message that tell the user what to do. */

const UNREACHABLE = {
  title: "The server does not answer",
  detail: "It may be restarting, and the page keeps looking for it. Your text and the audio so far are kept.",
};

const TITLES = {
  400: "This cannot be spoken as it is",
  401: "This server asks for a key",
  404: "Not found",
  408: "The upload took too long",
  409: "The name is taken",
  413: "Too large for this server",
  415: "The server cannot read this",
  422: "One of the settings is not possible",
  429: "The server is busy",
  500: "Something went wrong on the server",
  501: "This server cannot do that",
  503: "The server is not ready",
  504: "This took too long",
};

export class Problem extends Error {
  /** `retryAfter` is in seconds; null if a retry would not help. */
  constructor(title, detail, { status = 0, retryAfter = null } = {}) {
    super(detail);
    this.title = title;
    this.detail = detail;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Returns the message of an error body, in any of the server's formats. */
export function messageOf(body) {
  if (Array.isArray(body)) return body.map(({ loc, msg }) => `${(loc ?? []).join(".")}: ${msg}`).join("; ");
  return body?.error?.message ?? body?.message ?? "";
}

/** Returns Retry-After in seconds; the header may also be a date. */
export function secondsToWait(header, now = Date.now()) {
  if (!header) return null;
  const seconds = Number(header);
  if (Number.isFinite(seconds)) return Math.max(1, seconds);
  const date = Date.parse(header);
  return Number.isNaN(date) ? null : Math.max(1, Math.ceil((date - now) / 1000));
}

export function describe(status, body, retryAfter = null) {
  const title = TITLES[status] ?? `The server answered ${status}`;
  const detail = capitalised(messageOf(body)) || "The server gave no reason; its log has more.";
  return new Problem(title, detail, { status, retryAfter: secondsToWait(retryAfter) });
}

export async function problemOf(response) {
  const body = await response.json().catch(() => null);
  return describe(response.status, body, response.headers.get("Retry-After"));
}

export function unreachable() {
  return new Problem(UNREACHABLE.title, UNREACHABLE.detail);
}

/** A stream that fails after its first samples has no error status: the server closes the connection. */
export function streamAborted(receivedSeconds, elapsedSeconds) {
  const kept = `The first ${receivedSeconds.toFixed(1)} s are kept. You can go on from where it stopped.`;
  const what = receivedSeconds ? kept : "It ended before its first sound.";
  const work = `${elapsedSeconds.toFixed(0)} s of work`;
  const why = elapsedSeconds > 30 ? ` The server gave up after ${work}; the rest is asked for in smaller parts.` : "";
  return new Problem("The audio broke off", what + why);
}

/** Returns a message as a sentence. */
export function capitalised(text) {
  const sentence = text.trim();
  if (!sentence) return "";
  const ended = /[.!?…]$/.test(sentence) ? sentence : `${sentence}.`;
  return ended[0].toUpperCase() + ended.slice(1);
}
