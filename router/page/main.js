// Connects the parts of the page: tabs, options, key, drop zone.

import { call, sample, setKey } from "./api.js";
import { announce, byId, flash, make } from "./dom.js";
import { languages } from "./languages.js";
import { Live } from "./live.js";
import { watchPools } from "./pools.js";
import { Queue } from "./queue.js";
import { Reader } from "./reader.js";
import { Recorder } from "./record.js";

const NARROW = "(max-width: 900px)"; // as in style.css: the reader is below the files
const RETRY_MS = 3000; // between tries until the server first answers

const reader = new Reader();
const queue = new Queue(onJob, askForKey);
const live = new Live(() => options("live-options"), askForKey);
const recorder = new Recorder((file) => queue.add([file], options("options")));

function onJob(what, job) {
  if (what === "select") {
    reader.show(job);
    if (job && matchMedia(NARROW).matches) byId("reader").scrollIntoView({ block: "start" });
  } else if (job === queue.selected) reader.refresh(job);
  if (what === "state" && job.state === "done" && job.fields.save) reader.save(job, job.fields.save);
}

// -------------------------------------------------------------------------------------- options

const FORMS = [byId("options"), byId("live-options")]; // for files and for live audio
let about = new Map(); // descriptions of the server's models, by name

function options(form) {
  const fields = Object.fromEntries(new FormData(byId(form)));
  for (const [name, value] of Object.entries(fields)) fields[name] = value.trim();
  return fields;
}

/** List the models. Throws ApiError. */
async function takeModels() {
  const { data } = await call("v1/models");
  about = new Map(data.map(({ id, description }) => [id, description ?? ""]));
  for (const form of FORMS) {
    const { model } = form.elements;
    const chosen = model.value;
    model.replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
    if (about.has(chosen)) model.value = chosen;
    describe(form);
  }
}

async function loadModels() {
  try {
    await takeModels();
  } catch (error) {
    if (error.status === 401) askForKey();
    else setTimeout(loadModels, RETRY_MS);
  }
}

function describe(form) {
  const banner = form.querySelector(".about");
  banner.firstElementChild.textContent = about.get(form.elements.model.value) ?? "";
  banner.hidden = banner.firstElementChild.textContent === "";
}

for (const form of FORMS) {
  form.elements.language.append(...languages().map(([code, name]) => make("option", { value: code }, name)));
  form.elements.model.addEventListener("change", () => describe(form));
  form.addEventListener("submit", (event) => event.preventDefault());
}

byId("sample").addEventListener("click", async () => {
  try {
    queue.add([await sample("medium.flac")], options("options"));
  } catch (error) {
    flash(byId("sample"), error.message);
  }
});

// ------------------------------------------------------------------------------------------ key

function askForKey() {
  byId("key-button").hidden = false;
  if (byId("key-dialog").open) return;
  byId("key").value = "";
  refuse("");
  byId("key-dialog").showModal();
}

/** Show in the dialog why it stays open; without a message, clear it. */
function refuse(why) {
  byId("key-error").textContent = why;
  byId("key").setAttribute("aria-invalid", String(why !== ""));
}

byId("key-button").addEventListener("click", askForKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const before = setKey(byId("key").value.trim());
  try {
    await takeModels();
  } catch (error) {
    setKey(before);
    refuse(error.status === 401 ? "This key was not accepted." : error.message);
    byId("key").select();
    return;
  }
  byId("key-dialog").close();
  byId("key").value = "";
  announce("The key is right.");
  queue.retryRefused();
});

// ------------------------------------------------------------------------------ drop and paste

const input = byId("file-input");
byId("choose").addEventListener("click", () => input.click());
input.addEventListener("change", () => {
  queue.add(input.files, options("options"));
  input.value = "";
});

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
let depth = 0; // nesting of elements under the drag
addEventListener("dragenter", (event) => {
  if (!hasFiles(event)) return;
  depth += 1;
  document.body.classList.add("dragging");
});
addEventListener("dragleave", (event) => {
  if (!hasFiles(event)) return;
  depth = Math.max(0, depth - 1);
  if (!depth) document.body.classList.remove("dragging");
});
addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  depth = 0;
  document.body.classList.remove("dragging");
  choose("files", false);
  queue.add(event.dataTransfer.files, options("options"));
});
addEventListener("paste", (event) => {
  if (event.target.closest("input, textarea, [contenteditable]")) return; // table cells come with a picture
  if (event.clipboardData?.files.length) queue.add(event.clipboardData.files, options("options"));
});
addEventListener("beforeunload", (event) => {
  if (queue.hasUnsaved || recorder.running || live.running) event.preventDefault();
});

// ------------------------------------------------------------------------------------------ tabs

const TABS = ["files", "live"];

function choose(name, focus = true) {
  for (const one of TABS) {
    const tab = byId(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
    byId(`view-${one}`).hidden = one !== name;
  }
  if (focus) byId(`tab-${name}`).focus();
  history.replaceState(null, "", name === "files" ? location.pathname : `#${name}`);
}

for (const [i, name] of TABS.entries()) {
  byId(`tab-${name}`).addEventListener("click", () => choose(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) choose(TABS[(i + step + TABS.length) % TABS.length]);
  });
}
if (TABS.includes(location.hash.slice(1))) choose(location.hash.slice(1), false);

// ---------------------------------------------------------------------------------------- start

loadModels();
watchPools();
