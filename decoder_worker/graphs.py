"""Decode steps at a few fixed batch sizes, each captured once and replayed from then on.

A step of n rows runs in the smallest bucket that holds them, filled up with inert rows: slot and
page of nobody, whose outcome nobody reads. Everything that a captured step reads lies in buffers
made here or planned by the bucket's own attention backend, and the host writes to them only in
the order of the stream. What "captured" means is a seam: a CUDA graph, or on a CPU the same step
called again, which is how the tests run this file.

Knows no sequences and no searches: rows only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.readback import Readback
from decoder_worker.slots import upload
from decoder_worker.step import DecodeStep

logger = logging.getLogger(__name__)

WARM_UPS = 2  # runs before a capture: libraries load, compile and allocate in them

Body = Callable[[], None]
Capture = Callable[[Body], Body]


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A row of a decode step.

    length: positions of self-attention with the token that the step feeds. n_frames: of the
    window, in `cross_pages`.
    """

    slot: int
    self_pages: tuple[int, ...]
    length: int
    cross_pages: tuple[int, ...]
    n_frames: int


@dataclass(slots=True)
class _Bucket:
    """A batch size: its buffers on the device, and what the host put into them last."""

    attention: AttentionBackend
    index: Tensor  # int64 [size], slots
    every: Tensor  # int64 [size], 0 to size - 1
    tokens: Tensor  # int64 [size]
    logprobs: Tensor  # float32 [size]
    replays: dict[bool, Body] = field(default_factory=dict)  # by whether there is noise
    slots: tuple[int, ...] = ()
    windows: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    cross_kv: PagedKV | None = None  # of `windows`: the same object while they are the same


class BucketedSteps:
    """Launches decode steps by bucket. For one thread and one stream at a time."""

    def __init__(
        self,
        step: DecodeStep,
        attention_for: Callable[[int], AttentionBackend],
        inert: DecodeRow,
        page_sizes: tuple[int, int],
        max_batch: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            attention_for: makes the backend of a bucket of so many rows.
            inert: its slot and its one page of self-attention are nobody's; of its window only a
                frame or so is read, so that any page will do.
            page_sizes: positions in a page of the self pool, frames in one of the cross pool.
        """
        self._step = step
        self._inert = inert
        self._page_tokens, self._page_frames = page_sizes
        self._device = device
        self._capture: Capture = _call_again
        if device.type == "cuda":
            self._capture = partial(_capture_graph, torch.cuda.graph_pool_handle())
        self._buckets = {
            size: _Bucket(
                attention=attention_for(size),
                index=torch.full((size,), inert.slot, device=device),
                every=torch.arange(size, device=device),
                tokens=torch.zeros(size, dtype=torch.int64, device=device),
                logprobs=torch.zeros(size, dtype=torch.float32, device=device),
            )
            for size in reversed(bucket_sizes(max_batch))  # the largest first: others fit its pool
        }

    def capture_all(self, cross_pages: int, n_frames: int) -> None:
        """Capture every bucket, with and without noise; before the first launch.

        On inert rows alone, since a capture runs them: they are planned as windows of
        `cross_pages` pages of all `n_frames` frames. A graph captured over empty windows would
        have no cross-attention in it.
        """
        full = replace(self._inert, cross_pages=(0,) * cross_pages, n_frames=n_frames)
        for size, bucket in self._buckets.items():
            for noisy in (False, True):
                self._fill(bucket, [full] * size)
                bucket.replays[noisy] = self._capture(partial(self._run, bucket, noisy))
        logger.info("captured decode steps of %s rows", ", ".join(map(str, self._buckets)))

    def launch(self, rows: Sequence[DecodeRow], noisy: bool) -> Readback:
        """Run a step of `rows`; noisy: one of them has a temperature above 0.

        Returns:
            tokens int64 and logprobs float32, [len(rows)] each.
        """
        n = len(rows)
        size = min(size for size in self._buckets if size >= n)
        bucket = self._buckets[size]
        self._fill(bucket, [*rows, *[self._inert] * (size - n)])
        bucket.replays[noisy]()
        return Readback((bucket.tokens[:n], bucket.logprobs[:n]), reused=True)

    def _fill(self, bucket: _Bucket, rows: Sequence[DecodeRow]) -> None:
        """Bring the rows into the bucket's buffers and plan; what has not changed stays."""
        slots = tuple(row.slot for row in rows)
        if slots != bucket.slots:
            bucket.slots = slots
            bucket.index.copy_(upload(slots, torch.int64, self._device), non_blocking=True)
        windows = [(row.cross_pages, row.n_frames) for row in rows]
        ones = [1] * len(rows)
        if bucket.cross_kv is None or windows != bucket.windows:
            bucket.windows = windows
            pages, frames = zip(*windows, strict=True)
            bucket.cross_kv = PagedKV.make(ones, pages, frames, self._page_frames)
        self_kv = PagedKV.make(
            ones,
            [row.self_pages for row in rows],
            [row.length for row in rows],
            self._page_tokens,
        )
        bucket.attention.plan(AttentionBatch(self_kv, bucket.cross_kv))

    def _run(self, bucket: _Bucket, noisy: bool) -> None:
        """The captured part."""
        sampled = self._step(bucket.index, bucket.attention, bucket.every if noisy else None)
        bucket.tokens.copy_(sampled.tokens)
        bucket.logprobs.copy_(sampled.logprobs)


def bucket_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, ... and `max_batch` itself."""
    sizes = [1]
    while sizes[-1] < max_batch:
        sizes.append(min(2 * sizes[-1], max_batch))
    return sizes


def _call_again(body: Body) -> Body:
    return body


def _capture_graph(pool: Any, body: Body) -> Body:
    """A CUDA graph of `body` on the current stream, which must not be the default one.

    pool: from `torch.cuda.graph_pool_handle`. Graphs share its memory: never two of them run at
    once, and none leaves anything there for another to read.
    """
    for _ in range(WARM_UPS):
        body()
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process, a colocated encoder's, may do with CUDA what they like.
    with torch.cuda.graph(
        graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
    ):
        body()
    return graph.replay
