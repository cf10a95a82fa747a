// The fields of the settings: what a request carries besides its messages. They are kept in the browser.

import { $, storage } from "./dom.js";

const fields = $("fields");
const numbers = [...fields.querySelectorAll("input")]; // the ids are the request's field names
const texts = { // by the request's field: what the JSON in the box means there
  response_format: (schema) => ({ type: "json_schema", json_schema: { name: "answer", schema } }),
  tools: (tools) => tools,
};
const local = storage("local");

// What is sent. Fields that are empty are left out: the server's defaults count.
export function settings() {
  const chosen = {};
  for (const { id, value } of numbers) if (value !== "") chosen[id] = Number(value);
  const stop = $("stop").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stop.length) chosen.stop = stop;
  for (const [id, meaning] of Object.entries(texts)) {
    const value = parsed(id);
    if (value) chosen[id] = meaning(value);
  }
  return chosen;
}

// The JSON in a box; null: it is empty; undefined: it is no JSON.
function parsed(id) {
  const text = $(id).value.trim();
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return undefined;
  }
}

export const systemPrompt = () => $("system").value.trim();

// The first field whose number the browser could not read, or that JavaScript would round, or that is no JSON. The
// server judges everything else.
export function mistyped() {
  for (const id of Object.keys(texts)) $(id).setCustomValidity(parsed(id) === undefined ? "This is no JSON" : "");
  const boxes = Object.keys(texts).map($);
  return numbers.find(({ id, validity }) => validity.badInput || (id === "seed" && !validity.valid))
    ?? boxes.find(({ validity }) => !validity.valid);
}

export const accept = () => [...fields.elements].forEach((field) => field.removeAttribute("aria-invalid"));
export const refuse = (name) => fields.elements[name]?.setAttribute("aria-invalid", "true");

// What stands in the fields, and the model's name, as text by id.
export function written() {
  const values = [...fields.elements, $("model")].map(({ id, value }) => [id, value]);
  return Object.fromEntries(values.filter(([, value]) => value));
}

export function write(values) {
  for (const field of fields.elements) {
    const value = values[field.id] ?? "";
    field.value = field.type === "number" && Number.isNaN(Number(value)) ? "" : value; // a file may say anything
  }
  chooseModel(values.model);
  accept();
}

// A model that is not served any more is left where it is.
export function chooseModel(name) {
  if ([...$("model").options].some(({ value }) => value === name)) $("model").value = name;
}

export const keep = () => local.setItem("quire.settings", JSON.stringify(written()));

export function kept() {
  try {
    return JSON.parse(local.getItem("quire.settings")) ?? {};
  } catch {
    return {}; // not ours
  }
}
