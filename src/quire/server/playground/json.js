// JSON as people read it.

const MAX_CHARS = 100_000;
const TOKENS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;

// The text of an object or a list with a line for each member. Numbers and strings stay as they are. null: it is no
// JSON.
export function indented(text) {
  if (!/^\s*[[{]/.test(text) || text.length > MAX_CHARS) return null;
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  const line = (depth) => `\n${"  ".repeat(depth)}`;
  const opens = (token) => token === "{" || token === "[", closes = (token) => token === "}" || token === "]";
  const tokens = text.match(TOKENS);
  let out = "", depth = 0;
  tokens.forEach((token, at) => {
    if (closes(token) && !opens(tokens[at - 1])) out += line(depth -= 1);
    out += token;
    if (opens(token) && !closes(tokens[at + 1])) out += line(depth += 1);
    else if (token === ",") out += line(depth);
    else if (token === ":") out += " ";
  });
  return out;
}
