// Shows the state of both pools from `/health` while the page is visible.

import { health } from "./api.js";
import { byId, make, plural } from "./dom.js";

const EVERY_MS = 3000;
const NAMES = { encoder: "Encoders", decoder: "Decoders" };

export function watchPools() {
  let timer = 0;
  const look = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    try {
      draw(await health());
    } catch (error) {
      state("bad", error.message);
      byId("pools").replaceChildren(make("p", { class: "note" }, "Not known while the server does not answer."));
    }
    timer = setTimeout(look, EVERY_MS);
  };
  document.addEventListener("visibilitychange", look);
  look();
}

function state(kind, text) {
  byId("server-dot").dataset.kind = kind;
  if (byId("server-state").textContent !== text) byId("server-state").textContent = text;
}

function draw(report) {
  const ready = report.status === "ready";
  state(ready ? "good" : "wait", ready ? "Ready" : "Starting");
  const cards = Object.entries(NAMES).map(([role, name]) => pool(name, report.pools?.[role]));
  byId("pools").replaceChildren(...cards);
}

function pool(name, { replicas = 0, workers = [] } = {}) {
  const sum = (field) => workers.reduce((n, worker) => n + worker[field], 0);
  const total = sum("pages_total");
  const used = total - sum("pages_free");
  const rows = [
    ["Running", sum("running")],
    ["Queued", sum("queued")],
    ["Pages in use", `${used.toLocaleString("en")} of ${total.toLocaleString("en")}`],
  ];
  const fill = make("span", { class: "bar-fill" });
  fill.style.transform = `scaleX(${total ? used / total : 0})`;
  const list = make("dl", {}, ...rows.map(([what, value]) => make("div", {}, make("dt", {}, what), make("dd", {}, String(value)))));
  const kinds = [...new Set(workers.map((worker) => worker.device))].join(", ");
  return make("div", { class: "pool" },
    make("h3", {}, name, make("span", { class: "note" }, [plural(replicas, "worker"), kinds].filter(Boolean).join(", "))),
    make("div", { class: "bar", "aria-hidden": "true" }, fill), list);
}
