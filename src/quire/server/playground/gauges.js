// The readings below the message box, from /metrics.

import { call } from "./api.js";
import { $, count } from "./dom.js";

// Whether this server keeps metrics.
export async function readGauges() {
  const response = await call("/metrics").catch((error) => { if (error.status !== 404) throw error; });
  if (!response) return false;
  const text = await response.text();
  const lines = (name) => text.matchAll(new RegExp(`^${name}(?:\\{.*\\})? (\\S+)$`, "gm"));
  const values = (name) => [...lines(name)].map((match) => Number(match[1]));
  const total = (name) => values(name).reduce((sum, value) => sum + value, 0);
  const active = total("vllm:num_requests_running"), waiting = total("vllm:num_requests_waiting");
  $("requests").textContent = `${count(active)} running${waiting ? `, ${count(waiting)} waiting` : ""}`;
  const percent = 100 * Math.max(0, ...values("vllm:kv_cache_usage_perc"));
  const shown = percent === 0 || percent > 10 ? Math.round(percent) : percent < 0.01 ? "< 0.01" : percent.toFixed(2);
  const cache = /^vllm:cache_config_info\{(?=.*\bblock_size="(\d+)")(?=.*\bnum_gpu_blocks="(\d+)")/m;
  const [, size, blocks] = cache.exec(text) ?? [];
  $("kv-size").textContent = size ? ` of ${count(size * blocks)} tokens` : "";
  $("kv-text").textContent = `${shown} %`;
  $("kv").firstElementChild.style.transform = `scaleX(${percent / 100})`;
  $("kv").setAttribute("aria-valuenow", percent.toFixed(2));
  return true;
}
