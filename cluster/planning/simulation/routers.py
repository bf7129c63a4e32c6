"""A simulated router: real admission, transcriber, pipeline and choice, over simulated parts.

What is real is all that decides: `Admission`, `RequestContext`, `RequestTranscriber` with
`ParallelRun` and `Pipeline`, `ServePool` with its ledger. The event loop's processor time and the
audio workers' are waits from the profile. HTTP is not there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache, partial
from heapq import heapify, heapreplace
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np

from cluster.errors import SplitscribeError
from cluster.messages import SAMPLE_RATE, WINDOW_SAMPLES, Role
from cluster.metrics import ROUTER_METRICS, MetricSpec, Recorder
from cluster.model.dims import ModelDims
from cluster.model.encoder_context import EncoderContext
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.planning.profile import AudioProfile
from cluster.planning.scenario import LoadRequest, Traffic
from cluster.planning.simulation.parts import CellParts, Records, as_checkpoint
from cluster.planning.simulation.pools import (
    Choice,
    SimHandle,
    SimPool,
    by_load,
    of_two,
)
from cluster.serve.app import TOLD_WORKERS
from cluster.serve.serve_pool import ServePool
from cluster.serve.worker_choice import WorkLedger
from decoder_worker.sampling.search import Row, StepOutput
from decoder_worker.scheduling.sequence import DecodeSequence
from router.api.params import TranscriptionParams
from router.audio.windows import Window
from router.http.admission import BYTES_PER_AUDIO_S, Admission, telling_waits
from router.interface import DeadlineRule, RequestContext
from router.transcriber import RequestTranscriber

UPLOAD = Path("simulated")
LANGUAGE = "en"
RETRIES = "splitscribe_window_retries_total"


@dataclass(frozen=True, slots=True)
class _Retries:
    """Counts the pipeline's retries; all other metrics of the router are let go."""

    spec: MetricSpec
    records: Records

    def inc(self, value: float, tags: Any = None) -> None:
        if self.spec.name == RETRIES and tags:
            reason = tags["reason"]
            self.records.retries[reason] = self.records.retries.get(reason, 0) + 1

    def set(self, value: float, tags: Any = None) -> None:
        """Nobody looks at it."""

    observe = set


class SimRouter:
    """One replica of the router."""

    def __init__(
        self,
        cell: CellParts,
        pools: dict[Role, SimPool],
        records: Records,
        *,
        colocated: bool,
        language_known: bool,
    ) -> None:
        settings = cell.settings.router
        self.admission = Admission(settings.max_pending_audio_s, cell.clock.monotonic)
        self.cpu = Server(1)
        self.audio = SimAudio(cell.profile.audio, settings.audio_workers, cell.traffic)
        self._cell = cell
        self._records = records
        self._deadline = DeadlineRule(
            settings.min_deadline_s, settings.deadline_factor, settings.max_deadline_s
        )
        self._params = TranscriptionParams("whisper-1", LANGUAGE if language_known else None)
        self._loop = asyncio.get_running_loop()
        ledger = WorkLedger()
        self.handles = {
            role: _handle(pool, role, ledger, cell, colocated=colocated)
            for role, pool in pools.items()
        }
        dims: ModelDims = as_checkpoint(cell.profile).dims
        audio: Any = self.audio
        self._transcriber = RequestTranscriber(
            audio,
            ServePool(self.handles["encoder"], "encoder", ledger),
            ServePool(self.handles["decoder"], "decoder", ledger),
            cell.tokenizer,
            settings,
            Recorder(ROUTER_METRICS, partial(_Retries, records=records)),
            dims=dims,
            context=_context(cell),
            clock=cell.clock,
            reuses_kv=False,  # every request's audio is its own
        )

    async def answer(self, request: LoadRequest) -> None:
        """One request, from its arrival to its answer or its error."""
        try:
            await self._transcribe(request)
        except SplitscribeError as error:
            reason = f"{error.status} {error.code or type(error).__name__}"
            self._records.failed(request.priority, self._loop.time(), reason)
        else:
            latency_s = self._loop.time() - request.at_s
            self._records.answered(request.priority, request.at_s, request.audio_s, latency_s)

    async def _transcribe(self, request: LoadRequest) -> None:
        cell, costs = self._cell, self._cell.profile.router
        cpu_s = costs.request_s + costs.window_s * len(request.cuts_s)
        with self.admission.admit(round(request.audio_s * BYTES_PER_AUDIO_S)) as share:
            await self._work(cpu_s / 2)  # a half of it before the answer is known, and a half after
            context = RequestContext(
                request.name,
                share,
                self._deadline,
                cell.clock,
                priority=request.priority,
            )
            cell.traffic.requests[request.name] = request
            try:
                work = self._transcriber.transcribe(UPLOAD, self._params, context)
                await telling_waits(share, context, work)
            finally:
                del cell.traffic.requests[request.name]
            await self._work(cpu_s / 2)

    async def _work(self, seconds: float) -> None:
        now_s = self._loop.time()
        await asyncio.sleep(self.cpu.take(now_s, seconds) - now_s)


def _context(cell: CellParts) -> EncoderContext | None:
    """By which windows are trimmed: only where the settings ask for it."""
    encoder = cell.settings.encoder
    if encoder.context != "trimmed":
        return None
    usual = EncoderContext()
    slack, longest_s = encoder.context_slack, encoder.context_max_s
    return EncoderContext(
        usual.slack if slack is None else slack,
        usual.max_content_s if longest_s is None else longest_s,
    )


def _handle(
    pool: SimPool, role: Role, ledger: WorkLedger, cell: CellParts, *, colocated: bool
) -> SimHandle:
    if colocated:
        return SimHandle(pool, role, of_two(cell.random), None)
    most = max(len(pool.replicas), getattr(cell.settings, role).most)
    choice = Choice(ledger, cell.random, cell.clock.monotonic, asks=most > TOLD_WORKERS)
    return SimHandle(pool, role, by_load(choice), choice)


_SILENCE = np.zeros(WINDOW_SAMPLES, np.int16)
_SILENCE.flags.writeable = False


class Server:
    """Processes that work on what comes, first come first served. busy_s: of all of them."""

    def __init__(self, n_processes: int) -> None:
        self.busy_s = 0.0
        self._free_at_s = [0.0] * n_processes
        heapify(self._free_at_s)

    def take(self, now_s: float, seconds: float) -> float:
        """When work that comes now is done."""
        done_s = max(now_s, self._free_at_s[0]) + seconds
        heapreplace(self._free_at_s, done_s)
        self.busy_s += seconds
        return done_s


class SimStream:
    """In the place of `AudioStream`."""

    def __init__(self, request: LoadRequest, begun_s: float, cpu_s: float, spread_s: float) -> None:
        self.expected_s: float | None = request.audio_s
        self.duration_s = request.audio_s
        self.decode_s = cpu_s
        self._cuts_s = request.cuts_s
        self._begun_s = begun_s
        self._spread_s = spread_s
        self._next = 0
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Window:
        """A window is found when the audio is decoded so far."""
        index = self._next
        if index == len(self._cuts_s):
            raise StopAsyncIteration
        self._next += 1
        start_s = self._cuts_s[index - 1] if index else 0.0
        end_s = self._cuts_s[index]
        found_s = self._begun_s + self._spread_s * end_s / self.duration_s
        wait_s = found_s - self._loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        first, last = round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE)
        return Window(index, first, _SILENCE[: max(1, last - first)])


class SimAudio:
    """In the place of `AudioPool`."""

    def __init__(self, profile: AudioProfile, n_workers: int, traffic: Traffic) -> None:
        self.server = Server(n_workers)
        self._profile = profile
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()

    def open(self, upload: Path, *, request_id: str, **_: Any) -> SimStream:
        """The upload waits for a worker, which then decodes it from its beginning to its end."""
        request = self._traffic.requests[request_id]
        spread_s = self._profile.audio_second_s * request.audio_s
        cpu_s = self._profile.request_s + spread_s
        done_s = self.server.take(self._loop.time(), cpu_s)
        return SimStream(request, done_s - spread_s, cpu_s, spread_s)


LOGPROB = -0.1
LANGUAGE = "en"
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
N_WORDS, LONGEST_WORD = 400, 4  # a window has at most 224 tokens; syllables
MEL_PER_STEP = 2  # mel frames in a timestamp's step of 20 ms


@cache
def _words() -> str:
    """Made-up words, the same ones each time."""
    chance = Random(0)

    def word() -> str:
        syllables = chance.randint(1, LONGEST_WORD)
        return "".join(chance.choice(CONSONANTS) + chance.choice(VOWELS) for _ in range(syllables))

    return "".join(f" {word()}" for _ in range(N_WORDS))


class Texts:
    """What each row of one decoder gets next."""

    def __init__(self, tokenizer: WhisperTokenizer, traffic: Traffic) -> None:
        self._traffic = traffic
        self._n_tokens: dict[int, int] = {}  # of the sequence that holds a slot
        special = tokenizer.special
        language = special.languages.get(LANGUAGE, special.eot)
        self.language = StepOutput(language, LOGPROB)
        self._begin = StepOutput(special.timestamp_begin, LOGPROB)
        self._end = StepOutput(special.eot, LOGPROB)
        self._words = [StepOutput(token, LOGPROB) for token in tokenizer.encode(_words())]
        self._stamps = [StepOutput(special.timestamp_begin + n, LOGPROB) for n in range(1501)]

    def next_output(self, sequence: DecodeSequence, row: Row) -> StepOutput:
        """One of `n_tokens` in all, or the end behind them."""
        n_given, slot = len(row.tokens), sequence.rows[0].slot
        if n_given == 0:
            request = sequence.request
            n_text = self._traffic.tokens_of(request.request_id, request.content_frames)
            self._n_tokens[slot] = min(n_text, sequence.n_new_max)
        n_tokens = self._n_tokens[slot]
        if n_given >= n_tokens:
            return self._end
        if n_given == 0:
            return self._begin
        if n_given == n_tokens - 1:
            return self._stamps[sequence.request.content_frames // MEL_PER_STEP]
        return self._words[n_given % len(self._words)]
