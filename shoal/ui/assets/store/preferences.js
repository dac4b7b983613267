/** Preferences in local storage. Without storage they last until the page is closed. */

const kept = (name) => `shoal.${name}`;

export function recall(name, otherwise = null) {
  try {
    const text = localStorage.getItem(kept(name));
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try {
    if (value === null || value === undefined) localStorage.removeItem(kept(name));
    else localStorage.setItem(kept(name), JSON.stringify(value));
  } catch {
    // Storage is blocked or full: the preference lasts until the page is closed.
  }
}
