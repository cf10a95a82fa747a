// Elements, and numbers as people read them.

export const $ = (id) => document.getElementById(id);
export const isNarrow = matchMedia("(max-width: 56rem)");
export const isTouch = matchMedia("(pointer: coarse)");

export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function button(label, onClick, { className = "plain", name = "", isDisabled = false } = {}) {
  const element = make("button", className, label);
  element.type = "button";
  element.disabled = isDisabled;
  if (name) element.title = element.ariaLabel = name;
  element.addEventListener("click", onClick);
  return element;
}

// "local" or "session" storage, which a browser may forbid.
export function storage(kind) {
  try {
    return window[`${kind}Storage`];
  } catch {
    return { getItem: () => null, setItem() {}, removeItem() {} };
  }
}

export const count = (number) => number.toLocaleString("en");
export const shownSpeed = (rate) => `${rate >= 100 ? count(Math.round(rate)) : rate.toFixed(1)} tokens/s`;
export const shownTime = (ms) => ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
