// The list of chats, and what can be done with it.

import { has, titleOf } from "./chats.js";
import { $, button, count, make } from "./dom.js";

// The chats that contain what is searched for, newest first.
export function found(all) {
  const words = $("search").value.trim().toLowerCase();
  return [...all.values()].filter((chat) => !words || has(chat, words)).sort((a, b) => b.updated - a.updated);
}

// actions: open(chat), remove(chats).
export function list(all, current, actions) {
  const chats = found(all);
  $("chats").replaceChildren(...chats.map((chat) => {
    const title = titleOf(chat);
    const row = make("li", "", button(title, () => actions.open(chat), { className: "plain chat" }),
      button("×", () => actions.remove([chat]), { className: "plain delete", name: `Delete chat: ${title}` }));
    row.firstElementChild.title = `${title}\n${new Date(chat.updated).toLocaleString()}`;
    if (chat.id === current.id) row.firstElementChild.setAttribute("aria-current", "true");
    return row;
  }));
  $("no-chats").textContent = chats.length ? ""
    : all.size ? "No chat says that." : "Your chats will be kept here, in this browser.";
  $("export").disabled = $("delete-all").disabled = chats.length === 0;
  $("export").title = $("search").value
    ? `Save the ${count(chats.length)} chats found as a file` : "Save all chats as a file";
}

// Resolves to whether the reader wants these chats to be deleted.
export function confirmDeletion(chats) {
  const dialog = $("delete-dialog");
  $("delete-title").textContent = chats.length === 1 ? "Delete this chat?" : `Delete ${count(chats.length)} chats?`;
  const subject = chats.length === 1 ? `“${titleOf(chats[0])}” is` : "They are";
  $("delete-what").textContent = `${subject} kept in this browser only.`;
  dialog.returnValue = "";
  $("delete").onclick = () => dialog.close("delete");
  $("delete-cancel").onclick = () => dialog.close();
  dialog.showModal();
  $("delete-cancel").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "delete"), { once: true });
  });
}
