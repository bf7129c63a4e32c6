"""One window's way through a decoder: the request with its options, tokens, and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cluster.common.messages.audio import WINDOW_FRAMES
from cluster.common.messages.encode import CrossKVHandle
from cluster.common.messages.load import WorkerLoad
from cluster.common.messages.shared import FinishReason, Location, Priority, Task


@dataclass(frozen=True, slots=True)
class QualityGates:
    """When an attempt at a window has failed, and when a window holds no speech.

    The thresholds are openai/whisper's; None turns one off. An attempt fails when its text
    repeats itself (compression_ratio above) or the model is unsure of it (avg_logprob below),
    unless that is because nobody speaks (no_speech_prob above).

    keep: what stands when every temperature failed: the last attempt, as openai/whisper has it,
        or the one with the best avg_logprob among those that do not repeat themselves.
    """

    compression_ratio: float | None = 2.4
    avg_logprob: float | None = -1.0
    no_speech_prob: float | None = 0.6
    keep: Literal["last", "best"] = "last"


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How to decode one window.

    language: code such as "en", or None to detect it in the same decode.
    timestamps: decode with timestamp tokens (segments) or with <|notimestamps|>.
    prompt_tokens: text tokens of earlier context, without the <|startofprev|> token.
    temperatures: tried in order, from KV that is already there, until an attempt passes `gates`.
        0 is greedy, or beam search; above it, sampled with noise that is a function of `seed`.
    beam_size, patience: at temperature 0. best_of: candidates above it.
    length_penalty: ranks finished candidates by Google's formula; None: by their mean.
    max_new_tokens: None means what the text context leaves (at most half of it).
    words: align the text's tokens with the audio.
    detect_only: answer with the language, without text.
    prefix_tokens: tokens that the window's text, with its timestamps, is forced to begin with. They
        follow the start sequence and run with it in one forward. To the rules of sampling they are
        tokens that were sampled; they are neither scored nor part of the result.
    peaks: tell where in the audio each sampled token was looking (`DecodeResult.peak_positions`).
    """

    language: str | None = None
    task: Task = "transcribe"
    timestamps: bool = True
    prompt_tokens: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    max_new_tokens: int | None = None
    beam_size: int = 1
    patience: float = 1.0
    best_of: int = 1
    length_penalty: float | None = None
    gates: QualityGates = QualityGates()
    words: bool = False
    detect_only: bool = False
    prefix_tokens: tuple[int, ...] = ()
    peaks: bool = False

    @property
    def n_rows(self) -> int:
        """Hypotheses that are decoded side by side at most."""
        if self.beam_size == 1 and self.best_of == 1:
            return 1
        beams = self.beam_size if 0.0 in self.temperatures else 1
        candidates = self.best_of if any(t > 0 for t in self.temperatures) else 1
        return max(1, beams, candidates)


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One window's KV handle and options on its way to a decoder.

    content_frames: mel frames of the window that are audio and not padding, 1 to 3000.
    traceparent: as in `EncodeRequest`.
    kv_location: where the KV is, for whoever chooses a decoder; `handle` is the right to read it.
    priority: as in `EncodeRequest`.
    """

    request_id: str
    window: int
    attempt: int
    handle: CrossKVHandle
    options: DecodeOptions
    remaining_s: float
    content_frames: int = WINDOW_FRAMES
    traceparent: str = ""
    kv_location: Location = Location()
    priority: Priority = "interactive"


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """Where a decoder spent a sequence's time.

    queue_s: until it had pages. batch_wait_s: from the arrival of its KV until its prompt was run,
        mostly for rows of a full batch.
    decode_s: from the first token to the answer: `steps` decode steps, prompts of later
        temperatures, and the alignment of words.
    """

    queue_s: float
    transfer_s: float
    transfer_bytes: int
    transport: str
    prefill_s: float
    decode_s: float
    steps: int
    batch_wait_s: float = 0.0

    @property
    def waited_s(self) -> float:
        """For pages and for rows."""
        return self.queue_s + self.batch_wait_s


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token on its way to a client that wants each at once. End-of-text is never sent.

    no_speech_prob: the window's, as in `DecodeResult`.
    """

    token: int
    logprob: float
    no_speech_prob: float


OnToken = Callable[[SampledToken], None]


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """When the text tokens of a window's segments are spoken (openai/whisper's `timing.py`).

    tokens: the n text tokens that were aligned, in order: those of all segments of the window,
        with a prefix's.
    times_s: n + 1 seconds from the window's start: token i is spoken from times_s[i] on, and the
        last one ends at times_s[n].
    probs: n probabilities of the tokens, each given those before it.
    """

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """A finished sequence: of all attempts, the one that stands.

    tokens: what was sampled after the prompt and a prefix, text and timestamp tokens, without
        end-of-text.
    token_logprobs: log probability of each of `tokens` after the logit rules.
    avg_logprob: sum of log probabilities (end-of-text included) over len(tokens) + 1; with
        `detect_only` the log probability of the language among all languages.
    no_speech_prob: probability of the no-speech token at the start-of-transcript position.
    temperature: of the attempt that stands, which was number `attempt` (from 0) of those at rising
        temperatures.
    compression_ratio: of the attempt's text, with its prefix.
    alignment: None unless it was asked for and there is text.
    doubted: its encoder context was trimmed, and the first attempt is not to be trusted: the window
        is to be encoded in full. Later temperatures were not tried, and words not aligned.
    peak_positions: for each of `tokens` the encoder position of 20 ms, from the window's start, at
        which the alignment heads looked most when it was predicted: the largest mean of their
        cross-attention. None unless they were asked for.
    load: the worker's, beside this sequence; None from an engine without a pool.
    """

    request_id: str
    window: int
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    avg_logprob: float
    no_speech_prob: float
    language: str
    temperature: float
    finish_reason: FinishReason
    timings: DecodeTimings
    compression_ratio: float = 0.0
    attempt: int = 0
    alignment: TokenAlignment | None = None
    doubted: bool = False
    peak_positions: tuple[int, ...] | None = None
    load: WorkerLoad | None = None
