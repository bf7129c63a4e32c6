"""One window being decoded: what was asked, where it stands, and what it holds.

Its rows are the hypotheses that grow side by side; they share the window's cross-attention pages.
States, in order: WAITING (its handle is accepted, no page held) -> LOADING (pages reserved, its KV
in flight or arrived, no rows yet) -> RUNNING (in the batch) -> FINISHED (nothing held). It may
finish from any of them. Only the engine's thread changes a sequence.

After an attempt, whether another temperature is tried and which one stands is openai/whisper's
fallback (`transcribe.py`), with faster-whisper's choice among failed attempts as a setting. Where
the encoder's context was trimmed, a greedy attempt that fails asks for the full one instead.
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

    language: the code asked for; None until the runner detected it, and then `language_logprob` is
        its log probability among all languages.
    cross_pages, landing_pages: set by the scheduler at admission; rows: when it begins to run. All
        are taken back by its `release`; landing pages once their states are projected.
    reading: a READ may still write to its pages, which stay held while it is True.
    fetched: set by the engine when the READ ended well.
    search: the attempt that runs; attempts: those that ended.
    n_in_flight: launches whose results the loop has not taken; until there is none, kernels may
        write to its pages, so they stay held. n_ahead: those of them that the attempt is in.
    resolved: its caller has an answer, or left. Set by the future on whichever thread ends it: to
        ask the future itself would take a lock for each row of each step.
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
        # Weak, or future and sequence would hold each other until Python looks for circles.
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
        """What the READ writes to: landing pages for states, else its cross-attention pages."""
        return self.landing_pages or self.cross_pages

    def forget_fetched(self) -> None:
        """The importer quarantined what the READ writes to, and gives it back itself."""
        if self.landing_pages:
            self.landing_pages = ()
        else:
            self.cross_pages = ()

    @property
    def live(self) -> list[Row]:
        """The rows that the next step feeds."""
        assert self.search is not None
        return self.search.live

    @property
    def runs_ahead(self) -> bool:
        """A step may be launched for it before the last one's outcome is known."""
        assert self.search is not None
        return self.search.runs_ahead

    @property
    def can_step(self) -> bool:
        """Its attempt goes on, as far as the host can tell."""
        search = self.search  # asked for each sequence of each step, so by as few calls as can be
        if self.resolved or search is None or search.done:
            return False
        if not self.n_ahead:
            return True
        return search.runs_ahead and len(search.live[0].tokens) + self.n_ahead < self.n_new_max

    @property
    def lacks_language(self) -> bool:
        """It runs, and nobody knows its language yet."""
        is_open = self.state is SequenceState.RUNNING and not self.resolved
        return is_open and self.search is None and self.language is None

    @property
    def temperature(self) -> float:
        return self.options.temperatures[len(self.attempts)]

    def n_cached(self, row: Row) -> int:
        """Positions whose self-attention KV is written, while RUNNING: all but the last token."""
        return len(self.prompt.tokens) + len(row.tokens) - 1

    def begin_attempt(self, eot: int) -> None:
        """Start the next temperature's search with empty rows."""
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
        """What the rules take for sampled: the prefix, and the tokens that the row has sampled."""
        return (*self.options.prefix_tokens, *row.tokens)


def _resolve(known: ref[DecodeSequence], _: Future[DecodeResult]) -> None:
    if (sequence := known()) is not None:
        sequence.resolved = True


def given_attempt(tokens: tuple[int, ...], logprob: float = 0.0) -> Attempt:
    """What counts as an attempt where nothing is sampled: a known text, or a language alone."""
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
    """Whether the last attempt, from a trimmed context, asks for the full one.

    Where it fails by the usual gates, or where it has a timestamp past the audio: a decoder that
    misses the rest of the padding tends to say the last sentence once more, and stamps it there. A
    text that would be left out as silence is doubted too, so that no speech is lost to a short
    context alone. A sampled text fails the gates by the dice of its own temperature, so for it they
    lead to the next temperature as ever.
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
    """Whether the last attempt passed, or was the last that there is."""
    attempts, options = sequence.attempts, sequence.options
    if len(attempts) >= len(options.temperatures):
        return True
    return not _failed(attempts[-1], options.gates, sequence.no_speech_prob)


def chosen_attempt(sequence: DecodeSequence) -> int:
    """The index of the attempt that stands, of those made."""
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
