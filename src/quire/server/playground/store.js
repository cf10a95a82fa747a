// The chats in the browser's database. Every call may throw: a browser can forbid it, or be full.

let opening = null;

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function open() {
  const request = indexedDB.open("quire", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
  const database = await settled(request);
  database.onversionchange = () => database.close();
  return database;
}

async function transaction(mode, work) {
  opening ??= open();
  const made = (await opening).transaction("chats", mode);
  const done = new Promise((resolve, reject) => {
    made.oncomplete = resolve;
    made.onabort = () => reject(made.error);
  });
  const result = work(made.objectStore("chats"));
  await done;
  return result;
}

export const load = async () => (await transaction("readonly", (chats) => chats.getAll())).result;
export const save = (...changed) => transaction("readwrite", (chats) => changed.forEach((chat) => chats.put(chat)));
export const remove = (...ids) => transaction("readwrite", (chats) => ids.forEach((id) => chats.delete(id)));
