"""How many people at once are transcribed while they speak, and how soon their words come.

    python -m benchmark.serving.live                         the bundled model
    python -m benchmark.serving.live --sessions 1 4 12 20 --seconds 30 --context trimmed

Each session sends its own synthesised talk over WebSocket at speaking speed, all sessions at once.
The delay of a word that was heard right is from its true end to the delta that ends it. At best it
is the wait for the next update, half a hop in the mean, and the audio that a policy holds back. The
same talks are then sent to the file endpoint, whose word error rate stands beside.

Deltas and CPU seconds are per second of audio. If other programs took more than a tenth of a core,
delays say little. One JSON line comes last.
"""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil
from numpy.typing import NDArray
from websockets.asyncio.client import connect

from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.server import BenchServer, serving
from benchmark.shared.speech.wav import wav_bytes
from benchmark.shared.talks import Talk, make_talks
from benchmark.shared.word_errors import count_all, total
from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import words_of

COLUMNS = (
    *("sessions", "word_p50_s", "word_p95_s", "completed_p50_s", "completed_p95_s", "wer"),
    *("deltas_per_audio_s", "cpu_s_per_audio_s", "cores_of_others"),
)
PIECE_S = 0.1
COMMIT = json.dumps({"type": "input_audio_buffer.commit"})
TAIL_S = 1.5  # of silence behind a talk, so that its last turn ends by itself
ANSWER_S = 240.0  # for the last turns, once all audio was sent


@dataclass
class Heard:
    """What one session received. Times are seconds since its first sample was due."""

    deltas: list[tuple[float, str, str]] = field(default_factory=list)  # when, item, text
    stopped: dict[str, float] = field(default_factory=dict)  # item to the end of its silence
    completed: dict[str, tuple[float, str]] = field(default_factory=dict)
    committed: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)  # items that have begun and not ended
    is_sent: bool = False  # all audio, and the last commit
    late_s: float = 0.0  # largest delay of a piece
    error: str = ""

    def take(self, event: dict[str, Any], at_s: float) -> bool:
        """Note an event, and return whether it was the last one."""
        kind, item = event["type"], event.get("item_id", "")
        if item and item not in self.completed:
            self.open.add(item)
        if kind.endswith("transcription.delta"):
            self.deltas.append((at_s, item, event["delta"]))
        elif kind.endswith("speech_stopped"):
            self.stopped[item] = event["audio_end_ms"] / 1000
        elif kind.endswith("buffer.committed"):
            self.committed.append(item)
        elif kind.endswith("transcription.failed") or kind == "error":
            self.error = json.dumps(event)
            self.open.discard(item)
        elif kind.endswith("transcription.completed"):
            self.completed[item] = (at_s, event["transcript"])
            self.open.discard(item)
            return self.is_sent and event["usage"]["seconds"] == 0 and not self.open
        return False

    @property
    def text(self) -> str:
        return " ".join(
            self.completed[item][1] for item in self.committed if item in self.completed
        )

    @property
    def is_append_only(self) -> bool:
        joined: dict[str, str] = {}
        for _, item, text in self.deltas:
            joined[item] = joined.get(item, "") + text
        return all(joined.get(item, "") == text for item, (_, text) in self.completed.items())


async def speak(url: str, model: str, talk: Talk, start_s: float) -> Heard:
    """Run one session, from its first sample to its last turn.

    Two commits are sent: the first ends what is still open, and the second, which finds no audio,
    is answered by an item of 0 s after all others.
    """
    heard = Heard()
    endpoint = url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
    try:
        async with connect(endpoint, max_size=None) as socket:
            transcription = {"model": model, "language": "en"}
            await configure(socket, transcription, {"type": "server_vad"})
            listening = asyncio.create_task(_listen(socket, heard, start_s))
            silence = np.zeros(round(TAIL_S * SAMPLE_RATE), np.int16)
            heard.late_s = await send(socket, np.concatenate((talk.pcm, silence)), start_s)
            heard.is_sent = True
            for _ in range(2):
                await socket.send(COMMIT)
            await asyncio.wait_for(listening, ANSWER_S)
    except Exception as error:
        heard.error = f"{type(error).__name__}: {error}"
    return heard


async def configure(socket: Any, transcription: Mapping[str, str], detection: Any) -> None:
    audio = {
        "format": {"type": "audio/pcm", "rate": SAMPLE_RATE},
        "transcription": transcription,
        "turn_detection": detection,
    }
    session = {"type": "transcription", "audio": {"input": audio}}
    await socket.send(json.dumps({"type": "session.update", "session": session}))


async def send(socket: Any, pcm: NDArray[np.int16], start_s: float) -> float:
    """Send audio at speaking speed; return the largest delay of a piece in seconds."""
    step, late_s = round(PIECE_S * SAMPLE_RATE), 0.0
    for first in range(0, len(pcm), step):
        due_s = start_s + (first + step) / SAMPLE_RATE
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        late_s = max(late_s, time.perf_counter() - due_s)
        audio = base64.b64encode(pcm[first : first + step].tobytes()).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
    return late_s


async def _listen(socket: Any, heard: Heard, start_s: float) -> None:
    async for message in socket:
        if heard.take(json.loads(message), time.perf_counter() - start_s):
            return


async def measure(server: BenchServer, model: str, talks: Sequence[Talk]) -> dict[str, Any]:
    before = server.cpu_s()
    own_before_s, busy_before_s = _own_s(), busy_s()
    start_s = time.perf_counter() + 1.0
    # Sessions begin within a second, not all in the same millisecond.
    heard = await asyncio.gather(
        *(speak(server.url, model, talk, start_s + i / len(talks)) for i, talk in enumerate(talks))
    )
    wall_s = time.perf_counter() - start_s
    audio_s = sum(talk.duration_s for talk in talks)
    after = server.cpu_s()
    own_s, all_s = _own_s() - own_before_s, busy_s() - busy_before_s
    server_s = sum(after.values()) - sum(before.values())
    delays = [
        d for talk, one in zip(talks, heard, strict=True) for d in word_delays(talk, one.deltas)
    ]
    completions = [
        one.completed[item][0] - stopped_s
        for one in heard
        for item, stopped_s in one.stopped.items()
        if item in one.completed
    ]
    errors = total(count_all([t.text for t in talks], [one.text for one in heard], "en"))
    return {
        "sessions": len(talks),
        "word_p50_s": percentile(delays, 50),
        "word_p95_s": percentile(delays, 95),
        "completed_p50_s": percentile(completions, 50),
        "completed_p95_s": percentile(completions, 95),
        "wer": errors.wer,
        "words_heard": len(delays),
        "words_said": sum(len(talk.words) for talk in talks),
        "deltas_per_audio_s": sum(len(one.deltas) for one in heard) / audio_s,
        "taken_back": sum(not one.is_append_only for one in heard),
        "failed": [one.error for one in heard if one.error],
        "latest_send_s": max(one.late_s for one in heard),
        "cores_of_load_generator": own_s / wall_s,
        "cores_of_others": (all_s - own_s - server_s) / wall_s,
        "cpu_s_per_audio_s": {
            kind: (used - before.get(kind, 0.0)) / audio_s for kind, used in after.items()
        },
    }


Told = tuple[float, str, str]  # seconds since the first sample was due, item, text that is added


def word_delays(talk: Talk, deltas: Iterable[Told]) -> list[float]:
    """Return the seconds from each word's end to its delta, for words that were heard right."""
    import jiwer

    said = ["".join(words_of(word)) for word, _ in talk.words]
    told: list[tuple[str, float]] = []
    open_words: dict[str, str] = {}
    for at_s, item, text in deltas:
        joined = open_words.get(item, "") + text
        open_words[item] = joined[len(joined.rstrip()) :] if joined != joined.rstrip() else ""
        told += [("".join(one), at_s) for one in map(words_of, joined.split()) if one]
    if not told or not said:
        return []
    aligned = jiwer.process_words(" ".join(said), " ".join(word for word, _ in told))
    delays = []
    for chunk in aligned.alignments[0]:
        if chunk.type == "equal":
            for ref in range(chunk.ref_start_idx, chunk.ref_end_idx):
                hyp = chunk.hyp_start_idx + ref - chunk.ref_start_idx
                delays.append(told[hyp][1] - talk.words[ref][1])
    return delays


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else float("nan")


def _own_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system


def busy_s() -> float:
    """Return the CPU seconds that all processes of this machine have used."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def file_errors(url: str, model: str, talks: Sequence[Talk]) -> float:
    """Return the file endpoint's word error rate on the same talks, in percent."""
    texts = []
    with httpx.Client(timeout=300.0) as client:
        for talk in talks:
            answer = client.post(
                f"{url}/v1/audio/transcriptions",
                files={"file": ("talk.wav", wav_bytes(talk.pcm))},
                data={"model": model, "language": "en"},
            )
            texts.append(answer.raise_for_status().json()["text"])
    return total(count_all([talk.text for talk in talks], texts, "en")).wer


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 12, 20])
    parser.add_argument("--seconds", type=float, default=30.0, help="of a talk")
    parser.add_argument("--context", choices=["full", "trimmed"], default="full")
    args = parser.parse_args()
    talks = make_talks(max(args.sessions), args.seconds)
    print(
        "ceiling, with 0.5 s held back: half of the shortest hop and 0.5 s, "
        "0.75 s in the mean for words without a pause behind them"
    )
    env = {"SPLITSCRIBE_MODEL": args.model, "SPLITSCRIBE_ENCODER__CONTEXT": args.context}
    with serving(env=env) as server:
        asyncio.run(measure(server, args.model, talks[:1]))  # warm
        rows = []
        for n in args.sessions:
            rows.append(asyncio.run(measure(server, args.model, talks[:n])))
            print(json.dumps(rows[-1]), flush=True)
        file_wer = file_errors(server.url, args.model, talks)
    print_table({name: row[name] for name in COLUMNS} for row in rows)
    print(f"the file endpoint: {file_wer:.2f} % of wrong words")
    talk_s = statistics.mean(talk.duration_s for talk in talks)
    about = {"context": args.context, "talk_s": talk_s, "file_wer": file_wer}
    about |= {**cpu_info(), **versions("splitscribe", "torch")}
    print_result("live", {**about, "rows": rows})


if __name__ == "__main__":
    main()
