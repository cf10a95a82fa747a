// A model's Markdown as elements. The text is hostile: HTML in it is shown as it was written, what the parser makes of
// the rest passes the sanitizer, and the work on it is bounded whatever it says.

import { make, button } from "./dom.js";
import highlighter from "./vendor/highlight.min.js";
import { Lexer, Marked, Parser } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

// The parsers take time that grows with the square of some inputs, and their stack is finite. These limits keep every
// step under half a second; no answer that is meant to be read comes near them.
const MAX_RICH = 200_000; // characters of an answer; what follows is plain text
const MAX_BLOCK = 20_000; // of a paragraph, list or table; then another one begins
const MAX_INLINE = 5_000; // of a paragraph's text, beyond which it has no emphasis, links or maths
const MAX_DEPTH = 12; // lists and quotes in each other
const MAX_FORMULAS = 1_000; // in an answer
const MAX_COLOURED = 20_000; // of a code block, and 1,000 a line

const TAGS = ["a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "kbd", "li", "mark", "ol",
  "p", "pre", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul"];
const ALLOWED = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["align", "class", "href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

const HARMLESS = /^<\/?(?:br|kbd|mark|sub|sup|u)\s*\/?>$/i; // tags that models write, without attributes
const DISPLAYED = String.raw`\$\$[^]{1,4000}?\$\$|\\\[[^]{1,4000}?\\\]`;
const FORMULA_BLOCK = new RegExp(String.raw`^ {0,3}(${DISPLAYED})[ \t]*(?:\n+|$)`);
// A dollar opens before a letter and closes behind one, with no digit after: prices are no formulas.
const BETWEEN_DOLLARS = String.raw`\$(?![\s$])(?:\\.|[^\\$\n]){1,1000}?(?<!\s)\$(?!\d)`;
const FORMULA = new RegExp(String.raw`^(?:${DISPLAYED}|\\\([^]{1,1000}?\\\)|${BETWEEN_DOLLARS})`);
const DELIMITERS = /^(?:\$\$?|\\\[|\\\()|(?:\$\$?|\\\]|\\\))$/g;

const entity = (letter) => `&#${letter.charCodeAt(0)};`;
const escaped = (text) => text.replace(/[&<>"']/g, entity);
const UNSAFE = /[<>"']|&(?!(?:#\d{1,7}|#x[\da-f]{1,6}|\w{1,30});)/gi;
const lines = (text) => escaped(text).replaceAll("\n", "<br>\n");
const formula = ({ text }) =>
  `<span class="${/^\$\$|^\\\[/.test(text) ? "math display" : "math"}">${escaped(text)}</span>`;

const { defaults: OPTIONS } = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => HARMLESS.test(text) ? text : block ? `<p>${lines(text.trim())}</p>` : escaped(text),
    // In <pre> and <script> the parser takes text for markup; here those are text themselves. Entities stay entities.
    text({ tokens, text }) {
      return tokens ? this.parser.parseInline(tokens) : text.replace(UNSAFE, entity);
    },
    // A picture is a request to somebody's server, with whatever the model put into its address.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    heading({ tokens, depth }) {
      const tag = `h${Math.min(depth + 2, 6)}`; // the page has headings of its own
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    checkbox: ({ checked }) => checked ? "☑ " : "☐ ",
    br: () => "<br>\n",
  },
  extensions: [
    {
      name: "formulaBlock",
      level: "block",
      start: (text) => text.match(/^ {0,3}(?:\$\$|\\\[)/m)?.index,
      tokenizer(text) {
        const match = FORMULA_BLOCK.exec(text);
        return match ? { type: "formulaBlock", raw: match[0], text: match[1] } : undefined;
      },
      renderer: (token) => `<p>${formula(token)}</p>`,
    },
    {
      name: "formula",
      level: "inline",
      start: (text) => text.match(/\$|\\[([]/)?.index,
      tokenizer(text) {
        const match = FORMULA.exec(text);
        return match ? { type: "formula", raw: match[0], text: match[0] } : undefined;
      },
      renderer: formula,
    },
  ],
});

const plain = (text) => ({ type: "text", raw: text, text, escaped: false });

const isShown = ({ type }) => type !== "space" && type !== "def";

class BoundedLexer extends Lexer {
  #depth = 0;

  inlineTokens(text, tokens = []) {
    if (text.length <= MAX_INLINE) return super.inlineTokens(text, tokens);
    tokens.push(plain(text));
    return tokens;
  }

  blockTokens(text, tokens = [], ...rest) {
    if (this.#depth === MAX_DEPTH) {
      tokens.push(plain(text));
      return tokens;
    }
    this.#depth++;
    super.blockTokens(text, tokens, ...rest);
    this.#depth--;
    return tokens;
  }
}

function coloured(text, language) {
  const isBounded = text.length <= MAX_COLOURED && !/[^\n]{1000}/.test(text);
  if (!isBounded || !highlighter.getLanguage(language)) return text;
  return DOMPurify.sanitize(highlighter.highlight(text, { language, ignoreIllegals: true }).value, COLOURS);
}

// Text as it came, in pieces that the browser can lay out.
export function plainText(text) {
  const pieces = make("div", "verbatim");
  for (let start = 0, end; start < text.length; start = end) {
    end = cutAt(text, start + MAX_BLOCK);
    pieces.append(make("p", "", text.slice(start, end)));
  }
  return pieces;
}

// A place to cut that does not divide a character of two halves.
const cutAt = (text, end) => /[\uD800-\uDBFF]/.test(text[end - 1]) ? end + 1 : end;

// Shows a text that grows. Only its last block is ever made again.
export class Markdown {
  #element;
  #copy;
  #tell;
  #rich = ""; // the text, up to MAX_RICH
  #numRead = 0; // characters that were looked at
  #settled = 0; // characters whose blocks will not change
  #open = []; // the tokens after them
  #tail = []; // {raw, element} of those tokens that are shown
  #links = Object.create(null); // what [text][name] points to, by name
  #numFormulas = 0;
  #numSettled = 0;
  #numTold = 0;
  #rest = null; // the element of what is beyond MAX_RICH

  // copy(text, what): asked for by the button of a code block. tell(text): called once for each block that is complete.
  constructor(element, copy, tell = () => {}) {
    this.#element = element;
    this.#copy = copy;
    this.#tell = tell;
  }

  // The text so far: what was shown before, and more.
  update(text) {
    const end = cutAt(text, MAX_RICH);
    this.#rich = text.slice(0, end).replace(/\r\n?/g, "\n");
    const numLinks = Object.keys(this.#links).length;
    this.#readOn();
    this.#againIfMore(numLinks);
    if (text.length > end) {
      const rest = plainText(text.slice(end));
      this.#rest?.remove();
      this.#element.append(rest);
      this.#rest = rest;
    }
  }

  // The text is complete.
  finish() {
    const numLinks = Object.keys(this.#links).length;
    this.#learn(this.#open);
    this.#againIfMore(numLinks);
    this.#settle(this.#tail.length);
  }

  // Addresses stand at the end of a text: when they come, the blocks before them are made again.
  #againIfMore(numLinks) {
    if (Object.keys(this.#links).length === numLinks) return;
    for (const block of this.#element.querySelectorAll(":scope > .block")) block.remove();
    this.#numRead = this.#settled = this.#numSettled = this.#numFormulas = 0;
    this.#tail = [];
    this.#readOn();
    if (this.#rest) this.#element.append(this.#rest);
  }

  #readOn() {
    while (this.#numRead < this.#rich.length) {
      this.#numRead = Math.min(cutAt(this.#rich, this.#numRead + MAX_BLOCK), this.#rich.length);
      this.#read(this.#rich.slice(this.#settled, this.#numRead));
    }
  }

  // Bring what is shown of the text after the settled part up to date, and settle all but its last block.
  #read(text) {
    const tokens = this.#lex(text);
    const shown = tokens.filter(isShown);
    shown.forEach((token, index) => {
      const old = this.#tail[index];
      if (old?.raw === token.raw) return;
      const element = this.#elementOf(token);
      if (old) old.element.replaceWith(element);
      else this.#element.append(element);
      this.#tail[index] = { raw: token.raw, element };
    });
    for (const { element } of this.#tail.splice(shown.length)) element.remove();
    const last = tokens.findLastIndex(({ type }) => type !== "space");
    const isFull = tokens[last]?.type !== "code" && tokens[last]?.raw.length >= MAX_BLOCK;
    const settled = tokens.slice(0, isFull ? tokens.length : Math.max(0, last));
    this.#settle(settled.filter(isShown).length);
    this.#learn(settled);
    this.#open = tokens.slice(settled.length);
    this.#settled += settled.reduce((sum, { raw }) => sum + raw.length, 0);
  }

  #settle(number) {
    for (const { element } of this.#tail.splice(0, number)) {
      if (this.#numSettled++ < this.#numTold) continue;
      this.#numTold++;
      this.#tell((element.localName === "figure" ? element.lastChild : element).textContent);
    }
  }

  #lex(text) {
    const lexer = new BoundedLexer(OPTIONS);
    Object.assign(lexer.tokens.links, this.#links);
    try {
      return lexer.lex(text);
    } catch { // its stack has ended
      return [plain(text)];
    }
  }

  // Only what is complete: half an address is another one.
  #learn(tokens) {
    for (const { type, tag, href, title } of tokens) if (type === "def") this.#links[tag] ??= { href, title };
  }

  #elementOf(token) {
    if (token.type === "code") return this.#codeBlock(token.text, token.lang);
    const block = make("div", "block", DOMPurify.sanitize(Parser.parse([token], OPTIONS).trimEnd(), ALLOWED));
    for (const code of block.querySelectorAll("pre > code")) {
      const text = code.textContent.replace(/\n$/, "");
      code.parentElement.replaceWith(this.#codeBlock(text, code.className.replace("language-", "")));
    }
    for (const link of block.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer";
    }
    for (const table of block.querySelectorAll("table")) {
      const scroller = make("div", "scroller");
      table.replaceWith(scroller);
      scroller.append(table);
    }
    for (const place of block.querySelectorAll(".math")) this.#typeset(place);
    return block;
  }

  #codeBlock(text, name = "") {
    const language = name.match(/^[\w+#.-]{0,30}/)[0];
    const code = make("code", "", coloured(text, language.toLowerCase()));
    return make("figure", "block", make("figcaption", "", language || "text",
      button("Copy", () => this.#copy(text, "the code"), { name: "Copy the code" })), make("pre", "", code));
  }

  #typeset(place) {
    const source = place.textContent;
    try {
      if (++this.#numFormulas > MAX_FORMULAS) throw new Error("too many");
      globalThis.temml.render(source.replace(DELIMITERS, "").trim(), place,
        { displayMode: place.classList.contains("display"), throwOnError: true, maxExpand: 200, maxSize: [20, 20] });
    } catch { // not TeX, or too much of it: shown as it was written
      place.replaceWith(make("code", "", source));
    }
  }
}
