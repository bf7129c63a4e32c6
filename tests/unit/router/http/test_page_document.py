"""What the page does with its document, in Node: what no test in a browser can bring about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browsers.node_page import told_by_node
from tests.support.programs import needs

pytestmark = needs("node")

READ = """
import { byId } from "./document.js";
import { Reader } from "./reader.js";
const words = [" かな", " と"].map((text, i) => ({ text, start: i, end: i + 1, probability: 1 }));
const segments = [{ start: 0, end: 2, text: " かな と", words }];
const job = { state: "done", name: "a.wav", segments, timing: "", language: "japanese" };
new Reader().show(job);
const text = byId("transcript").querySelector(".words");
"""
EDIT = f"""{READ}
text.fire("dblclick");
text.textContent = "漢字";
const told = [];
for (const event of asked) {{
  text.fire("keydown", event);
  told.push([text.hasAttribute("contenteditable"), job.segments[0].text]);
}}
console.log(JSON.stringify(told));
"""


@pytest.mark.parametrize("composing", [{"isComposing": True}, {"keyCode": 229}])
def test_enter_that_ends_a_composition_goes_on_with_the_edit(
    tmp_path: Path, composing: dict[str, object]
) -> None:
    """As Japanese and Chinese are written; Safari tells it by the key's code alone."""
    enter = {"key": "Enter"}
    told = told_by_node(tmp_path, EDIT, [enter | composing, enter])
    assert told == [[True, " かな と"], [False, " 漢字"]]


DESCRIBED = f"""{READ}
const described = byId("transcript").querySelector(".time").getAttribute("aria-describedby");
console.log(JSON.stringify([described, text.getAttribute("id")]));
"""


def test_the_button_that_the_arrows_reach_reads_its_segment_out(tmp_path: Path) -> None:
    described, text = told_by_node(tmp_path, DESCRIBED)
    assert described == text is not None


PLAYED = """
import { byId } from "./document.js";
import { Reader } from "./reader.js";
const word = (start) => ({ text: ` ${start}`, start, end: start + 1, probability: 1 });
const segments = asked.map((starts) => {
  const words = starts.map(word);
  const text = words.map((one) => one.text).join("");
  return { start: words[0].start, end: words.at(-1).end, text, words };
});
new Reader().show({ state: "done", name: "a.wav", segments, timing: "", language: "english" });
const told = [];
for (let second = 0; second < 6; second += 1) {
  byId("audio").currentTime = second + 0.2;
  byId("audio").fire("timeupdate");
  told.push(byId("transcript").querySelector(".lit")?.textContent);
}
console.log(JSON.stringify(told));
"""


def test_playback_lights_the_words_of_segments_that_overlap_by_their_time(tmp_path: Path) -> None:
    told = told_by_node(tmp_path, PLAYED, [[0, 1, 4, 5], [2, 3]])
    assert told == ["0", "1", "2", "3", "4", "5"]


SOUGHT = """
import { byId } from "./document.js";
import { Player } from "./player.js";
const player = new Player(() => {}, null);
const audio = byId("audio");
const told = [];
for (const duration of asked) {
  player.open("blob:");
  audio.duration = duration ?? Infinity;
  audio.fire("durationchange");
  if (duration) {
    player.seek(5);
    audio.fire("timeupdate");
  }
  told.push(audio.currentTime);
}
console.log(JSON.stringify(told));
"""


def test_a_recording_whose_end_is_sought_moves_no_other_file(tmp_path: Path) -> None:
    assert told_by_node(tmp_path, SOUGHT, [None, 9]) == [2**53 - 1, 5]


PASTE = """
import { byId, top } from "./document.js";
await import("./main.js");
const told = [];
for (const [selector, content] of asked) {
  const place = document.createElement(selector);
  top.append(place);
  place.fire("paste", { clipboardData: { files: content.map((name) => new File(["x"], name)) } });
  told.push(byId("queue").children.length);
}
console.log(JSON.stringify(told));
process.exit();
"""


def test_what_is_pasted_into_a_field_is_its_text_and_no_file(tmp_path: Path) -> None:
    """Cells of a table come with a picture of themselves."""
    image = ["image.png"]
    asked = [("input", image), ("textarea", image), ("p", []), ("p", ["talk.wav"])]
    assert told_by_node(tmp_path, PASTE, asked) == [0, 0, 0, 1]


SENT = """
import { byId } from "./document.js";
import { Queue } from "./queue.js";
globalThis.XMLHttpRequest = class {
  upload = {};
  open() {}
  abort() {}
  send() { setTimeout(() => this.onerror()); }
};
const [file, folder] = ["talk.wav", "talks"].map((name) => new File(["x"], name));
folder.slice = () => ({ arrayBuffer: () => Promise.reject(new DOMException("", "NotFoundError")) });
const told = {};
const listen = (what, job) => { if (job.state === "failed") told[job.name] = job.note; };
new Queue(listen, null).add([file, folder], {});
setTimeout(() => console.log(JSON.stringify(told)), 200);
"""


def test_a_dropped_folder_is_no_lost_connection(tmp_path: Path) -> None:
    told = told_by_node(tmp_path, SENT)
    assert told["talk.wav"] == "The connection to the server was lost."
    assert "It may be a folder" in told["talks"]


LIVE = """
import { byId } from "./document.js";
import { Live } from "./live.js";
new Live(() => ({ model: "whisper-1", language: "" }), null);
byId("live-button").fire("click");
while (!globalThis.socket?.onmessage) await new Promise((resolve) => setTimeout(resolve, 10));
const told = asked.map((event) => {
  socket.onmessage({ data: JSON.stringify({ item_id: "item_1", ...event }) });
  return byId("turns").querySelector(".words").children.map((one) => one.textContent ?? one);
});
console.log(JSON.stringify(told));
process.exit();
"""


def test_the_text_of_a_turn_is_not_written_anew_at_its_end(tmp_path: Path) -> None:
    """A screen reader would read all of it a second time."""
    transcription = "conversation.item.input_audio_transcription"
    deltas = [{"type": f"{transcription}.delta", "delta": text} for text in ("one", " two")]
    end = {"type": f"{transcription}.completed", "transcript": "one two"}
    told = told_by_node(tmp_path, LIVE, [*deltas, end])
    assert told == [["one"], ["one", " two"], ["one", " two"]]


LOST = """
import "./document.js";
import { health } from "./api.js";
AbortSignal.timeout = (ms) => AbortSignal.abort(new DOMException(`${ms} ms`, "TimeoutError"));
globalThis.fetch = (url, { signal }) => new Promise((_, reject) => {
  if (signal?.aborted) reject(signal.reason);
});
setTimeout(() => console.log(JSON.stringify("still waits")), 500);
console.log(JSON.stringify(await health().catch((error) => error.message)));
process.exit();
"""


def test_a_server_whose_machine_is_gone_is_told_in_time(tmp_path: Path) -> None:
    assert told_by_node(tmp_path, LOST) == "The server does not answer."


LEAVE = """
import { byId, top } from "./document.js";
globalThis.MediaRecorder = class {
  static isTypeSupported = () => true;
  mimeType = "audio/webm";
  start() {}
  stop() { this.onstop(); }
};
await import("./main.js");
const told = [];
const leave = () => {
  let asks = false;
  top.fire("beforeunload", { preventDefault: () => { asks = true; } });
  told.push(asks);
};
leave();
for (const press of asked) {
  byId(press).fire("click");
  await new Promise((resolve) => setTimeout(resolve, 50));
  leave();
}
console.log(JSON.stringify(told));
process.exit();
"""


@pytest.mark.parametrize(
    ("presses", "asks"),
    [
        (["record"] * 2, [False, True, False]),
        (["live-button"] * 3, [False, True, True, False]),  # the second waits for the last words
    ],
)
def test_who_leaves_while_the_microphone_is_heard_is_asked(
    tmp_path: Path, presses: list[str], asks: list[bool]
) -> None:
    assert told_by_node(tmp_path, LEAVE, presses) == asks


STOP = """
import { byId } from "./document.js";
import { Live } from "./live.js";
globalThis.WebSocket = class { // that does not open
  static OPEN = 1;
  close() {}
};
const live = new Live(() => ({ model: "whisper-1", language: "" }), null);
const told = [];
for (const press of ["start", "stop"]) {
  byId("live-button").fire("click");
  await new Promise((resolve) => setTimeout(resolve, 50));
  told.push([live.running, byId("live-state").textContent]);
}
console.log(JSON.stringify(told));
process.exit();
"""


def test_a_press_ends_a_live_session_that_is_still_connecting(tmp_path: Path) -> None:
    assert told_by_node(tmp_path, STOP) == [[True, "Connecting"], [False, "Press to speak"]]
