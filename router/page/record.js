// Records the microphone into a file.

import { Microphone } from "./capture.js";
import { announce, byId, clock } from "./dom.js";

const RATE = 16_000; // of the samples for the level meter
const TYPES = ["audio/webm;codecs=opus", "audio/mp4", "audio/ogg;codecs=opus"];
const BITS_PER_S = 48_000;

export class Recorder {
  #microphone = new Microphone();
  #recorder = null;
  #onFile;
  #note = byId("record-note").textContent;

  /** onFile gets each recording, as a File. */
  constructor(onFile) {
    this.#onFile = onFile;
    byId("record").addEventListener("click", () => (this.#recorder ? this.#recorder.stop() : this.#start()));
  }

  get running() {
    return this.#recorder !== null;
  }

  async #start() {
    byId("record").disabled = true;
    try {
      await this.#microphone.open(RATE, ({ level }) => this.#meter(level), () => this.#recorder?.stop());
    } catch (error) {
      this.#say(error.message, true);
      announce(error.message);
      return;
    } finally {
      byId("record").disabled = false;
    }
    const mimeType = TYPES.find((type) => MediaRecorder.isTypeSupported(type));
    const options = { mimeType, audioBitsPerSecond: BITS_PER_S };
    const recorder = new MediaRecorder(this.#microphone.stream, options);
    const pieces = [];
    const began = performance.now();
    const ticking = setInterval(() => this.#say(clock((performance.now() - began) / 1000)), 250);
    recorder.ondataavailable = ({ data }) => data.size && pieces.push(data);
    recorder.onstop = () => {
      clearInterval(ticking);
      this.#microphone.close();
      this.#recorder = null;
      this.#draw(false);
      this.#say(this.#note);
      const type = recorder.mimeType.split(";")[0];
      const name = `Recording ${new Date().toTimeString().slice(0, 8).replaceAll(":", ".")}.${type.split("/")[1]}`;
      if (pieces.length) this.#onFile(new File(pieces, name, { type }));
    };
    recorder.start(1000);
    this.#recorder = recorder;
    this.#draw(true);
    announce("Recording");
  }

  #draw(recording) {
    byId("record").setAttribute("aria-pressed", String(recording));
    byId("record-label").textContent = recording ? "Stop" : "Record";
    this.#meter(0);
  }

  #meter(level) {
    byId("record").style.setProperty("--level", level.toFixed(2));
  }

  #say(text, failed = false) {
    byId("record-note").textContent = text;
    byId("record-note").classList.toggle("failed", failed);
  }
}
