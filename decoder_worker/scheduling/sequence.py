"""One window being decoded: its request, its state and what it holds.

WAITING (no page held) -> LOADING (pages reserved, KV in flight or complete, no rows) -> RUNNING (in
the batch) -> FINISHED (nothing held); it may finish from any state. Only the engine's thread
changes a sequence. Temperatures fall back as in openai/whisper's `transcribe.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from weakref import ref

from cluster.common.kv.wire import FetchStats
from cluster.common.messages import (
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    DecodeTimings,
    Priority,
    QualityGates,
    TokenAlignment,
)
from cluster.common.model.encoder_context import positions_of
from cluster.common.model.text.quality import is_silence, needs_fallback, repeats_itself
from decoder_worker.prompts import NO_PROMPT, Prompt
from decoder_worker.sampling.sampler import noise_key
from decoder_worker.sampling.search import BeamSearch, CandidateSearch, Hypothesis, Row, Search
from decoder_worker.sampling.slots import SlotOptions


class SequenceState(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Attempt:
    hypothesis: Hypothesis
    temperature: float
    compression_ratio: float


@dataclass(slots=True, eq=False, weakref_slot=True)
class DecodeSequence:
    """A request's window in this worker. Times are this host's monotonic seconds.

    language: None until it is detected; `language_logprob` is then its log probability among all.
    cross_pages, landing_pages: set by the scheduler at admission, rows when it begins to run. Its
        `release` takes all back; landing pages go once their states are projected.
    reading: a READ may still write to its pages, which stay held while it is True.
    fetched: set by the engine when the READ succeeded.
    search: the attempt that runs; attempts: those that ended.
    n_in_flight: launches whose results were not taken. Until it is 0 kernels may write to its
        pages, so they stay held. n_ahead: those of the current attempt.
    resolved: its caller has an answer, or left. Set by the future on the thread that ends it,
        because asking the future takes a lock for each row of each step.
    """

    request: DecodeRequest
    future: Future[DecodeResult]
    arrived_s: float
    deadline_s: float
    n_new_max: int
    language: str | None
    state: SequenceState = SequenceState.WAITING
    rows: list[Row] = field(default_factory=list)
    cross_pages: tuple[int, ...] = ()
    landing_pages: tuple[int, ...] = ()
    reading: bool = False
    fetched: FetchStats | None = None
    prompt: Prompt = NO_PROMPT
    search: Search | None = None
    attempts: list[Attempt] = field(default_factory=list)
    language_logprob: float = 0.0
    no_speech_prob: float = 0.0
    peaks: tuple[int, ...] | None = None
    alignment: TokenAlignment | None = None
    n_in_flight: int = 0
    n_ahead: int = 0
    steps: int = 0
    load_started: float = 0.0
    loaded: float = 0.0
    prefill_started: float = 0.0
    decode_started: float = 0.0
    resolved: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # Weak, or a reference cycle would keep both until the garbage collector runs.
        self.future.add_done_callback(partial(_resolve, ref(self)))

    def __repr__(self) -> str:
        request = self.request
        return (
            f"DecodeSequence({request.request_id}/{request.window}, {self.state.value}, "
            f"attempt {len(self.attempts)}, {self.steps} steps)"
        )

    @property
    def options(self) -> DecodeOptions:
        return self.request.options

    @property
    def priority(self) -> Priority:
        return self.request.priority

    @property
    def owner(self) -> bytes:
        return self.request.owner

    @property
    def rank(self) -> int:
        return self.request.rank

    @property
    def work(self) -> float:
        return float(self.options.n_rows)

    @property
    def n_positions(self) -> int:
        """Encoder positions that its queries attend to."""
        return self.request.handle.frames

    @property
    def fetched_pages(self) -> tuple[int, ...]:
        """The READ's target: landing pages for states, else cross-attention pages."""
        return self.landing_pages or self.cross_pages

    def forget_fetched(self) -> None:
        """Drop the READ's target, which the importer quarantined and will release itself."""
        if self.landing_pages:
            self.landing_pages = ()
        else:
            self.cross_pages = ()

    @property
    def live(self) -> list[Row]:
        assert self.search is not None
        return self.search.live

    @property
    def runs_ahead(self) -> bool:
        assert self.search is not None
        return self.search.runs_ahead

    @property
    def can_step(self) -> bool:
        """Whether its attempt goes on, as far as the host knows."""
        search = self.search  # called for each sequence of each step: few calls
        if self.resolved or search is None or search.done:
            return False
        if not self.n_ahead:
            return True
        return search.runs_ahead and len(search.live[0].tokens) + self.n_ahead < self.n_new_max

    @property
    def lacks_language(self) -> bool:
        """Whether it runs without a known language."""
        is_open = self.state is SequenceState.RUNNING and not self.resolved
        return is_open and self.search is None and self.language is None

    @property
    def temperature(self) -> float:
        return self.options.temperatures[len(self.attempts)]

    def n_cached(self, row: Row) -> int:
        """Positions with self-attention KV, while RUNNING: all but the last token's."""
        return len(self.prompt.tokens) + len(row.tokens) - 1

    def begin_attempt(self, eot: int) -> None:
        options = self.options
        for row in self.rows:
            row.clear()
        self.n_ahead = 0
        penalty, limit = options.length_penalty, self.n_new_max
        if self.temperature == 0 and options.beam_size > 1:
            beams = self.rows[: options.beam_size]
            self.search = BeamSearch(beams, eot, limit, penalty, options.patience)
        else:
            n_candidates = options.best_of if self.temperature > 0 else 1
            self.search = CandidateSearch(self.rows[:n_candidates], eot, limit, penalty)

    def slot_options(self, row: Row) -> SlotOptions:
        options = self.options
        key = noise_key(options.seed, self.request.window, len(self.attempts), row.candidate)
        limit = len(options.prefix_tokens) + self.n_new_max
        return SlotOptions(options.timestamps, self.temperature, key, limit)

    def sampled(self, row: Row) -> tuple[int, ...]:
        """The tokens that the rules take as sampled: the prefix, and the row's own."""
        return (*self.options.prefix_tokens, *row.tokens)


def _resolve(known: ref[DecodeSequence], _: Future[DecodeResult]) -> None:
    if (sequence := known()) is not None:
        sequence.resolved = True


def given_attempt(tokens: tuple[int, ...], logprob: float = 0.0) -> Attempt:
    """An attempt without sampling: of a known text, or for a language alone."""
    return Attempt(Hypothesis(tokens, (0.0,) * len(tokens), logprob, True), 0.0, 0.0)


def finished_result(sequence: DecodeSequence, now: float, *, doubted: bool = False) -> DecodeResult:
    assert sequence.language is not None
    index = chosen_attempt(sequence)
    attempt = sequence.attempts[index]
    hypothesis = attempt.hypothesis
    return DecodeResult(
        request_id=sequence.request.request_id,
        window=sequence.request.window,
        tokens=hypothesis.tokens,
        token_logprobs=hypothesis.logprobs,
        avg_logprob=hypothesis.avg_logprob,
        no_speech_prob=sequence.no_speech_prob,
        language=sequence.language,
        temperature=attempt.temperature,
        finish_reason="stop" if hypothesis.ended else "length",
        timings=_timings(sequence, now),
        compression_ratio=attempt.compression_ratio,
        attempt=index,
        alignment=sequence.alignment,
        doubted=doubted,
        peak_positions=sequence.peaks,
    )


def _timings(sequence: DecodeSequence, now: float) -> DecodeTimings:
    assert sequence.fetched is not None
    fetched = sequence.fetched
    prefill_started = sequence.prefill_started or now
    decode_started = sequence.decode_started or now
    return DecodeTimings(
        queue_s=sequence.load_started - sequence.arrived_s,
        transfer_s=fetched.seconds,
        transfer_bytes=fetched.n_bytes,
        transport=fetched.transport,
        prefill_s=decode_started - prefill_started,
        decode_s=now - decode_started,
        steps=sequence.steps,
        batch_wait_s=prefill_started - sequence.loaded,
    )


def is_doubted(sequence: DecodeSequence, timestamp_begin: int) -> bool:
    """Whether the last attempt, from a trimmed context, is to be repeated with the full one.

    It is if it has a timestamp past the audio (a decoder that misses the padding tends to repeat
    the last sentence there), if it would be left out as silence, or if it is greedy and fails the
    gates. A sampled attempt that fails them leads to the next temperature.
    """
    attempt = sequence.attempts[-1]
    last = timestamp_begin + positions_of(sequence.request.content_frames)
    if any(token > last for token in attempt.hypothesis.tokens):
        return True
    gates, avg_logprob = sequence.options.gates, attempt.hypothesis.avg_logprob
    is_greedy = attempt.temperature == 0.0
    return (is_greedy and _failed(attempt, gates, no_speech_prob=0.0)) or is_silence(
        gates, avg_logprob, sequence.no_speech_prob
    )


def is_final(sequence: DecodeSequence) -> bool:
    attempts, options = sequence.attempts, sequence.options
    if len(attempts) >= len(options.temperatures):
        return True
    return not _failed(attempts[-1], options.gates, sequence.no_speech_prob)


def chosen_attempt(sequence: DecodeSequence) -> int:
    """The index of the attempt that counts, among those made."""
    attempts, gates = sequence.attempts, sequence.options.gates
    last = len(attempts) - 1
    if gates.keep == "last" or not _failed(attempts[last], gates, sequence.no_speech_prob):
        return last
    return _best(attempts, gates)


def _failed(attempt: Attempt, gates: QualityGates, no_speech_prob: float) -> bool:
    return needs_fallback(
        gates, attempt.compression_ratio, attempt.hypothesis.avg_logprob, no_speech_prob
    )


def _best(attempts: Sequence[Attempt], gates: QualityGates) -> int:
    varied = [i for i, a in enumerate(attempts) if not repeats_itself(gates, a.compression_ratio)]
    return max(varied or range(len(attempts)), key=lambda i: attempts[i].hypothesis.avg_logprob)
