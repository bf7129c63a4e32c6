// Shows one transcript: words are highlighted with the playback, play on a click, and can be edited.
// All words are in the document, so that the browser's search finds them; `content-visibility` in
// style.css keeps long transcripts fast.

import { announce, byId, clock, copyText, download, flash, make, plural } from "./dom.js";
import { Player } from "./player.js";
import { FORMATS, withText } from "./text.js";
import { drawTiming } from "./timing.js";

const DOUBTFUL = 0.5; // words of a lower probability are tinted
const N_SPEAKER_COLOURS = 6;

export class Reader {
  #job = null;
  #rows = []; // one per segment: {item, time, text, spans}
  #words = []; // of all segments, in order: {start, end, span, row}
  #lit = -1;
  #current = 0; // the segment that Tab reaches
  #drawnDone = false; // the rows show the finished answer
  #speakers = []; // by their first words; an index is a colour, which renaming keeps
  #player;

  constructor() {
    this.#player = new Player((seconds) => this.#light(seconds), () => this.refresh(this.#job));
    const list = byId("transcript");
    list.addEventListener("click", (event) => this.#onClick(event));
    list.addEventListener("dblclick", (event) => this.#onDoubleClick(event));
    list.addEventListener("keydown", (event) => this.#onKey(event));
    byId("copy").addEventListener("click", () => this.#copy());
    for (const button of document.querySelectorAll("[data-export]")) {
      button.addEventListener("click", () => this.save(this.#job, button.dataset.export));
    }
  }

  /** Show a job, or nothing. */
  show(job) {
    this.#job = job;
    byId("reader-empty").hidden = job !== null;
    byId("reader-full").hidden = job === null;
    byId("reader").scrollTop = 0;
    this.#clear();
    this.#player.open(job?.url ?? null);
    if (job === null) return;
    byId("reader-title").textContent = job.name;
    this.refresh(job);
  }

  /** Draw the changes of the job that is shown. */
  refresh(job) {
    if (job === null || job !== this.#job) return;
    const done = job.state === "done";
    const { note, language, words } = job;
    byId("reader-meta").textContent = done && words
      ? [plural(words, "word"), title(language), clock(job.duration)].filter(Boolean).join(" · ")
      : done ? "No speech was found" : job.state === "failed" ? "Not transcribed" : note;
    byId("reader-note").textContent = job.state === "failed" ? note : this.#player.note;
    byId("reader-note").classList.toggle("failed", job.state === "failed");
    byId("copy").disabled = !job.segments.length;
    for (const button of document.querySelectorAll("[data-export]")) {
      button.disabled = !done || !job.segments.length;
    }
    drawTiming(byId("timing"), job.timing);
    this.#drawSegments(done);
  }

  /** Let the user save a job's transcript as a file. */
  save(job, format) {
    const { type, write } = FORMATS[format];
    const name = job.name.replace(/\.[^.]+$/, "") || "transcript";
    download(`${name}.${format}`, write(job), type);
    job.edited = false;
    announce(`${job.name}: saved as ${format}`);
  }

  #clear() {
    byId("transcript").replaceChildren();
    [this.#rows, this.#words, this.#lit, this.#current, this.#speakers] = [[], [], -1, 0, []];
    this.#drawnDone = false;
  }

  #drawSegments(done) {
    if (this.#rows.length > this.#job.segments.length || (done && !this.#drawnDone)) {
      const kept = this.#current;
      const focused = byId("transcript").contains(document.activeElement);
      this.#clear();
      this.#drawnDone = done;
      this.#append(this.#job.segments);
      this.#choose(Math.min(kept, Math.max(0, this.#rows.length - 1)), focused);
    } else {
      this.#append(this.#job.segments.slice(this.#rows.length));
      if (this.#rows.length) this.#choose(this.#current, false);
    }
  }

  #append(segments) {
    const items = document.createDocumentFragment();
    for (const segment of segments) {
      const row = this.#row(segment, this.#rows.length);
      this.#rows.push(row);
      items.append(row.item);
    }
    byId("transcript").append(items);
    this.#index();
  }

  #row(segment, index) {
    const time = make("button", {
      class: "time", tabindex: -1, "aria-label": `Play from ${clock(segment.start)}`, "aria-describedby": `words-${index}`,
    }, clock(segment.start));
    const text = make("p", { id: `words-${index}`, class: "words", dir: "auto" });
    const item = make("li", { class: "segment", "data-index": index }, time, text);
    if (segment.speaker) {
      if (!this.#speakers.includes(segment.speaker)) this.#speakers.push(segment.speaker);
      const colour = this.#speakers.indexOf(segment.speaker) % N_SPEAKER_COLOURS;
      text.before(make("span", { class: `speaker speaker-${colour}`, title: "Rename" }, segment.speaker));
      item.classList.add("spoken-by");
    }
    const row = { item, time, text, spans: [] };
    this.#fill(row, segment);
    return row;
  }

  /** Write a segment's words; the space before a word is outside of its span. */
  #fill(row, segment) {
    row.spans = [];
    if (!segment.words.length) {
      row.text.textContent = segment.text.trim();
      return;
    }
    const parts = [];
    for (const [i, word] of segment.words.entries()) {
      const bare = word.text.trim();
      const from = word.text.indexOf(bare);
      if (i && from) parts.push(word.text.slice(0, from));
      const span = make("span", { class: word.probability < DOUBTFUL ? "word doubtful" : "word" }, bare);
      if (word.probability < DOUBTFUL) span.title = `Probability ${Math.round(100 * word.probability)} %`;
      parts.push(span);
      row.spans.push(span);
      const rest = word.text.slice(from + bare.length);
      if (rest && i < segment.words.length - 1) parts.push(rest);
    }
    row.text.replaceChildren(...parts);
  }

  /** Collect words, and segments without words, in order of time. */
  #index() {
    this.#words = [];
    for (const [r, segment] of this.#job.segments.entries()) {
      const row = this.#rows[r];
      if (!row) break;
      if (row.spans.length) {
        segment.words.forEach((word, i) => this.#words.push({ start: word.start, end: word.end, span: row.spans[i], row: r }));
      } else {
        this.#words.push({ start: segment.start, end: segment.end, span: row.text, row: r });
      }
    }
    this.#words.sort((one, other) => one.start - other.start); // channels overlap
    this.#lit = -1;
  }

  // ------------------------------------------------------------------------------- playback

  /** Highlight the word at this time. */
  #light(seconds) {
    const index = this.#at(seconds);
    if (index === this.#lit) return;
    this.#words[this.#lit]?.span.classList.remove("lit");
    const before = this.#words[this.#lit]?.row;
    this.#lit = index;
    const word = this.#words[index];
    for (const row of new Set([before, word?.row])) {
      if (row !== undefined) this.#rows[row]?.item.classList.toggle("playing", row === word?.row);
    }
    if (!word) return;
    word.span.classList.add("lit");
    if (word.row !== before && this.#player.playing) this.#follow(word.row);
  }

  /** Index of the last word that has begun by then; -1 before the first. */
  #at(seconds) {
    let [low, high] = [0, this.#words.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#words[middle].start <= seconds + 0.01) low = middle + 1;
      else high = middle;
    }
    const found = low - 1;
    const over = found >= 0 && seconds > this.#words[found].end + 1.5; // nothing during a long pause
    return over ? -1 : found;
  }

  /** Keep the playing segment on the screen, unless the user is reading elsewhere. */
  #follow(index) {
    const { item } = this.#rows[index];
    const place = item.getBoundingClientRect();
    const previous = this.#rows[index - 1]?.item.getBoundingClientRect() ?? place;
    const nearBy = previous.bottom > -200 && previous.top < innerHeight + 200;
    if (!nearBy || (place.top > 200 && place.bottom < innerHeight - 80)) return;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    item.scrollIntoView({ block: "center", behavior: still ? "auto" : "smooth" });
  }

  #seek(seconds, { play = false } = {}) {
    this.#player.seek(seconds);
    if (play) this.#player.play();
    this.#light(seconds);
  }

  // ------------------------------------------------------------------- pointer and keyboard

  #onClick(event) {
    const item = event.target.closest(".segment");
    if (!item || event.target.closest("[contenteditable]")) return;
    const index = Number(item.dataset.index);
    this.#choose(index, false);
    if (event.target.closest(".speaker")) {
      this.#rename(index);
      return;
    }
    if (event.target.closest(".time")) {
      this.#seek(this.#job.segments[index].start, { play: true });
      return;
    }
    const word = this.#words.find(({ span, row }) => row === index && span === event.target.closest(".word, .words"));
    if (word && getSelection().isCollapsed) this.#seek(word.start);
  }

  #onDoubleClick(event) {
    const item = event.target.closest(".segment");
    if (item && !event.target.closest(".time, .speaker, [contenteditable]")) this.#edit(Number(item.dataset.index));
  }

  #onKey(event) {
    if (event.target.closest("[contenteditable]")) return;
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const last = this.#rows.length - 1;
    const moves = {
      ArrowDown: () => this.#choose(Math.min(last, this.#current + 1), true),
      ArrowUp: () => this.#choose(Math.max(0, this.#current - 1), true),
      PageDown: () => this.#choose(Math.min(last, this.#current + 10), true),
      PageUp: () => this.#choose(Math.max(0, this.#current - 10), true),
      Home: () => this.#choose(0, true),
      End: () => this.#choose(last, true),
      ArrowRight: () => this.#step(1),
      ArrowLeft: () => this.#step(-1),
      e: () => this.#edit(this.#current),
      E: () => this.#edit(this.#current),
      n: () => this.#rename(this.#current),
      N: () => this.#rename(this.#current),
      " ": () => this.#player.toggle(),
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    move();
  }

  /** Move one word forward or back, and play from there. */
  #step(by) {
    const first = this.#words.findIndex((word) => word.row === this.#current);
    const here = this.#words[this.#lit]?.row === this.#current ? this.#lit : by > 0 ? first - 1 : first + 1;
    const word = this.#words[Math.min(this.#words.length - 1, Math.max(0, here + by))];
    if (!word) return;
    this.#choose(word.row, true);
    this.#seek(word.start);
    announce(word.span.textContent);
  }

  /** Let Tab reach this segment. */
  #choose(index, focus) {
    this.#rows[this.#current]?.time.setAttribute("tabindex", -1);
    this.#current = index;
    const row = this.#rows[index];
    if (!row) return;
    row.time.setAttribute("tabindex", 0);
    if (focus) {
      row.time.focus({ preventScroll: true });
      row.item.scrollIntoView({ block: "nearest" });
    }
  }

  // ---------------------------------------------------------------------------------- edits

  #edit(index) {
    if (this.#job.state !== "done") return;
    const job = this.#job;
    const row = this.#rows[index];
    const before = job.segments[index].text.trim();
    row.text.textContent = before;
    this.#write(row.text, index, `Text at ${clock(job.segments[index].start)}`, (after) => {
      if (after !== before) {
        job.segments[index] = withText(job.segments[index], after);
        this.#changed(job);
      }
      this.#fill(row, job.segments[index]);
      this.#index();
    });
  }

  /** Let the user rename a segment's speaker everywhere. An empty name changes nothing. */
  #rename(index) {
    const label = this.#rows[index]?.item.querySelector(".speaker");
    if (!label || this.#job.state !== "done") return;
    const job = this.#job;
    const before = job.segments[index].speaker;
    this.#write(label, index, `Name of ${before}`, (after) => {
      if (after && after !== before) {
        for (const segment of job.segments) if (segment.speaker === before) segment.speaker = after;
        this.#changed(job);
      }
      if (this.#speakers.includes(before)) this.#speakers[this.#speakers.indexOf(before)] = after || before;
      this.#rows.forEach(({ item }, i) => {
        const { speaker } = job.segments[i];
        if (!speaker) return;
        const colour = this.#speakers.indexOf(speaker) % N_SPEAKER_COLOURS;
        item.querySelector(".speaker").className = `speaker speaker-${colour}`;
        item.querySelector(".speaker").textContent = speaker;
      });
    });
  }

  #changed(job) {
    job.edited = true;
    announce("Changed");
  }

  /** Let the user edit an element of a segment. `end` gets the final text. */
  #write(place, index, label, end) {
    const before = place.textContent;
    place.setAttribute("contenteditable", "plaintext-only");
    place.setAttribute("role", "textbox");
    place.setAttribute("aria-label", label);
    place.focus();
    const over = (keep) => {
      if (!place.hasAttribute("contenteditable")) return;
      for (const name of ["contenteditable", "role", "aria-label"]) place.removeAttribute(name);
      place.onkeydown = place.onblur = null;
      end(keep ? place.textContent.replace(/\s+/g, " ").trim() : before);
    };
    place.onblur = () => over(true);
    place.onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      if (event.isComposing || event.keyCode === 229) return; // of an input method; Safari sets the code alone
      event.preventDefault();
      over(event.key === "Enter");
      this.#choose(index, true);
    };
  }

  // ---------------------------------------------------------------------------- copy, export

  async #copy() {
    const copied = await copyText(FORMATS.txt.write(this.#job));
    flash(byId("copy"), copied ? "Copied" : "Not copied");
  }

}

const title = (language) => language.replace(/^\p{Ll}/u, (letter) => letter.toUpperCase());
