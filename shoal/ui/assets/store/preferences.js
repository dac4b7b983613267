/** Small choices that outlive the page. A browser that keeps nothing loses only convenience. */

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
    // Private windows and full disks: the choice holds until the page is left.
  }
}
