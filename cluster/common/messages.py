"""Every dataclass that crosses a process boundary. No torch, no behaviour beyond checks.

First how audio is counted and what several messages need, then what goes to an encoder and comes
back, and the same of a decoder. Times that cross hosts are remaining seconds: each receiver turns
them into a deadline on its own monotonic clock on arrival.
"""

from __future__ import annotations

from collections.abc import Callable
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
class Location:
    """Where a worker runs: Ray's id of the node, and the name of the NVLink domain it is in."""

    node: str = ""
    domain: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's state, for /health.

    of_workers: of its pool, where some were asked; else 0. turned_off: what was found wrong on its
    GPU at start and is not used, with why.
    """

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
    of_workers: int = 0
    turned_off: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker says of itself with each answer, for the choice of a worker.

    work: windows in an encoder (a trimmed one counts by its share of a window's positions),
        hypotheses in a decoder, waiting ones included.
    capacity: of them that it works on at once, more only wait; 0 where it is not known.
    window_s: encoder seconds for one window of all positions; 0 where there was none yet, and of a
        decoder.
    """

    work: float = 0.0
    capacity: float = 0.0
    window_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """What both roles are told of a window: whose it is, and when it is its turn.

    attempt: number of its encode among all of the request's windows, from 1 on: unique within the
        request, and passed on with the handle. A decoder's attempts at temperatures are others.
    tries: of this window, this one included: what people are told.
    traceparent: W3C Trace Context of the caller's span; empty where nothing is traced.
    key: of the request, as no other's is, whatever its client calls it in `request_id`. Empty: that
        is unique.
    owner, rank: as in `common.fair_order`.
    sender, backlog: as in `common.signals`.
    unwell: Serve's id of a worker that failed windows which others then did; empty: of none. Who
        reads it of itself is to be replaced.
    """

    request_id: str
    window: int
    attempt: int
    _: KW_ONLY
    traceparent: str = ""
    priority: Priority = "interactive"
    key: str = ""
    owner: bytes = b""
    rank: int = 0
    sender: str = ""
    backlog: float = 0.0
    unwell: str = ""
    tries: int = 1


@dataclass(frozen=True, slots=True)
class EncodeRequest(WindowRequest):
    """One window of audio on its way to an encoder.

    pcm: int16 [n_samples], 16 kHz mono, 1 <= n_samples <= WINDOW_SAMPLES (unpadded); with
        `file_mel` its context comes on top, at most MEL_CONTEXT_SAMPLES on each side.
    context: encoder positions of 20 ms to compute, from the window's start on; 0 means all that the
        checkpoint has (1500). A batch holds windows of one context.
    audio_key: names `pcm` and `file_mel` for whoever sent them: equal for the same audio of the
        same owner, and nothing that another owner could make. Empty: its KV is not kept for reuse.
    fresh: encode it even if its KV is kept, because that could not be used; the new KV replaces it.
    """

    pcm: Pcm
    remaining_s: float
    file_mel: FileMel | None = None
    context: int = 0
    audio_key: bytes = b""
    fresh: bool = False

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

    agent, metadata: the exporter's transfer agent and its connection data.
    addresses: byte address of each page, of `page_bytes`, in the exporter's pool, in frame order.
    frames: encoder frames that there are, 1500, or fewer where the context was trimmed: what
        cross-attention attends to.
    counter_address: where the lease's 64-bit generation counter lives (host memory).
    generation: the value that counter must still have after the payload was read.
    lease: nonce that names the lease in notifications.
    remaining_s: lease time left when the handle was made; who holds it renews in good time.
    payload: what the pages hold; `layout_hash` is that of the exporter's pool.
    signature: HMAC-SHA256 over all other fields.
    """

    request_id: str
    window: int
    attempt: int
    agent: str
    metadata: bytes
    layout_hash: str
    addresses: tuple[int, ...]
    page_bytes: int
    frames: int
    counter_address: int
    generation: int
    lease: str
    remaining_s: float
    payload: Payload = "cross_kv"
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class EncodeTimings:
    """Where an encoder spent a window's time; `batch_size` is 0 where it was not encoded."""

    queue_s: float
    encode_s: float
    batch_size: int


@dataclass(frozen=True, slots=True)
class EncodeReply:
    """What an encoder answers: the handle, where the time went, and where the KV is.

    reused: whether the KV was there already, or came with that of another request's same window;
        None where nothing is kept for reuse.
    load: the worker's, beside this window; None from an engine without a pool.
    """

    handle: CrossKVHandle
    timings: EncodeTimings
    location: Location = Location()
    reused: bool | None = None
    load: WorkerLoad | None = None


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
    languages: the codes among which it is detected; none: all.
    timestamps: decode with timestamp tokens (segments) or with <|notimestamps|>.
    prompt_tokens: text tokens of earlier context, without the <|startofprev|> token.
    temperatures: tried in order, from KV that is already there, until an attempt passes `gates`.
        0 is greedy, or beam search; above it, sampled with noise that is a function of `seed`.
    beam_size, patience: at temperature 0. best_of: candidates above it.
    length_penalty: ranks finished candidates by Google's formula; None: by their mean.
    max_new_tokens: None means what the text context leaves (at most half of it).
    words: align the text's tokens with the audio.
    detect_only: answer with the language, without text.
    prefix_tokens: tokens that the window's text, with its timestamps, is forced to begin with. To
        the rules of sampling they were sampled; they are neither scored nor part of the result.
    peaks: tell where in the audio each sampled token was looking (`DecodeResult.peak_positions`).
    known_text: text tokens that are said in the window: they are aligned, in place of any that
        would be sampled; with `words` and a language, and without all that asks for a text.
    """

    language: str | None = None
    languages: tuple[str, ...] = ()
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
    """One window's KV handle and options on its way to a decoder.

    content_frames: mel frames of the window that are audio and not padding, 1 to 3000.
    kv_location: where the KV is, for whoever chooses a decoder; `handle` is the right to read it.
    """

    handle: CrossKVHandle
    options: DecodeOptions
    remaining_s: float
    content_frames: int = WINDOW_FRAMES
    kv_location: Location = Location()


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """Where a decoder spent a sequence's time.

    queue_s: until it had pages. batch_wait_s: from the arrival of its KV until its prompt was run,
        mostly for rows of a full batch. decode_s: from the first token to the answer: `steps`
        decode steps, prompts of later temperatures, and the alignment of words.
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
        return self.queue_s + self.batch_wait_s


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token for a client that wants each at once, never end-of-text; see `DecodeResult`."""

    token: int
    logprob: float
    no_speech_prob: float


OnToken = Callable[[SampledToken], None]


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

    tokens: text and timestamp tokens sampled after prompt and prefix, without end-of-text.
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
