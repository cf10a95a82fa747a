// Whether the server can be asked: /readyz, the served models, the gauges. Looks again and again.

import { access, call, look } from "./api.js";
import { $ } from "./dom.js";
import { readGauges } from "./gauges.js";

const BUSY_MS = 1000, IDLE_MS = 5000, STARTING_MS = 500, LOST_MS = 2000;

export class Connection {
  isReady = false;
  models = null; // cards of /v1/models, once the engine is ready
  trouble = "Connecting"; // why nothing can be sent, or ""
  isAlarm = false; // whether it is more than a start
  #hooks;
  #hasMetrics = true;
  #timer = 0;

  // hooks: isBusy(), and changed(), connected(models), keyNeeded(message), called when it is so.
  constructor(hooks) {
    this.#hooks = hooks;
  }

  async watch() {
    clearTimeout(this.#timer);
    try {
      if (!document.hidden || !this.isReady) await this.#look();
    } catch (error) {
      this.trouble = `${error.message} Trying again.`;
      this.isAlarm = true;
      this.isReady = false;
      this.models = null; // what comes back may be another server
    }
    this.#hooks.changed();
    clearTimeout(this.#timer);
    const wait = this.#hooks.isBusy() ? BUSY_MS : this.isReady ? IDLE_MS : this.isAlarm ? LOST_MS : STARTING_MS;
    this.#timer = setTimeout(() => this.watch(), wait);
  }

  async #look() {
    const response = await look("/readyz");
    this.isReady = response.ok;
    if (!this.isReady) {
      const status = await response.json();
      this.trouble = status.error.message;
      this.isAlarm = status.error.code !== "not_ready";
      if (!this.models) this.#showStart(status);
      return;
    }
    this.trouble = "";
    this.isAlarm = false;
    if (!this.models && !access.isRefused) await this.#connect();
    if (this.models && this.#hasMetrics && !access.isRefused) this.#hasMetrics = await readGauges();
  }

  async #connect() {
    try {
      this.models = (await (await call("/v1/models")).json()).data;
    } catch (error) {
      if (!access.isRefused) throw error;
      return this.#hooks.keyNeeded(access.key ? error.message : "");
    }
    $("starting").hidden = true;
    this.#hooks.connected(this.models);
  }

  // The phase of the start and its progress, or why there is none.
  #showStart({ error, phase, fraction, detail }) {
    $("about").textContent = this.isAlarm ? error.message
      : "The engine is starting. You can write your question meanwhile.";
    $("starting").hidden = this.isAlarm;
    if (phase) $("progress").value = fraction;
    $("phase").textContent = [phase, detail].filter(Boolean).join(": ");
    $("percent").textContent = phase ? `${Math.round(fraction * 100)} %` : "";
  }
}
