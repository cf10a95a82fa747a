// A chat is a tree. Its messages lie in one list; each names its parent by its place in the list, -1 for none, and the
// one of its children that is shown. Several children of a message are versions: an edited question, a second answer.

const FORMAT = "quire-chats";
const ROOT = -1;

export function newChat() {
  const id = [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("");
  return { id, updated: Date.now(), settings: {}, shown: ROOT, messages: [] };
}

const holder = (chat, parent) => parent === ROOT ? chat : chat.messages[parent];

// The places of the messages that are shown, from the first question on.
export function path(chat) {
  const places = [];
  for (let at = chat.shown; at !== ROOT; at = chat.messages[at].shown) places.push(at);
  return places;
}

// The messages from the first question to this one, as the server wants them.
export function historyOf(chat, place) {
  const said = [];
  for (let at = place; at !== ROOT; at = chat.messages[at].parent) said.unshift(chat.messages[at]);
  return said.map(({ role, content }) => ({ role, content }));
}

// A message and its siblings, oldest first.
export function versions(chat, place) {
  const { parent } = chat.messages[place];
  return [...chat.messages.keys()].filter((at) => chat.messages[at].parent === parent);
}

export function add(chat, parent, role, content) {
  chat.messages.push({ parent, role, content, thinking: "", calls: [], facts: "", shown: ROOT });
  const place = chat.messages.length - 1;
  show(chat, place);
  return place;
}

export const show = (chat, place) => { holder(chat, chat.messages[place].parent).shown = place; };

// Hide what follows a message. Returns the place of what was shown, or null.
export function hideAfter(chat, parent) {
  const { shown } = holder(chat, parent);
  holder(chat, parent).shown = ROOT;
  return shown === ROOT ? null : shown;
}

// Where the next question goes: behind the last answer. A question that has none is replaced: the new one is a version
// of it.
export function nextParent(chat) {
  const last = path(chat).at(-1) ?? ROOT;
  return last !== ROOT && chat.messages[last].role === "user" ? chat.messages[last].parent : last;
}

export function titleOf(chat) {
  const words = chat.messages[Math.max(0, chat.shown)]?.content.trim().slice(0, 200).split("\n")[0];
  return words || "New chat";
}

export function has(chat, words) {
  return chat.messages.some(({ content }) => content.toLowerCase().includes(words));
}

export const toFile = (chats) => JSON.stringify({ format: FORMAT, version: 1, chats });

// The chats of a file. Throws an Error that says what is wrong with it; fields that a chat does not have are left out.
export function fromFile(text) {
  let file = null;
  try {
    file = JSON.parse(text);
  } catch { /* null is refused below */ }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.chats)) {
    throw new Error("This is no file of exported chats.");
  }
  return file.chats.map((chat, number) => {
    const wrong = (what) => { throw new Error(`Nothing was imported: in chat ${number + 1} of the file ${what}.`); };
    if (typeof chat?.id !== "string" || !chat.id || !Number.isFinite(chat.updated)) {
      wrong("the id or the time is missing");
    }
    if (!Array.isArray(chat.messages)) wrong("there is no list of messages");
    const roleAt = (place) => place === ROOT ? "assistant" : chat.messages[place].role;
    const messages = chat.messages.map((message, place) => {
      const { parent, role, content, thinking, calls, facts } = message ?? {};
      if (typeof content !== "string" || !["user", "assistant"].includes(role)) wrong(`message ${place + 1} is none`);
      if (!Number.isInteger(parent) || parent < ROOT || parent >= place || roleAt(parent) === role) {
        wrong(`message ${place + 1} follows no message that it could answer`);
      }
      const text = (value) => typeof value === "string" ? value : "";
      const named = Array.isArray(calls) ? calls : [];
      const clean = named.map((call) => ({ name: text(call?.name), arguments: text(call?.arguments) }));
      return { parent, role, content, thinking: text(thinking), calls: clean, facts: text(facts), shown: ROOT };
    });
    const { id, updated } = chat;
    const clean = { id, updated, settings: strings(chat.settings), shown: ROOT, messages };
    for (const [parent, { shown }] of [[ROOT, chat], ...chat.messages.entries()]) {
      if (messages[shown]?.parent === parent) holder(clean, parent).shown = shown;
    }
    return clean;
  });
}

const strings = (object) =>
  Object.fromEntries(Object.entries(object ?? {}).filter(([, value]) => typeof value === "string"));
