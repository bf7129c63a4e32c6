// The queue of files: each is a job, and several are sent at once. A busy server is asked again after
// the time that it names. The listener is told of every change.

import { ApiError, limits, transcribe } from "./api.js";
import { announce, byId, clock, make, plural, size } from "./dom.js";
import { wordsIntoSegments } from "./text.js";

const AT_ONCE = 4; // requests; the other files wait here
const MOST_TRIES = 6; // of a file while the server is overloaded
const RETRY_S = 5; // if the server names no time

/**
 * One file. `segments` grows while the server transcribes.
 *
 * state: "waiting", "sending", "working", "done", "failed" or "stopped".
 */
class Job {
  static #count = 0;

  constructor(file, fields) {
    this.id = ++Job.#count;
    this.file = file;
    this.name = file.name || "recording";
    this.fields = fields;
    this.url = URL.createObjectURL(file);
    this.reset();
  }

  reset() {
    this.state = "waiting";
    this.note = "Waiting";
    this.share = 0;
    this.segments = [];
    this.edited = false;
    this.language = "";
    this.duration = NaN; // seconds; the browser's value until the server's is known
    this.timing = "";
    this.tries = 0;
    this.control = new AbortController();
  }

  get running() {
    return this.state === "waiting" || this.state === "sending" || this.state === "working";
  }
}

export class Queue {
  #jobs = [];
  #rows = new Map(); // from jobs to their elements
  #running = 0;
  #selected = null;
  #listener;
  #needKey;

  /** listener: gets ("select" | "text" | "state", job). needKey: called when the server wants a key. */
  constructor(listener, needKey) {
    this.#listener = listener;
    this.#needKey = needKey;
  }

  get selected() {
    return this.#selected;
  }

  get hasUnsaved() {
    return this.#jobs.some((job) => job.edited);
  }

  /** Add files with the current fields. The first is shown, unless another one is. */
  add(files, fields) {
    const jobs = [...files].map((file) => new Job(file, fields));
    for (const job of jobs) {
      this.#jobs.push(job);
      this.#rows.set(job, this.#row(job));
      byId("queue").append(this.#rows.get(job).item);
      this.#measure(job);
    }
    this.#count();
    if (jobs.length && !this.#selected?.running) this.select(jobs[0]);
    this.#next();
  }

  select(job) {
    this.#selected = job;
    for (const [other, row] of this.#rows) row.open.setAttribute("aria-current", String(other === job));
    this.#listener("select", job);
  }

  /** Retry the jobs that failed for lack of a key. */
  retryRefused() {
    for (const job of this.#jobs) if (job.state === "failed" && job.status === 401) this.#again(job);
  }

  #next() {
    while (this.#running < AT_ONCE) {
      const job = this.#jobs.find((one) => one.state === "waiting" && !one.pausing);
      if (!job) return;
      this.#running += 1;
      this.#send(job).finally(() => {
        this.#running -= 1;
        this.#next();
      });
    }
  }

  async #send(job) {
    this.#set(job, "sending", "Sending");
    try {
      check(job.file);
      const { answer, timing } = await transcribe(formOf(job), {
        task: job.fields.task,
        signal: job.control.signal,
        onUpload: (share) => this.#sent(job, share),
        onEvent: (event) => this.#take(job, event),
      });
      this.#finish(job, answer, timing);
    } catch (error) {
      this.#fail(job, await explained(error, job.file));
    }
  }

  #sent(job, share) {
    if (job.state !== "sending") return;
    job.share = 0.15 * share; // the rest of the bar is the transcription's
    if (share < 1) this.#set(job, "sending", `Sending, ${Math.round(100 * share)} % of ${size(job.file.size)}`);
    else this.#set(job, "working", "Transcribing");
  }

  #take(job, event) {
    if (event.type !== "transcript.text.delta" || !event.segments?.length) return;
    job.segments.push(...wordsIntoSegments(event.segments, []));
    const at = job.segments.at(-1).end;
    if (job.duration > 0) job.share = 0.15 + 0.85 * Math.min(1, at / job.duration);
    this.#set(job, "working", `Transcribing, ${clock(at)}${job.duration > 0 ? ` of ${clock(job.duration)}` : ""}`);
    this.#listener("text", job);
  }

  #finish(job, answer, timing) {
    job.segments = wordsIntoSegments(answer.segments ?? [], answer.words ?? []);
    job.language = answer.language ?? "";
    job.duration = answer.duration ?? job.duration;
    job.task = answer.task;
    job.timing = timing;
    job.share = 1;
    const words = job.segments.reduce((n, segment) => n + (segment.text.match(/\S+/g) ?? []).length, 0);
    job.words = words;
    const total = /total;dur=([\d.]+)/.exec(timing)?.[1];
    const took = total ? ` in ${(total / 1000).toFixed(1)} s` : "";
    this.#set(job, "done", words ? `${clock(job.duration)} of audio${took}` : "No speech was found");
    announce(`${job.name}: done, ${plural(words, "word")}`);
    this.#listener("text", job);
  }

  #fail(job, error) {
    if (error.name === "AbortError") {
      this.#set(job, "stopped", "Stopped");
      return;
    }
    const full = error.status === 429 && error.code !== "insufficient_quota";  // a quota that lasts for hours
    const busy = error instanceof ApiError && (full || error.status === 503);
    if (busy && ++job.tries < MOST_TRIES && !job.segments.length) {
      this.#wait(job, error.retryAfterS ?? RETRY_S);
      return;
    }
    job.status = error.status;
    this.#set(job, "failed", error.message);
    announce(`${job.name}: ${error.message}`);
    if (error.status === 401) this.#needKey();
  }

  #wait(job, seconds) {
    job.pausing = true;
    job.share = 0;
    this.#set(job, "waiting", `The server is busy; asking again in ${Math.ceil(seconds)} s`);
    setTimeout(() => {
      job.pausing = false;
      this.#next();
    }, 1000 * seconds);
  }

  #again(job) {
    job.reset();
    this.#set(job, "waiting", "Waiting");
    this.#listener("text", job);
    this.#measure(job);
    this.#next();
  }

  #stop(job) {
    job.control.abort();
    if (job.state === "waiting") this.#set(job, "stopped", "Stopped");
  }

  #remove(job) {
    job.control.abort();
    const place = this.#jobs.indexOf(job);
    this.#jobs.splice(place, 1);
    this.#rows.get(job).item.remove();
    this.#rows.delete(job);
    this.#count();
    if (this.#selected === job) {
      const other = this.#jobs[Math.min(place, this.#jobs.length - 1)] ?? null;
      this.select(other);
      (other ? this.#rows.get(other).open : byId("choose")).focus();
    }
    URL.revokeObjectURL(job.url);
  }

  /** Ask the browser for the audio's length; formats that it cannot play have no progress bar. */
  #measure(job) {
    const probe = new Audio();
    probe.preload = "metadata";
    probe.onloadedmetadata = () => {
      if (Number.isFinite(probe.duration) && !(job.duration > 0)) job.duration = probe.duration;
      probe.removeAttribute("src");
    };
    probe.src = job.url;
  }

  #set(job, state, note) {
    job.state = state;
    job.note = note;
    this.#draw(job);
    this.#count();
    this.#listener("state", job);
  }

  /** Show the number of files where the list is out of sight. */
  #count() {
    const failed = this.#jobs.filter((job) => job.state === "failed").length;
    byId("queue-empty").hidden = this.#jobs.length > 0;
    byId("to-queue").textContent = plural(this.#jobs.length, "file") + (failed ? `, ${failed} failed` : "");
  }

  #row(job) {
    const bar = make("span", { class: "bar-fill" });
    const open = make("button", { class: "queue-open" });
    const name = make("span", { class: "queue-name" }, job.name);
    const note = make("span", { class: "queue-note" });
    open.append(name, note);
    open.addEventListener("click", () => this.select(job));
    const again = make("button", { class: "quiet", "aria-label": `Try ${job.name} again` }, "Again");
    again.addEventListener("click", () => this.#again(job));
    const stop = make("button", { class: "quiet", "aria-label": `Stop ${job.name}` }, "Stop");
    stop.addEventListener("click", () => this.#stop(job));
    const remove = make("button", { class: "quiet", "aria-label": `Remove ${job.name}` }, "Remove");
    remove.addEventListener("click", () => this.#remove(job));
    const progress = make("div", {
      class: "bar", role: "progressbar", "aria-label": `Progress of ${job.name}`,
      "aria-valuemin": 0, "aria-valuemax": 100,
    }, bar);
    const buttons = make("div", { class: "queue-buttons" }, again, stop, remove);
    const item = make("li", { class: "queue-item card" }, open, buttons, progress);
    return { item, open, note, again, stop, remove, bar, progress };
  }

  #draw(job) {
    const row = this.#rows.get(job);
    if (!row) return; // it was removed
    row.item.dataset.state = job.state;
    row.note.textContent = job.note;
    row.again.hidden = !(job.state === "failed" || job.state === "stopped");
    row.stop.hidden = !job.running;
    row.remove.hidden = job.running;
    const percent = Math.round(100 * job.share);
    row.bar.style.transform = `scaleX(${job.share})`;
    row.progress.setAttribute("aria-valuenow", percent);
  }
}

/** Refuse at once what the server would refuse after the upload. */
function check(file) {
  if (file.size <= limits.uploadBytes) return;
  const [has, most] = [size(file.size), size(limits.uploadBytes)];
  throw new ApiError(`The file has ${has}, and this server takes at most ${most}.`, { status: 413 });
}

/** The browser reports an unreadable file as a lost connection: find out which one it is. */
async function explained(error, file) {
  if (error.status !== 0) return error;
  return file.slice(0, 1).arrayBuffer().then(() => error, () => new ApiError(
    "The file cannot be read. It may be a folder, or it was changed or removed after it was chosen.",
  ));
}

function formOf(job) {
  const form = new FormData();
  const { task, save, speakers, ...fields } = job.fields; // without those that the API does not have
  for (const [name, value] of Object.entries(fields)) if (value !== "") form.append(name, value);
  form.append("response_format", "verbose_json");
  if (speakers === "channels") form.append("channels", "separate");
  if (speakers === "voices") form.append("diarize", "true");
  if (task !== "translate") {
    form.append("stream", "true");
    form.append("timestamp_granularities[]", "word");
    form.append("timestamp_granularities[]", "segment");
  }
  form.append("file", job.file, job.name);
  return form;
}
