"""Every dataclass that crosses a process boundary. No torch, no behaviour beyond checks.

Times that cross hosts are remaining seconds: each receiver turns them into a deadline on its own
monotonic clock on arrival.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # the command line has this module, and no use for NumPy
    import numpy as np
    from numpy.typing import NDArray

SAMPLE_RATE = 16_000  # Hz, what every Whisper checkpoint takes
WINDOW_S = 30  # seconds in one encoder window
WINDOW_SAMPLES = WINDOW_S * SAMPLE_RATE  # 480000 samples
HOP_LENGTH = 160  # samples from one mel frame to the next, 10 ms
FRAMES_PER_S = SAMPLE_RATE // HOP_LENGTH  # 100 mel frames
WINDOW_FRAMES = WINDOW_SAMPLES // HOP_LENGTH  # 3000 mel frames in a window
WINDOW_POSITIONS = WINDOW_FRAMES // 2  # 1500 encoder positions of 20 ms
MEL_CONTEXT_SAMPLES = 2 * HOP_LENGTH  # an n_fft of 400 looks 200 samples to each side
Pcm: TypeAlias = "NDArray[np.int16]"  # [n_samples], mono at SAMPLE_RATE
Role = Literal["encoder", "decoder"]
ROLES: tuple[Role, ...] = ("encoder", "decoder")
Task = Literal["transcribe", "translate"]
FinishReason = Literal["stop", "length"]
Payload = Literal["cross_kv", "encoder_states"]  # what an encoder hands to a decoder
# How urgent a window is, the most urgent first; "later" are those of interactive requests that are
# longer than one window.
Priority = Literal["live", "interactive", "later", "bulk"]


@dataclass(frozen=True, slots=True)
class FileMel:
    """What makes a window's log-mel a slice of its whole file's, as openai/whisper computes it.

    n_before: samples of `pcm` in front of the window's own, a multiple of the hop: true audio, so
        that no frame sees an edge; 0 at the file's start. Where samples behind end, the file does.
    n_frames: mel frames of the window, 1 to 3000. All later frames are 0.0 after scaling, which
        is no silence, but what openai/whisper pads with.
    log_max: largest log10 of the file's mel power; what is 8 below it is cut.
    """

    n_before: int
    n_frames: int
    log_max: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's state, for /health."""

    replica: str
    role: Role
    healthy: bool
    model: str
    transport: str
    device: str
    pages_free: int
    pages_total: int
    queued: int
    running: int
    extra: dict[str, float] = field(default_factory=dict)
    of_workers: int = 0  # of its pool, where some were asked
    turned_off: dict[str, str] = field(default_factory=dict)  # what fails on its GPU, and why


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of itself with each answer, for the choice of a worker.

    work: windows in an encoder (a trimmed one counts by its share of a window's positions),
        hypotheses in a decoder, waiting ones included.
    """

    work: float = 0.0
    capacity: float = 0.0  # of them that it works on at once; 0: not known
    window_s: float = 0.0  # for one window of all positions; 0: none yet, or a decoder


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """What both roles are told of a window: whose it is, and when it is its turn.

    attempt: number of its encode among all of the request's windows, from 1 on: unique within the
        request, and passed on with the handle. A decoder's attempts at temperatures are others.
    key: of the request, as no other's is, whatever its client calls it in `request_id`. Empty: that
        is unique.
    unwell: Serve's id of a worker that failed windows which others then did; empty: of none. Who
        reads it of itself is to be replaced.
    """

    request_id: str
    window: int
    attempt: int
    _: KW_ONLY
    traceparent: str = ""  # W3C Trace Context; empty where nothing is traced
    priority: Priority = "interactive"
    key: str = ""
    owner: bytes = b""  # as in `common.fair_order`
    rank: int = 0
    sender: str = ""  # as in `common.signals`
    backlog: float = 0.0
    unwell: str = ""
    tries: int = 1  # of this window, this one included


@dataclass(frozen=True, slots=True)
class EncodeRequest(WindowRequest):
    """One window of audio on its way to an encoder.

    pcm: int16 [n_samples], 16 kHz mono, 1 <= n_samples <= WINDOW_SAMPLES (unpadded); with
        `file_mel` its context comes on top, at most MEL_CONTEXT_SAMPLES on each side.
    context: encoder positions of 20 ms to compute, from the window's start on; 0 means all that the
        checkpoint has (1500). A batch holds windows of one context.
    audio_key: names `pcm` and `file_mel` for whoever sent them: equal for the same audio of the
        same owner, and nothing that another owner could make. Empty: its KV is not kept for reuse.
    """

    pcm: Pcm
    remaining_s: float
    file_mel: FileMel | None = None
    context: int = 0
    audio_key: bytes = b""
    fresh: bool = False  # encode it even if its KV is kept, which could not be used

    @property
    def n_samples(self) -> int:
        return int(self.pcm.shape[0])

    @property
    def work(self) -> float:
        return work_of(self.context)

    @property
    def kept_key(self) -> bytes:
        return kept_key(self.audio_key, self.context)


def work_of(context: int) -> float:
    """What so many encoder positions cost, in windows of all positions; 0 positions are all."""
    return context / WINDOW_POSITIONS if context else 1.0


def kept_key(audio_key: bytes, context: int) -> bytes:
    """Names the KV of a window: its audio, in its context; empty where the audio has no key."""
    return audio_key and audio_key + context.to_bytes(2, "big")


@dataclass(frozen=True, slots=True)
class CrossKVHandle:
    """The right to read what an encoder published of one window: KV, or states to project it from.

    Everything in it is untrusted until `signature` has been checked against the cluster's key.
    """

    request_id: str
    window: int
    attempt: int
    agent: str  # the exporter's transfer agent
    metadata: bytes  # its connection data
    layout_hash: str  # of the exporter's pool
    addresses: tuple[int, ...]  # of each page's first byte, in frame order
    page_bytes: int
    frames: int  # that cross-attention attends to: 1500, fewer in a trimmed context
    counter_address: int  # of the lease's 64-bit generation counter, in host memory
    generation: int  # that the counter must still have after the payload was read
    lease: str  # nonce that names the lease in notifications
    remaining_s: float  # of the lease when the handle was made
    payload: Payload = "cross_kv"
    signature: bytes = b""  # HMAC-SHA256 over all other fields


@dataclass(frozen=True, slots=True)
class EncodeTimings:
    """Where an encoder spent a window's time."""

    queue_s: float
    encode_s: float
    batch_size: int  # 0: it was not encoded


@dataclass(frozen=True, slots=True)
class EncodeReply:
    """What an encoder answers: the handle, where the time went, and where the KV is.

    reused: whether the KV was there already, or came with that of another request's same window;
        None where nothing is kept for reuse.
    """

    handle: CrossKVHandle
    timings: EncodeTimings
    node: str = ""  # Ray's id
    reused: bool | None = None
    load: WorkerLoad | None = None  # beside this window; None from an engine without a pool


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

    temperatures: tried in order, from KV that is already there, until an attempt passes `gates`.
        0 is greedy, or beam search; above it, sampled with noise that is a function of `seed`.
    prefix_tokens: tokens that the window's text, with its timestamps, is forced to begin with. To
        the rules of sampling they were sampled; they are neither scored nor part of the result.
    known_text: text tokens that are said in the window: they are aligned, in place of any that
        would be sampled; with `words` and a language, and without all that asks for a text.
    """

    language: str | None = None  # code such as "en"; None: detected in the same decode
    languages: tuple[str, ...] = ()  # among which it is detected; none: all
    task: Task = "transcribe"
    timestamps: bool = True  # else <|notimestamps|>
    prompt_tokens: tuple[int, ...] = ()  # of earlier context, without <|startofprev|>
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    max_new_tokens: int | None = None  # None: what the text context leaves, at most half of it
    beam_size: int = 1  # at temperature 0
    patience: float = 1.0
    best_of: int = 1  # candidates at temperatures above 0
    length_penalty: float | None = None  # of Google's formula; None: candidates rank by their mean
    gates: QualityGates = QualityGates()
    words: bool = False  # align the text's tokens with the audio
    detect_only: bool = False  # answer with the language, without text
    prefix_tokens: tuple[int, ...] = ()
    peaks: bool = False  # fill in `DecodeResult.peak_positions`
    known_text: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        """Hypotheses that are decoded side by side at most."""
        if self.beam_size == 1 and self.best_of == 1:
            return 1
        beams = self.beam_size if 0.0 in self.temperatures else 1
        candidates = self.best_of if any(t > 0 for t in self.temperatures) else 1
        return max(1, beams, candidates)


@dataclass(frozen=True, slots=True)
class DecodeRequest(WindowRequest):
    """One window's KV handle and options on its way to a decoder."""

    handle: CrossKVHandle
    options: DecodeOptions
    remaining_s: float
    content_frames: int = WINDOW_FRAMES  # mel frames that are audio and not padding, 1 to 3000
    kv_node: str = ""  # for whoever chooses a decoder


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """Where a decoder spent a sequence's time.

    batch_wait_s: from the arrival of its KV until its prompt was run, mostly for rows of a full
        batch. decode_s: from the first token to the answer: `steps` decode steps, prompts of later
        temperatures, and the alignment of words.
    """

    queue_s: float  # until it had pages
    transfer_s: float
    transfer_bytes: int
    transport: str
    prefill_s: float
    decode_s: float
    steps: int
    batch_wait_s: float = 0.0

    @property
    def waited_s(self) -> float:
        return self.queue_s + self.batch_wait_s


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """When the text tokens of a window's segments are spoken (openai/whisper's `timing.py`).

    tokens: the n text tokens of all segments of the window in order, with a prefix's.
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

    avg_logprob: sum of log probabilities (end-of-text included) over len(tokens) + 1; with
        `detect_only` the log probability of the language among all languages.
    doubted: its encoder context was trimmed, and the first attempt is not to be trusted: the window
        is to be encoded in full. Later temperatures were not tried, and words not aligned.
    peak_positions: for each of `tokens` the encoder position of 20 ms, from the window's start, at
        which the alignment heads looked most when it was predicted: the largest mean of their
        cross-attention. None unless they were asked for.
    """

    request_id: str
    window: int
    tokens: tuple[int, ...]  # sampled after prompt and prefix, without end-of-text
    token_logprobs: tuple[float, ...]  # after the logit rules
    avg_logprob: float
    no_speech_prob: float  # at the start-of-transcript position
    language: str
    temperature: float
    finish_reason: FinishReason
    timings: DecodeTimings
    compression_ratio: float = 0.0  # of the attempt's text, with its prefix
    attempt: int = 0  # number of the attempt that stands, from 0
    alignment: TokenAlignment | None = None  # None unless it was asked for and there is text
    doubted: bool = False
    peak_positions: tuple[int, ...] | None = None
    load: WorkerLoad | None = None
