/** History in IndexedDB: samples and the settings that produced them. The oldest entries are evicted first. */

const DATABASE = "shoal";
const SPEECHES = "speeches";
const MAX_SPEECHES = 60;
const MAX_BYTES = 256 * 2 ** 20;

/** Stores a speech: samples (Int16Array), rate, parts and outline; text, voices and figures; settings to reproduce it. */
export async function add(speech) {
  const id = await inStore("readwrite", (store) => store.add(speech));
  await evictOldest();
  return { ...speech, id };
}

/** Returns entries, newest first, without samples, to keep memory small. */
export async function list() {
  const found = [];
  await eachNewestFirst("readonly", ({ value }) => {
    const { samples, ...rest } = value;
    found.push({ ...rest, seconds: samples.length / value.rate });
  });
  return found;
}

export const read = (id) => inStore("readonly", (store) => store.get(id));
export const remove = (id) => inStore("readwrite", (store) => store.delete(id));
export const clear = () => inStore("readwrite", (store) => store.clear());

async function evictOldest() {
  let count = 0;
  let bytes = 0;
  await eachNewestFirst("readwrite", (cursor) => {
    count += 1;
    bytes += cursor.value.samples.byteLength;
    // The newest entry is kept whatever its size.
    if (count > 1 && (count > MAX_SPEECHES || bytes > MAX_BYTES)) cursor.delete();
  });
}

async function inStore(mode, work) {
  const database = await open();
  return promised(work(database.transaction(SPEECHES, mode).objectStore(SPEECHES)));
}

async function eachNewestFirst(mode, visit) {
  const database = await open();
  const request = database.transaction(SPEECHES, mode).objectStore(SPEECHES).openCursor(null, "prev");
  return new Promise((resolve, reject) => {
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      if (!request.result) return resolve();
      visit(request.result);
      request.result.continue();
    };
  });
}

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(SPEECHES, { keyPath: "id", autoIncrement: true });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
