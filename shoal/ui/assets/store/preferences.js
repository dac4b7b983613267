/** Preferences in local storage. Without storage they last until the page is closed. */

const keyOf = (name) => `shoal.${name}`;

export function readPreference(name, fallback = null) {
  try {
    const text = localStorage.getItem(keyOf(name));
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

export function writePreference(name, value) {
  try {
    if (value === null || value === undefined) localStorage.removeItem(keyOf(name));
    else localStorage.setItem(keyOf(name), JSON.stringify(value));
  } catch {
    // Storage is blocked or full: the preference lasts until the page is closed.
  }
}
