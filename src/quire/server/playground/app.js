// The page: what its parts do together.

import { access, ask as request, events, useKey } from "./api.js";
import * as chats from "./chats.js";
import { Connection } from "./connection.js";
import { Conversation } from "./conversation.js";
import { curlCommand, download, pythonProgram, toClipboard } from "./copying.js";
import { $, button, count, isNarrow, isTouch, make, shownSpeed, shownTime, storage } from "./dom.js";
import * as settings from "./settings.js";
import { confirmDeletion, found, list } from "./sidebar.js";
import * as store from "./store.js";

const DEMO = { name: "quire-demo",
  about: "A tiny demo model: it knows Python's standard library and nothing else.",
  questions: ["What does os.path.join do?", "How do I sort a list?", "Describe json.loads as JSON.",
    "Which module provides collections.deque?", "How can I run a command in Python?"] };
const QUESTIONS = ["Explain how a rainbow forms, in three sentences.", "Write a Python function that reverses a list.",
  "Suggest five names for a quiet café."];
const THEMES = ["system", "light", "dark"];
const FLASH_MS = 2500, SAVE_MS = 2000;
const isWide = matchMedia("(min-width: 75rem)");
const local = storage("local"), session = storage("session");

const all = new Map(); // the chats that are kept, by id
let chat = chats.newChat(); // the one on the page; it is kept from its first question on
let running = null; // {controller} of the answer that is coming
let editing = null; // the place of the question being edited
let draft = ""; // what stood in the message box before
let flashed = "", flashTimer = 0; // a note that goes away

const conversation = new Conversation({ copy, edit, retry, choose });
const connection = new Connection(
  { isBusy: () => running !== null, changed: showState, connected, keyNeeded: askForKey });

// -- asking --
function canAsk() {
  if (access.isRefused) askForKey("");
  return connection.isReady && !access.isRefused && !isMistyped();
}

function isMistyped() {
  const field = settings.mistyped();
  if (!field) return false;
  showPanel("settings", true);
  field.reportValidity();
  return true;
}

function ask(text) {
  if (!canAsk()) return;
  stop();
  const parent = editing === null ? chats.nextParent(chat) : chat.messages[editing].parent;
  if (editing !== null) leaveEdit();
  else $("prompt").value = "";
  chat.settings = settings.written();
  const question = chats.add(chat, parent, "user", text);
  all.set(chat.id, chat);
  session.setItem("quire.chat", chat.id);
  answer(question);
}

function retry(question) {
  if (!canAsk()) return;
  stop();
  if (editing !== null) leaveEdit();
  answer(question);
}

function choose(place) {
  stop();
  if (editing !== null) leaveEdit();
  chats.show(chat, place);
  show();
  save(chat);
}

function stop() {
  running?.controller.abort();
  running = null;
  showState();
}

function messages(said) {
  const system = settings.systemPrompt();
  return [...(system ? [{ role: "system", content: system }] : []), ...said];
}

async function answer(question) {
  const asked = chat; // another may be on the page when the answer ends
  const before = chats.hideAfter(asked, question);
  const body = { model: $("model").value, messages: messages(chats.historyOf(asked, question)), ...settings.settings(),
    stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const mine = running = { controller: new AbortController() };
  const start = performance.now();
  const calls = [];
  let content = "", thinking = "", place = null, first = null, last = null, tokensAtFirst = 0, usage = null, end = "", isLive = true;
  let failure = null, saved = start;

  function facts() {
    const tokens = usage?.completion_tokens ?? 0;
    const seconds = ((isLive ? performance.now() : last) - first) / 1000;
    const speed = tokens > tokensAtFirst && seconds > 0 ? shownSpeed((tokens - tokensAtFirst) / seconds) : "";
    const wait = first === null ? "" : shownTime(first - start);
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    $("speed").textContent = speed || "–";
    $("first").textContent = wait || "–";
    return [end, tokens ? `${count(tokens)} token${tokens === 1 ? "" : "s"}` : "", speed,
      wait ? `first after ${wait}` : "",
      usage && !isLive ? `prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}` : ""]
      .filter(Boolean).join(" · ");
  }

  conversation.render(asked);
  const shown = conversation.addAnswer();
  const showSoon = calmly(() => { if (isLive) shown.show(content, thinking, facts(), calls); });
  settings.accept();
  touch(asked);
  showState();
  $("prompt").focus();
  try {
    for await (const { choices: [choice], usage: counted } of events(await request(body, mine.controller.signal))) {
      usage = counted ?? usage;
      const { content: said, reasoning: thought, tool_calls: called } = choice?.delta ?? {};
      if (said || thought || called?.length) {
        last = performance.now();
        if (first === null) {
          first = last;
          tokensAtFirst = usage?.completion_tokens ?? 1;
          place = chats.add(asked, question, "assistant", "");
          connection.watch(); // short answers would be over before the next look at the gauge
        }
        content += said ?? "";
        thinking += thought ?? "";
        for (const { index, function: part } of called ?? []) {
          calls[index] ??= { name: "", arguments: "" };
          calls[index].name += part?.name ?? "";
          calls[index].arguments += part?.arguments ?? "";
        }
        Object.assign(asked.messages[place], { content, thinking, calls });
        if (last - saved > SAVE_MS) {
          saved = last;
          save(asked);
        }
      }
      if (choice?.finish_reason === "length") end = "cut at max tokens";
      showSoon();
    }
  } catch (error) {
    if (mine.controller.signal.aborted) end = "stopped";
    else failure = error;
  }
  isLive = false;
  if (running === mine) running = null;
  const total = facts();
  if (place !== null) asked.messages[place].facts = total;
  else if (before !== null) chats.show(asked, before);
  shown.show(content, thinking, total, calls);
  if (shown.end(asked, place)) {
    if (place === null) conversation.render(asked);
    if (failure) fail(failure, question);
    else if (place === null) conversation.addNote("note", "No answer came.", total, question);
  }
  touch(asked);
  showState();
  connection.watch();
}

function fail(error, question) {
  conversation.addNote("error", error.message, error.facts ?? "", question);
  if (error.param) settings.refuse(error.param);
  if (access.isRefused) askForKey(error.message);
}

// A function that does the work soon: at most once a frame, and at most a tenth of the time.
function calmly(work) {
  let isWaiting = false, next = 0;
  const run = () => {
    const start = performance.now();
    isWaiting = false;
    work();
    next = performance.now() + 9 * (performance.now() - start);
  };
  return () => {
    if (isWaiting) return;
    isWaiting = true;
    const wait = next - performance.now();
    if (wait > 16) setTimeout(() => requestAnimationFrame(run), wait);
    else requestAnimationFrame(run);
  };
}

function edit(place) {
  stop();
  if (editing === null) draft = $("prompt").value;
  editing = place;
  conversation.markEdited(place);
  $("prompt").value = chat.messages[place].content;
  $("prompt").focus();
  showState();
}

function leaveEdit() {
  editing = null;
  conversation.markEdited(null);
  $("prompt").value = draft;
  showState();
}

// -- chats --
// Show the chat as it is now.
function show() {
  conversation.render(chat);
  const last = chats.path(chat).at(-1);
  if (last !== undefined && chat.messages[last].role === "user") {
    conversation.addNote("note", "This question has no answer.", "", last);
  }
  showChats();
}

function open(other) {
  stop();
  if (editing !== null) leaveEdit();
  chat = other;
  session.setItem("quire.chat", chat.id);
  if (chat.messages.length) settings.write(chat.settings);
  if (connection.models) showModel();
  show();
  if (isNarrow.matches) showPanel("sidebar", false);
  $("prompt").focus();
}

function showChats() {
  list(all, chat, { open, remove });
  document.title = chat.messages.length ? `${chats.titleOf(chat)} · Quire` : "Quire";
}

function touch(changed) {
  if (!all.has(changed.id)) return; // deleted meanwhile
  changed.updated = Date.now();
  save(changed);
  showChats();
}

const notKept = (error) => flash(`This browser does not keep the chats: ${error.message}`);
const save = (...changed) => store.save(...changed).catch(notKept);

// Read the chats of the database. Another tab may have changed them; the one on the page counts unless that is newer.
async function load() {
  let kept = [];
  try {
    kept = await store.load();
  } catch (error) {
    return notKept(error);
  }
  for (const id of all.keys()) if (id !== chat.id) all.delete(id);
  for (const one of kept) if (one.id !== chat.id || (!running && one.updated > chat.updated)) all.set(one.id, one);
  const current = all.get(chat.messages.length ? chat.id : session.getItem("quire.chat"));
  if (current && current !== chat) open(current);
  else showChats();
}

async function remove(chosen) {
  if (!await confirmDeletion(chosen)) return;
  for (const { id } of chosen) all.delete(id);
  store.remove(...chosen.map(({ id }) => id)).catch(notKept);
  if (all.has(chat.id) || !chat.messages.length) showChats();
  else open(chats.newChat());
}

async function importFile(file) {
  try {
    const chosen = chats.fromFile(await file.text());
    const fresh = chosen.filter(({ id, updated }) => !(all.get(id)?.updated >= updated));
    await store.save(...fresh);
    for (const one of fresh) all.set(one.id, one);
    const others = fresh.length < chosen.length ? "; the others are here already" : "";
    flash(`Imported ${count(fresh.length)} of ${count(chosen.length)} chats${others}`);
    if (all.get(chat.id)) open(all.get(chat.id));
    else showChats();
  } catch (error) {
    flash(error.message);
  }
}

// -- what the page says of itself --
function connected(models) {
  const wanted = $("model").value || (chat.messages.length ? chat.settings : settings.kept()).model;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  settings.chooseModel(wanted);
  showModel();
}

function showModel() {
  const { id, max_model_len: length } = connection.models.find((card) => card.id === $("model").value);
  $("model-line").textContent = id + (length ? ` · context ${count(length)} tokens` : "");
  const isDemo = id === DEMO.name;
  $("about").textContent = isDemo ? DEMO.about : "";
  const chip = (question) => make("li", "", button(question, () => ask(question), { className: "" }));
  $("chips").replaceChildren(...(isDemo ? DEMO.questions : QUESTIONS).map(chip));
  $("chips").hidden = false;
}

function showState() {
  const { isReady, trouble, isAlarm } = connection;
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", running !== null);
  $("send").disabled = !running && !isReady;
  let notice = isTouch.matches ? "Ready" : "Enter sends, Shift+Enter breaks the line";
  if (running) notice = "Answering. Esc stops";
  else if (trouble) notice = trouble;
  else if (access.isRefused) notice = "This server needs an API key: Send asks for it";
  else if (editing !== null) notice = "Sending asks again from here, Esc keeps what was";
  notice = flashed || notice;
  if ($("notice").textContent !== notice) $("notice").textContent = notice;
  $("notice").classList.toggle("alarm", isAlarm && !flashed);
}

function flash(text) {
  clearTimeout(flashTimer);
  flashed = text;
  flashTimer = setTimeout(() => { flashed = ""; showState(); }, FLASH_MS);
  showState();
}

function askForKey(message) {
  $("key-error").textContent = message;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

async function tryKey() {
  try {
    await useKey($("key").value.trim());
  } catch (error) {
    $("key-error").textContent = error.message;
    return $("key").select();
  }
  $("key-dialog").close();
  connection.watch();
  $("prompt").focus();
}

// Of the two panels, a narrow screen has room for one, and nothing beside it.
function showPanel(id, isOpen) {
  const other = id === "settings" ? "sidebar" : "settings";
  $(id).removeAttribute("data-auto"); // what the style shows until now, so that nothing jumps when the script comes
  $(id).hidden = !isOpen;
  $(`toggle-${id}`).ariaExpanded = String(isOpen);
  if (isOpen && isNarrow.matches && !$(other).hidden) showPanel(other, false);
  $("main").inert = isNarrow.matches && isOpen;
}

function toggle(id) {
  showPanel(id, $(id).hidden);
  if ($("main").inert) $(`close-${id}`).focus();
}

function close(id) {
  showPanel(id, false);
  $(`toggle-${id}`).focus();
}

function showPanels() {
  showPanel("settings", isWide.matches);
  showPanel("sidebar", !isNarrow.matches);
}

function showTheme(theme) {
  document.documentElement.style.colorScheme = theme === "system" ? "" : theme;
  $("theme").dataset.theme = theme;
  $("theme").title = $("theme").ariaLabel = `Theme: ${theme}`;
}

// -- copying --
async function copy(text, what) {
  flash(await toClipboard(text) ? `Copied ${what}` : "The browser does not allow copying");
}

// The request that Send would make now, or the last one if there is nothing to send.
function copied() {
  const text = running ? "" : $("prompt").value.trim();
  const places = chats.path(chat);
  const last = places.findLast((place) => chat.messages[place].role === "user");
  const parent = editing === null ? chats.nextParent(chat) : chat.messages[editing].parent;
  const said = text || last === undefined
    ? [...chats.historyOf(chat, parent), { role: "user", content: text || "Hello" }] : chats.historyOf(chat, last);
  return { model: $("model").value, messages: messages(said), ...settings.settings(), stream: true };
}

// -- events --
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (running) {
    stop();
    $("prompt").focus();
  } else if (text) {
    ask(text);
  } else if (access.isRefused) {
    askForKey("");
  }
});
$("prompt").addEventListener("keydown", (event) => {
  // A touch keyboard has no Shift+Enter: there the button sends.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch.matches) return;
  event.preventDefault();
  if (!running && !$("send").disabled) $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if ($("main").inert) {
    close($("settings").hidden ? "sidebar" : "settings");
  } else if (running) {
    stop();
  } else if (editing !== null) {
    leaveEdit();
    $("prompt").focus();
  }
});
$("new").addEventListener("click", () => open(chats.newChat()));
$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf($("theme").dataset.theme) + 1) % THEMES.length];
  local.setItem("quire.theme", next);
  showTheme(next);
});
for (const id of ["settings", "sidebar"]) {
  $(`toggle-${id}`).addEventListener("click", () => toggle(id));
  $(`close-${id}`).addEventListener("click", () => close(id));
}
$("model").addEventListener("change", () => { showModel(); settings.keep(); });
$("fields").addEventListener("submit", (event) => event.preventDefault());
$("fields").addEventListener("input", (event) => { event.target.removeAttribute("aria-invalid"); settings.keep(); });
$("fields").addEventListener("reset", () => setTimeout(() => { settings.accept(); settings.keep(); }));
$("copy-curl").addEventListener("click", () => isMistyped() || copy(curlCommand(copied()), "as curl"));
$("copy-python").addEventListener("click", () => isMistyped() || copy(pythonProgram(copied()), "as Python"));
$("search").addEventListener("input", showChats);
$("export").addEventListener("click", () => {
  download(chats.toFile(found(all)), `quire-chats-${new Date().toISOString().slice(0, 10)}.json`);
});
$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { importFile($("file").files[0]); $("file").value = ""; });
$("delete-all").addEventListener("click", () => remove(found(all)));
$("key-form").addEventListener("submit", (event) => { event.preventDefault(); tryKey(); });
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  connection.watch();
  load();
});
isNarrow.addEventListener("change", showPanels);

const theme = local.getItem("quire.theme");
showTheme(THEMES.includes(theme) ? theme : "system");
showPanels();
settings.write(settings.kept());
load();
connection.watch();
