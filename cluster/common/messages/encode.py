"""One window's way through an encoder: the request, the handle of its KV, and the reply."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.messages.audio import (
    WINDOW_POSITIONS,
    FileMel,
    Pcm,
)
from cluster.common.messages.load import WorkerLoad
from cluster.common.messages.shared import Location, Payload, Priority


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """One window of audio on its way to an encoder.

    pcm: int16 [n_samples], 16 kHz mono, 1 <= n_samples <= WINDOW_SAMPLES (unpadded); with
        `file_mel` its context comes on top, at most MEL_CONTEXT_SAMPLES on each side.
    attempt: number of this encode among all of the request's windows, from 1 on: unique within the
        request, and passed on with the handle. It has nothing to do with a decoder's attempts at
        higher temperatures.
    traceparent: W3C Trace Context of the caller's span; empty where nothing is traced.
    context: encoder positions of 20 ms to compute, from the window's start on; 0 means all that the
        checkpoint has (1500). A batch holds windows of one context.
    audio_key: names `pcm` and `file_mel` for whoever sent them: equal for the same audio of the
        same owner, and nothing that another owner could make. Empty: its KV is not kept for reuse.
    fresh: encode it even if its KV is kept, because that could not be used; the new KV replaces it.
    priority: its class, by which waiting windows are ordered.
    """

    request_id: str
    window: int
    attempt: int
    pcm: Pcm
    remaining_s: float
    file_mel: FileMel | None = None
    traceparent: str = ""
    context: int = 0
    audio_key: bytes = b""
    fresh: bool = False
    priority: Priority = "interactive"

    @property
    def n_samples(self) -> int:
        return int(self.pcm.shape[0])

    @property
    def work(self) -> float:
        """What it costs an encoder, in windows of all positions."""
        return self.context / WINDOW_POSITIONS if self.context else 1.0


@dataclass(frozen=True, slots=True)
class CrossKVHandle:
    """The right to read what an encoder published of one window.

    That is its cross-attention KV, or the encoder states from which a decoder can project it.

    Everything in it is untrusted until `signature` has been checked against the cluster's key.

    agent, metadata: the exporter's transfer agent and its connection data.
    addresses: byte address of each page in the exporter's pool, in frame order.
    page_bytes: bytes of each page.
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
