// Shows the stages of `server-timing` as one stacked bar. Stages are summed over windows, which run
// in parallel, so their sum may exceed the request's time; then a note says so.

import { duration, make } from "./dom.js";

const STAGES = {
  upload: "Upload",
  audio: "Audio",
  queue: "Queue",
  encode: "Encode",
  transfer: "KV transfer",
  decode: "Decode",
};

/** Parse the header into [{name, ms, note}]. */
export function stagesOf(header) {
  const entry = /([\w-]+);dur=([\d.]+)(?:;desc="([^"]*)")?/g;
  return [...header.matchAll(entry)].map(([, name, ms, note]) => ({ name, ms: Number(ms), note: note ?? "" }));
}

/** Draw into `place`, whose height is the same before the header is known. */
export function drawTiming(place, header) {
  if (place.dataset.header === header && place.childElementCount) return;
  place.dataset.header = header;
  const known = new Map(stagesOf(header).map((stage) => [stage.name, stage]));
  const stages = Object.keys(STAGES).map((name) => known.get(name) ?? { name, ms: NaN, note: "" });
  const sum = stages.reduce((ms, stage) => ms + (stage.ms || 0), 0);
  const told = sum ? stages.map((stage) => `${STAGES[stage.name]} ${length(stage)}`).join(", ") : "";
  const bar = make("div", { class: "stages", role: "img", "aria-label": told ? `Where the time went: ${told}` : "Where the time went is known at the end" });
  const legend = make("ul", { class: "legend", "aria-hidden": "true" });
  for (const stage of stages) {
    const { name, ms, note } = stage;
    const part = make("span", { class: `stage stage-${name}`, title: `${STAGES[name]} ${length(stage)}${note ? `, ${note}` : ""}` });
    part.style.flexGrow = String(sum && ms ? ms / sum : 0);
    bar.append(part);
    legend.append(make("li", {}, make("span", { class: `swatch stage-${name}` }), `${STAGES[name]} `, make("b", {}, length(stage))));
  }
  const overlap = sum > known.get("total")?.ms ? "Summed over windows that overlap." : "";
  place.replaceChildren(bar, legend, make("p", { class: "overlap" }, overlap));
}

/** The time of a stage. Audio that was encoded before needs no encoding. */
const length = ({ name, ms, note }) =>
  name === "encode" && ms === 0 && !note.startsWith("0 ") ? "found" : duration(ms);
