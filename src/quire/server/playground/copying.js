// The clipboard, and a request as a program.

import { HERE, access } from "./api.js";
import { make } from "./dom.js";

const NOT_OPENAI = ["top_k", "min_p", "repetition_penalty"]; // the official client takes them in extra_body

// Whether the browser allowed it.
export async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // only pages from this machine or by HTTPS have a clipboard; the old way works everywhere
    const area = make("textarea", "unseen", text);
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    before.focus();
    return isCopied;
  }
}

export function download(text, name) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = make("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

export function curlCommand(body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const auth = access.key ? ' \\\n  -H "Authorization: Bearer $QUIRE_API_KEY"' : "";
  return `curl -N '${HERE}/v1/chat/completions' \\\n  -H 'Content-Type: application/json'${auth} \\\n  -d '${json}'\n`;
}

// A value of a request as Python. Strings, numbers, lists and objects are written there as in JSON.
const python = (value) => JSON.stringify(value, (_, each) =>
  each === null || typeof each === "boolean" ? `\u0000${each === null ? "None" : each ? "True" : "False"}\u0000` : each, 4)
  .replaceAll(/"\\u0000(\w+)\\u0000"/g, "$1").replaceAll("\n", "\n    ");

export function pythonProgram({ stream, ...body }) {
  const extra = Object.fromEntries(NOT_OPENAI.filter((name) => name in body).map((name) => [name, body[name]]));
  for (const name of NOT_OPENAI) delete body[name];
  if (Object.keys(extra).length) body.extra_body = extra;
  const lines = Object.entries(body).map(([name, value]) =>
    `    ${name}=${python(value)},\n`);
  return `${access.key ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${HERE}/v1", api_key=${access.key ? 'os.environ["QUIRE_API_KEY"]' : '"none"'})
chunks = client.chat.completions.create(
${lines.join("")}    stream=True,
)
for chunk in chunks:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}
