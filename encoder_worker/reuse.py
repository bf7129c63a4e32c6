"""Windows that need no encode, since the KV of the same audio is published already.

A window's key names all that shapes its KV: the audio and its owner, as the router named them, the
encoder context, and this worker's model, precision and page layouts. Two tenants never have the
same key, so that no answer's time tells one of them what another has sent.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

from cluster.kv.exporter import KVExporter
from cluster.messages import EncodeReply, EncodeRequest, EncodeTimings

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """What is kept now, and what came of windows that had a key since the start.

    kept, kept_bytes: windows that nobody reads, and their pages. hits: windows that needed no
    encode; misses: windows encoded. evicted: windows whose pages were needed for others.
    """

    kept: int = 0
    kept_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0


class KVReuse:
    """Finds published KV for windows. Thread-safe."""

    def __init__(self, exporter: KVExporter, dtype: str, enabled: bool) -> None:
        """dtype: that the encoder computes in, as the settings say it ("int8" included)."""
        self._exporter = exporter
        self._enabled = enabled
        worker = f"{dtype}\0{exporter.layout.hash}"
        self._worker = hashlib.blake2b(worker.encode(), digest_size=KEY_BYTES).digest()
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    def key_of(self, request: EncodeRequest) -> bytes:
        """Under which a window's KV is kept; empty where it is not."""
        if not self._enabled or not request.audio_key:
            return b""
        named = request.audio_key + request.context.to_bytes(4, "big")
        return hashlib.blake2b(named, digest_size=KEY_BYTES, key=self._worker).digest()

    def find(self, request: EncodeRequest, key: bytes, queue_s: float) -> EncodeReply | None:
        """The answer from KV that is there already; counts a hit.

        Raises:
            WorkerDrainingError: the exporter is closed.
        """
        if not key or request.fresh:
            return None
        handle = self._exporter.publish_again(
            key, request_id=request.request_id, window=request.window, attempt=request.attempt
        )
        if handle is None:
            return None
        with self._lock:
            self._hits += 1
        return EncodeReply(handle, EncodeTimings(queue_s, 0.0, 0), reused=True)

    def missed(self) -> None:
        """A window with a key was encoded."""
        with self._lock:
            self._misses += 1

    def stats(self) -> ReuseStats:
        published = self._exporter.published
        kept_bytes = published.n_kept_pages * self._exporter.pool.page_bytes
        with self._lock:
            hits, misses = self._hits, self._misses
        return ReuseStats(published.n_kept, kept_bytes, hits, misses, published.n_evicted)
