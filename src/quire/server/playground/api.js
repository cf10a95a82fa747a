// Requests to the server that this page came from, with the key.

import { storage } from "./dom.js";

// A proxy may show the server under a prefix.
export const HERE = new URL("..", import.meta.url).href.replace(/\/$/, "");

const session = storage("session");
// The key lives as long as the tab. isRefused: the server wants one, or another one.
export const access = { key: session.getItem("quire.key") ?? "", isRefused: false };

class ServerError extends Error {
  constructor(response, { message, code, param }) {
    super(message);
    this.status = response.status;
    this.param = param;
    this.facts = [code, `request ${response.headers.get("x-request-id")}`].filter(Boolean).join(" · ");
  }
}

const unreachable = () => { throw new Error("The server does not answer."); };
const cutOff = () => { throw new Error("The connection ended in the middle of the answer."); };

// What the server answers to a GET without a key, whatever its status is.
export const look = (path) => fetch(HERE + path).catch(unreachable);

// An answer of status 200. Throws with the server's words otherwise.
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  // A header holds bytes: a key that is not ASCII is sent as UTF-8.
  if (access.key) headers.authorization = "Bearer " + String.fromCharCode(...new TextEncoder().encode(access.key));
  const response = await fetch(HERE + path, { ...options, headers }).catch(unreachable);
  if (response.ok) return response;
  const text = await response.text();
  let error = { message: `The server answered with status ${response.status}.` };
  try {
    error = JSON.parse(text).error ?? error;
  } catch { /* not from Quire: a proxy's page */ }
  if (response.status === 401) {
    access.isRefused = true;
    // The server's words are for programs, which send a header.
    error.message = access.key ? "The server does not accept this key." : "This server needs an API key.";
  }
  throw new ServerError(response, error);
}

export const ask = (body, signal) => call("/v1/chat/completions",
  { method: "POST", signal, body: JSON.stringify(body), headers: { "content-type": "application/json" } });

// Try a key. It is kept for this tab if the server accepts it, and throws otherwise.
export async function useKey(key) {
  access.key = key;
  access.isRefused = false;
  await call("/v1/models");
  session.setItem("quire.key", key);
}

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(cutOff);
    if (done) cutOff();
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const data = JSON.parse(part.slice("data: ".length));
      if (data.error) throw new ServerError(response, data.error);
      yield data;
    }
  }
}
