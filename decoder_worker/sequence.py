"""One window being decoded: what was asked, where it stands, and what it holds.

Its rows are the hypotheses that grow side by side; they share the window's cross-attention pages.
Attempts follow one another, a temperature each, from the same pages, until one is good enough.

States, in order: WAITING (its handle is accepted, no page held) -> LOADING (pages reserved, its
KV in flight or arrived, no rows yet) -> RUNNING (in the batch) -> FINISHED (nothing held). It may
finish from any of them. Only the engine's thread changes a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from cluster.errors import UnsupportedValueError
from cluster.kv.pool import PagePool
from cluster.kv.transfer_config import FetchStats
from cluster.messages import (
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    SampledToken,
    TokenAlignment,
)
from cluster.model.dims import ModelDims
from cluster.model.tokenizer import WhisperTokenizer
from decoder_worker.sampling.noise import noise_key
from decoder_worker.sampling.search import BeamSearch, CandidateSearch, Hypothesis, Row, Search
from decoder_worker.sampling.slots import SlotOptions

SOT_TOKENS = 3  # start of transcript, language, task: the longest start sequence


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens before the first sampled one; `sot` is where `<|startoftranscript|>` stands."""

    tokens: tuple[int, ...]
    sot: int


class SequenceState(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One temperature's outcome."""

    hypothesis: Hypothesis
    temperature: float
    compression_ratio: float


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A request's window in this worker. Times are this host's monotonic seconds.

    language: the code asked for; None until the runner detected it, and then `language_logprob` is
        its log probability among all languages.
    n_new_max: tokens that may be sampled.
    on_token: called with each token as it is sampled, on the engine's thread; None: no caller
        wants them.
    landing_pool: where its encoder states land; None where its KV itself travels.
    cross_pages, landing_pages: set by the scheduler at admission; rows: when it begins to run. All
        are taken back by its `release`; landing pages once their states are projected.
    reading: a READ may still write to its pages, which stay held while it is True.
    fetched: set by the engine when the READ ended well.
    prompt: set by the engine when the language is known.
    search: the attempt that runs; attempts: those that ended.
    n_in_flight: launches whose results the loop has not taken; until there is none, kernels may
        write to its pages, so they stay held. n_ahead: those of them that the attempt is in.
    """

    request: DecodeRequest
    future: Future[DecodeResult]
    arrived: float
    deadline: float
    n_new_max: int
    language: str | None
    on_token: Callable[[SampledToken], None] | None = None
    state: SequenceState = SequenceState.WAITING
    rows: list[Row] = field(default_factory=list)
    landing_pool: PagePool | None = None
    cross_pages: tuple[int, ...] = ()
    landing_pages: tuple[int, ...] = ()
    reading: bool = False
    fetched: FetchStats | None = None
    prompt: Prompt = Prompt((), 0)
    search: Search | None = None
    attempts: list[Attempt] = field(default_factory=list)
    language_logprob: float = 0.0
    no_speech_prob: float = 0.0
    alignment: TokenAlignment | None = None
    n_in_flight: int = 0
    n_ahead: int = 0
    steps: int = 0
    load_started: float = 0.0
    loaded: float = 0.0
    prefill_started: float = 0.0
    decode_started: float = 0.0

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
    def n_positions(self) -> int:
        """Encoder positions that its queries attend to."""
        return self.request.handle.frames

    @property
    def fetched_pages(self) -> tuple[int, ...]:
        """What the READ writes to: landing pages for states, else its cross-attention pages."""
        return self.cross_pages if self.landing_pool is None else self.landing_pages

    def forget_fetched(self) -> None:
        """The importer quarantined what the READ writes to, and gives it back itself."""
        if self.landing_pool is None:
            self.cross_pages = ()
        else:
            self.landing_pages = ()

    @property
    def resolved(self) -> bool:
        """Its caller has an answer, or left."""
        return self.future.done()

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
        if self.resolved or self.search is None or self.search.done:
            return False
        if not self.n_ahead:
            return True
        return self.runs_ahead and len(self.live[0].tokens) + self.n_ahead < self.n_new_max

    @property
    def lacks_language(self) -> bool:
        """It runs, and nobody knows its language yet."""
        is_open = self.state is SequenceState.RUNNING and not self.resolved
        return is_open and self.search is None and self.language is None

    @property
    def temperature(self) -> float:
        """Of the attempt that runs."""
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
        return SlotOptions(options.timestamps, self.temperature, key, self.n_new_max)


class PromptBuilder:
    """Checks requests against the checkpoint, and writes the tokens that a decode begins with."""

    def __init__(self, tokenizer: WhisperTokenizer, dims: ModelDims) -> None:
        self._tokenizer = tokenizer
        self._dims = dims

    @property
    def eot(self) -> int:
        return self._tokenizer.special.eot

    @property
    def timestamp_begin(self) -> int:
        return self._tokenizer.special.timestamp_begin

    def language_of(self, token: int) -> str | None:
        return self._tokenizer.language_of(token)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, as openai/whisper measures its compression."""
        return self._tokenizer.decode_with_names(tokens).strip()

    def check(self, options: DecodeOptions) -> None:
        """Raise UnsupportedValueError, naming the field, when the model cannot do this."""
        language = options.language or self.any_language
        self._tokenizer.sot_sequence(language, options.task, options.timestamps)
        n_vocab = self._tokenizer.n_vocab
        wrong = [token for token in options.prompt_tokens if not 0 <= token < n_vocab]
        if wrong:
            raise UnsupportedValueError(
                f"prompt token {wrong[0]} is not in the vocabulary of {n_vocab}", param="prompt"
            )
        if not options.temperatures or not all(0.0 <= t < inf for t in options.temperatures):
            raise UnsupportedValueError(
                f"temperatures must be 0 or above, got {options.temperatures}", param="temperature"
            )
        for name in ("beam_size", "best_of"):
            if getattr(options, name) < 1:
                raise UnsupportedValueError(
                    f"{name} must be at least 1, got {getattr(options, name)}", param=name
                )
        if not 0 < options.patience < inf:
            raise UnsupportedValueError(
                f"patience must be above 0, got {options.patience}", param="patience"
            )
        if options.max_new_tokens is not None and options.max_new_tokens < 1:
            raise UnsupportedValueError(
                f"max_new_tokens must be at least 1, got {options.max_new_tokens}"
            )

    def known_language(self, options: DecodeOptions) -> str | None:
        """What need not be detected: the language asked for, or the only one there is."""
        if options.language is None and not self._tokenizer.is_multilingual:
            return self.any_language
        return options.language

    def n_new_max(self, options: DecodeOptions) -> int:
        """Tokens that may be sampled; the last one is never fed, so it needs no position."""
        prompt = self.prompt(options, options.language or self.any_language)
        wanted = options.max_new_tokens or self._dims.n_text_ctx // 2
        if options.words:
            # Their alignment feeds them between a start sequence, <|notimestamps|> and the end.
            wanted = min(wanted, self._dims.n_text_ctx - SOT_TOKENS - 2)
        return min(wanted, self._dims.n_text_ctx + 1 - len(prompt.tokens))

    def prompt(self, options: DecodeOptions, language: str) -> Prompt:
        """Earlier context (its last 223 tokens of 448 positions), then the start sequence."""
        start = self._tokenizer.sot_sequence(language, options.task, options.timestamps)
        if not options.prompt_tokens:
            return Prompt(start, sot=0)
        n_context = self._dims.n_text_ctx // 2 - 1
        context = options.prompt_tokens[-n_context:]
        before = (self._tokenizer.special.sot_prev, *context)
        return Prompt((*before, *start), sot=len(before))

    @property
    def any_language(self) -> str:
        return self._tokenizer.languages[0]
