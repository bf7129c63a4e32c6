"""A steady load through OpenAI's SDK, in an open loop, each request on a connection of its own.

Every second request has audio that no encoder keeps.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import httpx
import numpy as np
import openai

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import HOP_LENGTH, SAMPLE_RATE
from tests.support.audio.recordings import lengthened
from tests.support.audio.speech import pcm_of

CLIPS = ("short", "short", "medium", "short")  # in turn; 5 and 25 seconds of speech
GIVEN_UP_S = 150.0  # a request without an answer by then is lost; above any deadline of a clip
REFUSALS = (429, 503)
N_VARIANTS = 400  # more windows than all encoders keep

Verdict = Literal["right", "wrong", "refused", "lost"]


@dataclass(slots=True)
class Sent:
    """statuses: of each try, 0 without an answer. n_hits: windows that an encoder had kept."""

    number: int
    clip: str
    began_s: float
    ended_s: float = 0.0
    verdict: Verdict | None = None  # None: in flight
    detail: str = ""
    statuses: list[int] = field(default_factory=list)
    n_hits: int = 0

    @property
    def retried(self) -> bool:
        return len(self.statuses) > 1

    @property
    def was_refused(self) -> bool:
        return any(status in REFUSALS for status in self.statuses)

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


_current: contextvars.ContextVar[Sent] = contextvars.ContextVar("current")


async def _note_try(request: httpx.Request) -> None:
    _current.get().statuses.append(0)


async def _note_answer(response: httpx.Response) -> None:
    sent = _current.get()
    sent.statuses[-1] = response.status_code
    if found := re.search(r"hits=(\d+)", response.headers.get("x-splitscribe-cache", "")):
        sent.n_hits = int(found[1])


class Load:
    def __init__(
        self,
        url: str,
        texts: Mapping[str, str],
        rate: float,
        clips: Sequence[str] = CLIPS,
        audio_of: Callable[[Sent], bytes] | None = None,
    ) -> None:
        self.rate = rate
        self._clips = clips
        self._audio_of = audio_of or upload_of
        self.sent: list[Sent] = []
        self._texts = dict(texts)
        self._url = url
        self._paused = threading.Event()
        self._closing = threading.Event()
        self._burst = 0
        self._in_flight: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._closing.set()
        if kind is None:  # else somebody wants to be rid of it
            self._thread.join(GIVEN_UP_S + 10)

    def pause(self) -> None:
        self._paused.set()

    def go_on(self) -> None:
        self._paused.clear()

    def burst(self, n: int) -> None:
        self._burst += n

    @property
    def n_in_flight(self) -> int:
        return sum(one.verdict is None for one in tuple(self.sent))

    def wait_for_answers(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while self.n_in_flight and time.monotonic() < end_s:
            time.sleep(0.1)

    async def _run(self) -> None:
        hooks = {"request": [_note_try], "response": [_note_answer]}
        # No connection is kept: with several routers, each request takes its chance.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(limits=limits, event_hooks=hooks, timeout=600.0) as http,
            openai.AsyncOpenAI(
                base_url=f"{self._url}/v1", api_key="none", http_client=http
            ) as client,
        ):
            clips = itertools.cycle(self._clips)
            due = time.monotonic()
            while not self._closing.is_set():
                if self._paused.is_set():
                    due = time.monotonic()
                elif time.monotonic() >= due:
                    due += 1 / self.rate
                    self._send(client, next(clips))
                for _ in range(self._burst):
                    self._send(client, next(clips))
                self._burst = 0
                await asyncio.sleep(max(0.005, min(0.1, due - time.monotonic())))
            await asyncio.gather(*self._in_flight)

    def _send(self, client: openai.AsyncOpenAI, clip: str) -> None:
        sent = Sent(len(self.sent), clip, time.monotonic())
        self.sent.append(sent)
        task = asyncio.create_task(self._one(client, sent))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _one(self, client: openai.AsyncOpenAI, sent: Sent) -> None:
        _current.set(sent)
        verdict: Verdict = "lost"
        try:
            async with asyncio.timeout(GIVEN_UP_S):
                answer = await client.audio.transcriptions.create(
                    model="whisper-1",
                    file=("audio.wav", self._audio_of(sent)),
                    language="en",
                    temperature=0.0,
                )
            verdict = "right" if answer.text == self._texts[sent.clip] else "wrong"
            if verdict == "wrong":
                sent.detail = f"{answer.text!r} in place of {self._texts[sent.clip]!r}"
        except openai.APIStatusError as error:
            verdict = "refused" if error.status_code in REFUSALS else "lost"
            sent.detail = f"{error.status_code}: {error.message}"
        except TimeoutError:
            sent.detail = f"no answer in {GIVEN_UP_S:.0f} s"
        except Exception as error:
            sent.detail = f"{type(error).__name__}: {error.__cause__ or error}"
        sent.ended_s = time.monotonic()
        sent.verdict = verdict


def upload_of(sent: Sent) -> bytes:
    return lengthened(sent.clip, sent.number % N_VARIANTS if sent.number % 2 else 0)


def reference_texts(url: str) -> dict[str, str]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return {clip: _said(client, lengthened(clip, 0)) for clip in dict.fromkeys(CLIPS)}


def _said(client: openai.OpenAI, wav: bytes) -> str:
    return client.audio.transcriptions.create(
        model="whisper-1", file=("audio.wav", wav), language="en", temperature=0.0
    ).text


def goodput(sent: Sequence[Sent], since_s: float, until_s: float) -> float:
    right = sum(one.verdict == "right" and since_s <= one.ended_s < until_s for one in sent)
    return right / (until_s - since_s)


def verdicts(sent: Sequence[Sent]) -> Counter[str]:
    return Counter(one.verdict or "in flight" for one in sent)


TIGHT = {"SPLITSCRIBE_ENCODER__EXPORT_WINDOWS": "3"}  # of a cluster that must evict
PIECE_S, STEP_S = 5.0, 2.0
N_REPEATED = 6  # as many as both encoders hold, if nothing else came
# Silence of so many samples is other audio, with the same features, context and timestamps.
N_DELAYS = HOP_LENGTH // 2 - 1
SEED = 15


def pieces() -> dict[str, bytes]:
    found = {}
    size, step = round(PIECE_S * SAMPLE_RATE), round(STEP_S * SAMPLE_RATE)
    for recording in ("medium", "long"):
        pcm = pcm_of(recording)
        for start in range(0, len(pcm) - size + 1, step):
            found[f"{recording} from {start / SAMPLE_RATE:04.1f} s"] = pcm[
                start : start + size
            ].tobytes()
    return found


def texts_alone(url: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for name, pcm in pieces().items():
            text = _said(client, _wav(pcm))
            if text and text not in texts.values():
                texts[name] = text
    assert len(texts) > 3 * N_REPEATED, texts
    return texts


def kept_load(url: str, texts: Mapping[str, str], rate: float) -> Load:
    speech = pieces()
    names = list(texts)
    rng = random.Random(SEED)
    repeated = rng.sample(names, N_REPEATED)
    # Those of the first half of the list come most: some are kept when they come, and some are not.
    shares = [1 / (1 + place) for place in range(N_REPEATED)]
    turns = [
        names[number % len(names)] if number % 2 else rng.choices(repeated, shares)[0]
        for number in range(2 * len(names) + 1)  # odd: each piece is new audio once in two rounds
    ]

    def audio_of(sent: Sent) -> bytes:
        is_new = sent.number % 2 == 1
        n_samples = 1 + sent.number // len(turns) % N_DELAYS if is_new else 0
        return _wav(speech[sent.clip], n_samples)

    return Load(url, texts, rate, turns, audio_of)


def steady_load(url: str, rate: float, *, kept: bool = False) -> Load:
    if kept:
        return kept_load(url, texts_alone(url), rate)
    return Load(url, reference_texts(url), rate)


def _wav(pcm: bytes, n_samples: int = 0) -> bytes:
    return wav_bytes(np.frombuffer(pcm + bytes(2 * n_samples), np.int16))
