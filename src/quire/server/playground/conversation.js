// What is shown of a chat: its turns, with their tools.

import * as chats from "./chats.js";
import { $, button, make } from "./dom.js";
import { indented } from "./json.js";
import { Markdown, plainText } from "./markdown.js";

const NAMES = { user: "You", assistant: "Answer", error: "Error" };

const log = $("log");
const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
const scrollToEnd = () => log.scrollTo(0, log.scrollHeight);

// What the model thought before its answer, folded above it.
function showThinking(turn, thinking) {
  if (!thinking) return;
  if (!turn.thinking) {
    turn.thinking = make("div", "thoughts");
    const folded = make("details", "thinking", make("summary", "", "Thinking"), turn.thinking);
    turn.element.prepend(folded);
  }
  turn.thinking.textContent = thinking;
}

// The calls of tools that the model asks for, below its answer.
function showCalls(turn, calls) {
  if (!calls?.length) return;
  if (!turn.calls) {
    turn.calls = make("div", "calls");
    turn.tools.before(turn.calls);
  }
  turn.calls.replaceChildren(...calls.map(({ name, arguments: given }) => make("figure", "call",
    make("figcaption", "", `Call of ${name}`), make("pre", "", make("code", "", indented(given) ?? given)))));
}

// An answer that is JSON as a whole is shown indented.
function showWhole(turn, content, copy) {
  const json = indented(content);
  const markdown = new Markdown(turn.text, copy);
  markdown.update(json === null ? content : `\`\`\`json\n${json}\n\`\`\``);
  markdown.finish();
}

export class Conversation {
  #actions;
  #turns = []; // {place, element} of the messages that are shown
  #note = null; // the element of an error, or of a question without an answer

  // actions: copy(text, what), edit(place), retry(question), choose(place).
  constructor(actions) {
    this.#actions = actions;
  }

  // Show the chat's path. Turns that are there already stay as they are.
  render(chat) {
    const places = chats.path(chat);
    const isSame = (index) => this.#turns[index]?.chat === chat && this.#turns[index].place === places[index];
    const numKept = places.findIndex((_, index) => !isSame(index));
    for (const { element } of this.#turns.splice(numKept < 0 ? places.length : numKept)) element.remove();
    this.#note?.remove();
    this.#note = null;
    for (const place of places.slice(this.#turns.length)) {
      const { role, content, thinking, calls, facts } = chat.messages[place];
      const turn = this.#add(role);
      if (role === "user") {
        turn.text.append(plainText(content));
      } else {
        showThinking(turn, thinking);
        showWhole(turn, content, this.#actions.copy);
        showCalls(turn, calls);
      }
      turn.facts.textContent = facts;
      this.#fill(turn, chat, place);
    }
    $("welcome").hidden = this.#turns.length > 0;
    scrollToEnd();
  }

  // An answer that is coming. show(text, thinking, facts, calls) while it comes; end(chat, place) when
  // it is whole, place null if nothing came. end returns whether the answer is still what the page shows.
  addAnswer() {
    const turn = this.#add("assistant");
    turn.element.setAttribute("aria-busy", "true");
    $("spoken").replaceChildren();
    // Screen readers hear each block once, when it is complete; the answer itself changes with every token.
    const tell = (text) => $("spoken").append(make("p", "", text.slice(0, 5000)));
    const markdown = new Markdown(turn.text, this.#actions.copy, tell);
    scrollToEnd();
    return {
      show(text, thinking, facts, calls) {
        const wasAtEnd = isAtEnd();
        showThinking(turn, thinking);
        showCalls(turn, calls);
        markdown.update(text);
        turn.facts.textContent = facts;
        if (wasAtEnd) scrollToEnd();
      },
      end: (chat, place) => {
        if (!turn.element.isConnected) return false;
        markdown.finish();
        if (place !== null && indented(chat.messages[place].content) !== null) {
          turn.text.replaceChildren();
          showWhole(turn, chat.messages[place].content, this.#actions.copy);
        }
        turn.element.removeAttribute("aria-busy");
        if (place !== null) this.#fill(turn, chat, place);
        return true;
      },
    };
  }

  // Why the question at `place` has no answer.
  addNote(kind, text, facts, place) {
    this.#note = make("article", `turn ${kind}`);
    this.#note.ariaLabel = NAMES[kind] ?? "Note";
    if (kind === "error") this.#note.setAttribute("role", "alert");
    this.#note.append(make("div", "text", make("p", "", text)), make("div", "tools", make("span", "facts", facts),
      button("Try again", () => this.#actions.retry(place))));
    $("turns").append(this.#note);
    scrollToEnd();
  }

  // Mark the question that is being edited, or none.
  markEdited(place) {
    for (const turn of this.#turns) turn.element.classList.toggle("editing", turn.place === place);
  }

  #add(role) {
    $("welcome").hidden = true;
    const turn = { chat: null, place: null, element: make("article", `turn ${role}`), text: make("div", "text"),
      tools: make("div", "tools"), facts: make("span", "facts") };
    turn.element.ariaLabel = NAMES[role];
    if (role !== "user") turn.tools.append(turn.facts);
    turn.element.append(turn.text, turn.tools);
    this.#turns.push(turn);
    $("turns").append(turn.element);
    return turn;
  }

  #fill(turn, chat, place) {
    Object.assign(turn, { chat, place });
    const { role, content, parent } = chat.messages[place];
    const { copy, edit, retry } = this.#actions;
    const arrows = this.#arrows(chat, place);
    turn.tools.replaceChildren(...role === "user"
      ? [...arrows, button("Edit", () => edit(place)), button("Copy", () => copy(content, "the question"))]
      : [turn.facts, ...arrows, button("Copy", () => copy(content, "the answer")),
        button("Retry", () => retry(parent))]);
  }

  // ‹ 2/3 ›, where there is more than one version.
  #arrows(chat, place) {
    const places = chats.versions(chat, place);
    const at = places.indexOf(place);
    if (places.length === 1) return [];
    const arrow = (text, name, to) =>
      button(text, () => this.#actions.choose(to), { name, isDisabled: to === undefined });
    const group = make("div", "versions", arrow("‹", "Earlier version", places[at - 1]),
      make("span", "", `${at + 1}/${places.length}`), arrow("›", "Later version", places[at + 1]));
    group.setAttribute("role", "group");
    group.ariaLabel = `Version ${at + 1} of ${places.length}`;
    return [group];
  }
}
