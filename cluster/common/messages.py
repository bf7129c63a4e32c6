"""Every dataclass that crosses a process boundary. No torch, no behaviour beyond checks.

Times that cross hosts are remaining seconds, which a receiver turns into a deadline of its own
monotonic clock on arrival.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # the command line imports this module without NumPy
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
# Classes of urgency, the most urgent first; "later" are windows of interactive requests that are
# longer than one window.
Priority = Literal["live", "interactive", "later", "bulk"]


@dataclass(frozen=True, slots=True)
class FileMel:
    """Makes a window's log-mel a slice of its whole file's, as openai/whisper computes it."""

    # Samples of `pcm` in front of the window's own, a multiple of the hop: true audio, so that no
    # frame sees an edge; 0 at the file's start. Where the samples behind end, the file does.
    n_before: int
    # Mel frames of the window, 1 to 3000. Later frames are 0.0 after scaling: openai/whisper's
    # padding, which is no silence.
    n_frames: int
    log_max: float  # largest log10 of the file's mel power; what is 8 below it is cut


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
    of_workers: int = 0  # in its pool, where only some were asked
    turned_off: dict[str, str] = field(default_factory=dict)  # what fails on its GPU, and why


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load, sent with each answer for the choice of a worker."""

    # Windows in an encoder (a trimmed one counts by its share of a window's positions), hypotheses
    # in a decoder; waiting ones included.
    work: float = 0.0
    capacity: float = 0.0  # work that it does at once; 0: not known
    window_s: float = 0.0  # for one window of all positions; 0: none yet, or a decoder


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """The fields of a window that both roles get."""

    request_id: str
    window: int
    # Number of its encode among all of the request's windows, from 1 on, unique in the request and
    # passed on with the handle. A decoder's attempts at temperatures are others.
    attempt: int
    _: KW_ONLY
    traceparent: str = ""  # W3C Trace Context; empty where nothing is traced
    priority: Priority = "interactive"
    key: str = ""  # unique to the request; empty: its `request_id` is
    owner: bytes = b""  # as in `common.fair_order`
    rank: int = 0
    sender: str = ""  # as in `common.signals`
    backlog: float = 0.0
    # Serve's id of a worker that failed windows which others then did, and which is replaced when
    # it reads this; empty: none.
    unwell: str = ""
    tries: int = 1  # of this window, this one included


@dataclass(frozen=True, slots=True)
class EncodeRequest(WindowRequest):
    """One window of audio on its way to an encoder."""

    # Unpadded, 1 to WINDOW_SAMPLES samples; with `file_mel` its context comes on top, at most
    # MEL_CONTEXT_SAMPLES on each side.
    pcm: Pcm
    remaining_s: float
    file_mel: FileMel | None = None
    # Encoder positions of 20 ms to compute, from the window's start on; 0: all that the checkpoint
    # has (1500).
    context: int = 0
    # Names `pcm` and `file_mel`: equal for the same audio of the same owner, and nothing that
    # another owner could make. Empty: its KV is not kept for reuse.
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
    """Cost of so many encoder positions, in windows of all positions; 0: all of them."""
    return context / WINDOW_POSITIONS if context else 1.0


def kept_key(audio_key: bytes, context: int) -> bytes:
    """Names the KV of a window: its audio and context; empty where the audio has no key."""
    return audio_key and audio_key + context.to_bytes(2, "big")


@dataclass(frozen=True, slots=True)
class CrossKVHandle:
    """The right to read one published window: KV, or states to project it from.

    Nothing in it is trusted until `signature` has been checked against the cluster's key.
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
    queue_s: float
    encode_s: float
    batch_size: int  # 0: it was not encoded


@dataclass(frozen=True, slots=True)
class EncodeReply:
    handle: CrossKVHandle
    timings: EncodeTimings
    node: str = ""  # Ray's id
    # Whether the KV was there already, or came with that of another request's same window; None
    # where nothing is kept for reuse.
    reused: bool | None = None
    load: WorkerLoad | None = None  # without this window; None from an engine without a pool


@dataclass(frozen=True, slots=True)
class QualityGates:
    """When an attempt at a window has failed, and when a window holds no speech.

    The thresholds are openai/whisper's; None turns one off. An attempt fails when its text repeats
    itself (compression_ratio above) or is unlikely (avg_logprob below), unless nobody speaks
    (no_speech_prob above).
    """

    compression_ratio: float | None = 2.4
    avg_logprob: float | None = -1.0
    no_speech_prob: float | None = 0.6
    # What stands when every temperature failed: the last attempt, as in openai/whisper, or the one
    # with the best avg_logprob among those that do not repeat themselves.
    keep: Literal["last", "best"] = "last"


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    language: str | None = None  # code such as "en"; None: detected in the same decode
    languages: tuple[str, ...] = ()  # among which it is detected; empty: all
    task: Task = "transcribe"
    timestamps: bool = True  # else <|notimestamps|>
    prompt_tokens: tuple[int, ...] = ()  # of earlier context, without <|startofprev|>
    # Tried in order, on the same KV, until an attempt passes `gates`. 0 is greedy, or beam search;
    # above it tokens are sampled.
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0  # of the noise of sampling, which is a function of it
    max_new_tokens: int | None = None  # None: what the text context leaves, at most half of it
    beam_size: int = 1  # at temperature 0
    patience: float = 1.0
    best_of: int = 1  # candidates at temperatures above 0
    length_penalty: float | None = None  # of Google's formula; None: candidates rank by their mean
    gates: QualityGates = QualityGates()
    words: bool = False  # align the text's tokens with the audio
    detect_only: bool = False  # answer with the language, without text
    # Tokens that the window's text, with its timestamps, is forced to begin with. To the rules of
    # sampling they were sampled; they are neither scored nor part of the result.
    prefix_tokens: tuple[int, ...] = ()
    peaks: bool = False  # fill in `DecodeResult.peak_positions`
    # Text tokens that are said in the window, and aligned instead of sampled ones; needs `words`
    # and a language, and excludes all that asks for a text.
    known_text: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        """Largest number of hypotheses that are decoded side by side."""
        if self.beam_size == 1 and self.best_of == 1:
            return 1
        beams = self.beam_size if 0.0 in self.temperatures else 1
        candidates = self.best_of if any(t > 0 for t in self.temperatures) else 1
        return max(1, beams, candidates)


@dataclass(frozen=True, slots=True)
class DecodeRequest(WindowRequest):
    handle: CrossKVHandle
    options: DecodeOptions
    remaining_s: float
    content_frames: int = WINDOW_FRAMES  # mel frames that are audio and not padding, 1 to 3000
    kv_node: str = ""  # Ray's id, for the choice of a decoder


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    queue_s: float  # until it had pages
    transfer_s: float
    transfer_bytes: int
    transport: str
    prefill_s: float
    decode_s: float  # first token to answer: steps, prompts of later temperatures, alignment
    steps: int
    batch_wait_s: float = 0.0  # from its KV to its prompt, mostly for rows of a full batch

    @property
    def waited_s(self) -> float:
        return self.queue_s + self.batch_wait_s


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """When the text tokens of a window are spoken (openai/whisper's `timing.py`)."""

    tokens: tuple[int, ...]  # the n of all segments in order, with a prefix's
    times_s: tuple[float, ...]  # n + 1, from the window's start: each token's begin, the last's end
    probs: tuple[float, ...]  # n, of each token given those before it


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """A finished sequence: the attempt that stands."""

    request_id: str
    window: int
    tokens: tuple[int, ...]  # sampled after prompt and prefix, without end-of-text
    token_logprobs: tuple[float, ...]  # after the logit rules
    # Sum of log probabilities (end-of-text included) over len(tokens) + 1; with `detect_only` that
    # of the language among all languages.
    avg_logprob: float
    no_speech_prob: float  # at the start-of-transcript position
    language: str
    temperature: float
    finish_reason: FinishReason
    timings: DecodeTimings
    compression_ratio: float = 0.0  # of the attempt's text, with its prefix
    attempt: int = 0  # number of the attempt that stands, from 0
    alignment: TokenAlignment | None = None  # None unless it was asked for and there is text
    # Its encoder context was trimmed and the first attempt is not to be trusted: the window must be
    # encoded in full. Later temperatures were not tried, and words not aligned.
    doubted: bool = False
    # For each of `tokens` the encoder position of 20 ms that the alignment heads looked at most
    # when it was predicted, by the mean of their cross-attention. None unless asked for.
    peak_positions: tuple[int, ...] | None = None
    load: WorkerLoad | None = None
