"""Every dataclass that crosses a process boundary. No torch, no behaviour beyond checks.

Order follows the data: router -> encoder -> decoder -> router. Times that cross hosts are
remaining seconds; each receiver turns them into its own monotonic deadline on arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 16_000  # Hz, what every Whisper checkpoint takes
WINDOW_S = 30  # seconds in one encoder window
WINDOW_SAMPLES = WINDOW_S * SAMPLE_RATE  # 480000 samples

Task = Literal["transcribe", "translate"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """One window of audio on its way to an encoder.

    pcm: int16 [n_samples], 16 kHz mono, 1 <= n_samples <= WINDOW_SAMPLES (unpadded).
    """

    request_id: str
    window: int
    attempt: int
    pcm: NDArray[np.int16]
    remaining_s: float

    @property
    def n_samples(self) -> int:
        return int(self.pcm.shape[0])


@dataclass(frozen=True, slots=True)
class CrossKVHandle:
    """The right to read one window's published cross-attention KV.

    Everything in it is untrusted until `signature` has been checked against the cluster's key.

    agent, metadata: the exporter's transfer agent and its connection data.
    addresses: byte address of each page in the exporter's pool, in frame order.
    page_bytes: bytes of each page; frames: encoder frames that hold content (<= 1500).
    counter_address: where the lease's 64-bit generation counter lives (host memory).
    generation: the value that counter must still have after the payload was read.
    lease: nonce that names the lease in notifications.
    remaining_s: lease time left when the handle was made.
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
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class EncodeTimings:
    """Where an encoder spent a window's time."""

    queue_s: float
    encode_s: float
    batch_size: int


@dataclass(frozen=True, slots=True)
class EncodeReply:
    """What an encoder answers: the handle, and where the time went."""

    handle: CrossKVHandle
    timings: EncodeTimings


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How to decode one window.

    language: code such as "en", or None to detect it in the same decode.
    timestamps: decode with timestamp tokens (segments) or with <|notimestamps|>.
    prompt_tokens: text tokens of earlier context, without the <|startofprev|> token.
    temperature: 0 is greedy; above it, sampled with noise that is a function of `seed`.
    max_new_tokens: None means what the text context leaves (at most half of it).
    """

    language: str | None = None
    task: Task = "transcribe"
    timestamps: bool = True
    prompt_tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One window's KV handle and options on its way to a decoder."""

    request_id: str
    window: int
    attempt: int
    handle: CrossKVHandle
    options: DecodeOptions
    remaining_s: float


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """Where a decoder spent a sequence's time; `decode_s` covers `steps` decode steps."""

    queue_s: float
    transfer_s: float
    transfer_bytes: int
    transport: str
    prefill_s: float
    decode_s: float
    steps: int


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """A finished sequence.

    tokens: what was sampled after the prompt, text and timestamp tokens, without end-of-text.
    token_logprobs: log probability of each of `tokens` after the logit rules.
    avg_logprob: sum of log probabilities (end-of-text included) over len(tokens) + 1.
    no_speech_prob: probability of the no-speech token at the start-of-transcript position.
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


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A replica's state, for /health, routing and the dashboard."""

    replica: str
    role: Literal["encoder", "decoder"]
    healthy: bool
    model: str
    transport: str
    device: str
    pages_free: int
    pages_total: int
    queued: int
    running: int
    extra: dict[str, float] = field(default_factory=dict)
