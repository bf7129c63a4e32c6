// Plays one file. The listener gets the time while it plays and after a seek.

import { byId, clock } from "./dom.js";

export class Player {
  note = "";
  #audio = byId("audio");
  #listener;
  #onBroken;

  /** listener gets the time in seconds; onBroken is called when a file cannot be played. */
  constructor(listener, onBroken) {
    this.#listener = listener;
    this.#onBroken = onBroken;
    const audio = this.#audio;
    byId("play").addEventListener("click", () => this.toggle());
    byId("seek").addEventListener("input", () => this.seek(Number(byId("seek").value)));
    byId("speed").addEventListener("change", () => { audio.playbackRate = Number(byId("speed").value); });
    for (const name of ["play", "pause", "ended"]) audio.addEventListener(name, () => this.#drawButton());
    audio.addEventListener("play", () => this.#run());
    audio.addEventListener("timeupdate", () => this.#drawTime());
    audio.addEventListener("seeked", () => this.#drawTime());
    audio.addEventListener("durationchange", () => this.#onDuration());
    audio.addEventListener("error", () => this.#onError());
  }

  get playing() {
    return !this.#audio.paused && !this.#audio.ended;
  }

  /** Load another file; null: none. */
  open(url) {
    this.#audio.pause();
    this.#audio.ontimeupdate = null; // of a recording whose end is being sought
    this.note = "";
    if (url === null) this.#audio.removeAttribute("src");
    else this.#audio.src = url;
    this.#audio.playbackRate = Number(byId("speed").value);
    this.#setLength(0);
    this.#drawTime();
    this.#drawButton();
  }

  play() {
    this.#audio.play().catch(() => {}); // an unknown format: the `error` event reports it
  }

  toggle() {
    if (this.playing) this.#audio.pause();
    else this.play();
  }

  seek(seconds) {
    this.#audio.currentTime = seconds;
    this.#drawTime(seconds);
  }

  #run() {
    this.#drawTime();
    if (this.playing) requestAnimationFrame(() => this.#run());
  }

  /** Recordings of this page have no length in them, so their end must be sought once. */
  #onDuration() {
    const { duration } = this.#audio;
    if (duration === Infinity) {
      this.#audio.currentTime = Number.MAX_SAFE_INTEGER;
      this.#audio.ontimeupdate = () => { this.#audio.ontimeupdate = null; this.#audio.currentTime = 0; };
    } else {
      this.#setLength(duration);
    }
  }

  #setLength(seconds) {
    const known = Number.isFinite(seconds) && seconds > 0;
    byId("seek").max = known ? seconds : 1;
    byId("seek").disabled = byId("play").disabled = !known;
    byId("length").textContent = clock(seconds);
  }

  #onError() {
    if (!this.#audio.getAttribute("src")) return;
    this.note = "This browser cannot play the file; its text is not affected.";
    this.#onBroken();
  }

  #drawTime(seconds = this.#audio.currentTime) {
    byId("at").textContent = clock(seconds);
    byId("seek").value = seconds;
    byId("seek").setAttribute("aria-valuetext", `${clock(seconds)} of ${byId("length").textContent}`);
    const share = seconds / Number(byId("seek").max);
    byId("seek").style.setProperty("--share", `${100 * Math.min(1, share)}%`);
    this.#listener(seconds);
  }

  #drawButton() {
    byId("player").classList.toggle("is-playing", this.playing);
    byId("play").setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }
}
