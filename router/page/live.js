// Live transcription: sends the microphone's samples to `/v1/realtime` by OpenAI's realtime
// protocol, and shows the words as they come.

import { authorization, call, hasKey, place } from "./api.js";
import { Microphone } from "./capture.js";
import { announce, byId, clock, copyText, download, flash, make } from "./dom.js";

const RATE = 24_000; // of audio/pcm in the protocol
const OPEN_MS = 15_000;
const FINISH_MS = 20_000; // longest wait for the last words after the microphone stops
const QUIET_MS = 800; // wait after the last words, in case another turn begins
const MOST_UNSENT_BYTES = 1_000_000; // about 15 s of audio
const METER_MS = 100;

export class Live {
  #options; // () => {model, language}
  #needKey;
  #session = null;
  #turns = new Turns();

  constructor(options, needKey) {
    this.#options = options;
    this.#needKey = needKey;
    byId("live-button").addEventListener("click", () => (this.#session ? this.#session.finish() : this.#start()));
    byId("live-copy").addEventListener("click", async () => {
      flash(byId("live-copy"), (await copyText(this.#turns.text)) ? "Copied" : "Not copied");
    });
    byId("live-export").addEventListener("click", () => download("live.txt", this.#turns.text, "text/plain;charset=utf-8"));
    byId("live-clear").addEventListener("click", () => this.#turns.clear());
  }

  get running() {
    return this.#session !== null;
  }

  async #start() {
    say("Connecting", "wait");
    note("");
    const session = new Session(this.#options(), this.#turns);
    press(true);
    this.#session = session;
    try {
      await session.run();
      say("Press to speak", "");
    } catch (error) {
      say("Not listening", "bad");
      note(error.message);
      announce(error.message);
      if (error.status === 401) this.#needKey();
    } finally {
      session.close();
      this.#session = null;
      press(false);
      meter(0);
      byId("live-clock").textContent = "";
    }
  }
}

/** One session, from the button press that starts it to its end. */
class Session {
  #options;
  #turns;
  #microphone = new Microphone();
  #socket = null;
  #ending = false;
  #configured = false; // the server has applied the settings
  #slow = false;
  #settling = false; // the last commit was sent
  #settled = false; // and was answered
  #quiet = 0; // timer for QUIET_MS
  #metered = 0;
  #began = 0; // when the first samples came
  #end; // settles `run`
  #over;

  constructor(options, turns) {
    this.#options = options;
    this.#turns = turns;
    this.#over = new Promise((resolve, reject) => { this.#end = { resolve, reject }; });
    this.#over.catch(() => {}); // avoids an unhandled rejection if `run` fails first
  }

  /** Run the session to its end. Throws errors with messages for the user. */
  async run() {
    await this.#microphone.open(RATE, (piece) => this.#send(piece), () => this.#fail("The microphone went away."));
    if (this.#ending) return;
    await Promise.race([this.#connect(), this.#over]);
    if (this.#ending) return;
    this.#socket.send(JSON.stringify({ type: "session.update", session: this.#settings() }));
    await this.#over;
  }

  /** Stop the microphone, and wait for the last words. */
  finish() {
    if (this.#ending) {
      this.#end.resolve(); // pressed twice: stop at once
      return;
    }
    this.#ending = true;
    this.#microphone.close();
    meter(0);
    byId("live-clock").textContent = "";
    say("Finishing", "wait");
    if (this.#socket?.readyState !== WebSocket.OPEN) {
      this.#end.resolve();
      return;
    }
    this.#socket.send(JSON.stringify({ type: "input_audio_buffer.commit" }));
    // The server handles events in order, so an answer to this means that it saw the commit.
    this.#socket.send(JSON.stringify({ type: "session.update", session: { type: "transcription" } }));
    this.#settling = true;
    setTimeout(() => this.#end.resolve(), FINISH_MS);
  }

  close() {
    this.#microphone.close();
    this.#ending = true;
    this.#socket?.close(1000);
    this.#turns.closeAll();
  }

  async #connect() {
    const protocols = ["realtime"];
    if (hasKey()) protocols.push(`openai-insecure-api-key.${await this.#secret()}`);
    if (this.#ending) return;
    const url = place("v1/realtime?intent=transcription");
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url, protocols);
    this.#socket = socket;
    await new Promise((resolve, reject) => {
      const late = setTimeout(() => socket.close(), OPEN_MS);
      socket.onopen = () => { clearTimeout(late); resolve(); };
      socket.onclose = () => { clearTimeout(late); reject(new Error("closed")); };
    }).catch(() => this.#explain());
    socket.onmessage = ({ data }) => this.#take(JSON.parse(data));
    socket.onclose = (event) => this.#closed(event);
  }

  /** A client secret, so that the key itself is not in the WebSocket's headers. */
  async #secret() {
    const headers = { ...authorization(), "content-type": "application/json" };
    const body = JSON.stringify({ session: { type: "transcription" } });
    return (await call("v1/realtime/client_secrets", { method: "POST", headers, body })).value;
  }

  /** A browser hides why a WebSocket was refused, so another call must find the reason. */
  async #explain() {
    await call("v1/models"); // throws if the key or the server is the reason
    throw new Error(
      "The server did not open a live session. It may be full, it may not offer /v1/realtime, "
      + "or a proxy in front of it may not pass WebSockets on.",
    );
  }

  #settings() {
    const { model, language } = this.#options;
    const transcription = { model };
    if (language) transcription.language = language;
    return {
      type: "transcription",
      audio: {
        input: {
          format: { type: "audio/pcm", rate: RATE },
          transcription,
          turn_detection: { type: "server_vad" },
        },
      },
    };
  }

  #send({ pcm, level }) {
    const now = performance.now();
    if (now - this.#metered > METER_MS) {
      meter(level);
      this.#began ||= now;
      byId("live-clock").textContent = `${clock((now - this.#began) / 1000)}, press to stop`;
      this.#metered = now;
    }
    if (this.#ending || this.#socket?.readyState !== WebSocket.OPEN) return;
    const slow = this.#socket.bufferedAmount > MOST_UNSENT_BYTES;
    if (slow !== this.#slow) note(slow ? "The connection is too slow for live audio; some of it is left out." : "");
    this.#slow = slow;
    if (!slow) this.#socket.send(JSON.stringify({ type: "input_audio_buffer.append", audio: base64(pcm) }));
  }

  #take(event) {
    const turns = this.#turns;
    const ofItem = "conversation.item.input_audio_transcription.";
    switch (event.type) {
      case "input_audio_buffer.speech_started":
        turns.open(event.item_id, event.audio_start_ms);
        if (!this.#ending) say("Hearing you", "good");
        break;
      case "input_audio_buffer.speech_stopped":
        if (!this.#ending) say("Listening", "good");
        break;
      case "input_audio_buffer.committed":
        turns.open(event.item_id);
        break;
      case `${ofItem}delta`:
        turns.add(event.item_id, event.delta ?? "");
        break;
      case `${ofItem}completed`:
        turns.complete(event.item_id, event.transcript ?? "");
        break;
      case `${ofItem}failed`:
        turns.fail(event.item_id, event.error?.message ?? "This turn could not be transcribed.");
        break;
      case "session.updated":
        if (!this.#configured && !this.#ending) say("Listening", "good");
        this.#configured = true;
        if (this.#settling) this.#settled = true;
        break;
      case "error":
        this.#onError(event.error ?? {});
        break;
      default: // not needed here
    }
    clearTimeout(this.#quiet);
    if (this.#settled && !turns.hasOpen) this.#quiet = setTimeout(this.#end.resolve, QUIET_MS);
  }

  #onError({ code, message = "The server reported an error." }) {
    if (this.#ending && code === "input_audio_buffer_commit_empty") return; // nothing was left to commit
    if (this.#configured) note(message);
    else this.#fail(message);
  }

  #closed(event) {
    if (this.#ending) this.#end.resolve();
    else if (event.code === 1012) this.#fail("The server is being restarted. Press again in a moment.");
    else this.#fail(event.reason || "The connection to the server was lost.");
  }

  #fail(message) {
    if (!this.#ending) this.#end.reject(new Error(message));
  }
}

/** The turns, in the order in which they began. */
class Turns {
  #turns = new Map(); // by item id: {item, text, done}
  #finished = 0; // ended sessions, to keep their ids apart

  get hasOpen() {
    return [...this.#turns.values()].some((turn) => !turn.done);
  }

  get text() {
    return [...this.#turns.values()].map((turn) => `${turn.text.textContent.trim()}\n`).filter((line) => line.trim()).join("");
  }

  open(id, startMs) {
    const known = this.#turns.get(id);
    if (known) return known;
    const text = make("p", { class: "words", dir: "auto" });
    const time = make("span", { class: "time" }, startMs === undefined ? "" : clock(startMs / 1000));
    const item = make("li", { class: "turn open" }, time, text);
    const turn = { item, text, done: false };
    this.#turns.set(id, turn);
    byId("turns").append(item);
    this.#draw();
    return turn;
  }

  add(id, delta) {
    const turn = this.open(id);
    turn.text.append(delta);
    this.#draw();
  }

  complete(id, transcript) {
    const turn = this.open(id);
    turn.done = true;
    turn.item.classList.remove("open");
    const text = transcript.trim();
    if (turn.text.textContent !== text) turn.text.textContent = text; // screen readers repeat text that is set again
    if (!text) this.#drop(id, turn);
    this.#draw();
  }

  fail(id, message) {
    const turn = this.open(id);
    turn.done = true;
    turn.item.classList.remove("open");
    turn.item.append(make("p", { class: "note failed" }, message));
  }

  /** End all open turns; those without text are removed. */
  closeAll() {
    this.#finished += 1;
    for (const [id, turn] of [...this.#turns]) {
      turn.item.classList.remove("open");
      this.#turns.delete(id);
      if (!turn.done && !turn.text.textContent.trim()) turn.item.remove();
      else this.#turns.set(`${this.#finished} ${id}`, { ...turn, done: true });
    }
    this.#draw();
  }

  clear() {
    byId("turns").replaceChildren();
    this.#turns.clear();
    this.#draw();
  }

  #drop(id, turn) {
    turn.item.remove();
    this.#turns.delete(id);
  }

  /** Scroll to the newest text, and enable the buttons. */
  #draw() {
    byId("turns-empty").hidden = this.#turns.size > 0;
    const said = [...this.#turns.values()].some((turn) => turn.text.textContent.trim());
    byId("live-copy").disabled = byId("live-export").disabled = !said;
    byId("live-clear").disabled = !this.#turns.size;
    const list = byId("turns-log");
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 160;
    if (atEnd) list.scrollTop = list.scrollHeight;
  }
}

function say(text, kind) {
  byId("live-state").textContent = text;
  byId("live-button").dataset.kind = kind;
}

function note(text) {
  byId("live-note").textContent = text;
  byId("live-note").classList.toggle("failed", text !== "");
}

function press(pressed) {
  byId("live-button").setAttribute("aria-pressed", String(pressed));
  byId("live-label").textContent = pressed ? "Stop" : "Start";
  for (const field of byId("live-options").elements) field.disabled = pressed;
}

function meter(level) {
  byId("level-bar").style.transform = `scaleX(${level.toFixed(3)})`;
  byId("level").setAttribute("aria-valuenow", Math.round(100 * level));
}

function base64(buffer) {
  return btoa(String.fromCharCode(...new Uint8Array(buffer)));
}
