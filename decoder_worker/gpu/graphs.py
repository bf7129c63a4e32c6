"""Decode steps and prompts at a few fixed sizes, each captured once and replayed from then on.

A forward of n rows runs in the smallest bucket that holds them, filled up with inert rows, whose
slot and page belong to no sequence and whose outcome is not read. Everything that a captured
forward reads lies in buffers made here or planned by the bucket's own decoder, and the host writes
to them only in the order of the stream. What "captured" means is a seam: a CUDA graph, or on a CPU
the same forward called again, which is how the tests run this file.

Knows no sequences and no searches: rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cluster.model.streams import Body, capture, new_graph_memory, warm_up
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.model import TextDecoder
from decoder_worker.readback import Readback
from decoder_worker.sampling.slots import upload
from decoder_worker.step import DecodeStep

Capture = Callable[[Body], Body]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of a forward.

    length: positions of self-attention with the tokens that are fed. n_frames: of the window, in
    `cross_pages`. tokens: what a prompt feeds; a decode step feeds what the slot says.
    """

    slot: int
    self_pages: tuple[int, ...]
    length: int
    cross_pages: tuple[int, ...]
    n_frames: int
    tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class _Bucket:
    """A batch size: its buffers on the device, and what the host put into them last."""

    decoder: TextDecoder
    index: Tensor  # int64 [size], slots
    every: Tensor  # int64 [size], 0 to size - 1
    fed: Tensor  # int64 [size * n_tokens] of a prompt
    tokens: Tensor  # int64 [size], sampled
    logprobs: Tensor  # float32 [size]
    no_speech: Tensor  # float32 [size], of a prompt
    replays: dict[bool, Body] = field(default_factory=dict)  # by whether there is noise
    slots: tuple[int, ...] = ()
    windows: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    cross_kv: PagedKV | None = None  # of `windows`: the same object while they are the same


class Buckets:
    """Launches forwards of one kind by bucket. For one thread and one stream at a time."""

    def __init__(
        self,
        step: DecodeStep,
        decoder_for: Callable[[int], TextDecoder],
        inert: BatchRow,
        page_sizes: tuple[int, int],
        max_batch: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            decoder_for: makes the decoder of a bucket of so many rows.
            inert: its slot and its page of self-attention belong to no sequence; of its window only
                a frame or so is read, so that any page will do. Its tokens are a prompt as long as
                those of all rows, or none: decode steps.
            page_sizes: positions in a page of the self pool, frames in one of the cross pool.
        """
        self._step = step
        self._inert = inert
        self._page_tokens, self._page_frames = page_sizes
        self._device = device
        self._capture: Capture = _call_again
        if device.type == "cuda":
            self._capture = partial(_capture_graph, new_graph_memory())
        self.max_batch = max_batch
        self._buckets = {
            size: _Bucket(
                decoder=decoder_for(size),
                index=torch.full((size,), inert.slot, device=device),
                every=torch.arange(size, device=device),
                fed=torch.zeros(size * len(inert.tokens), dtype=torch.int64, device=device),
                tokens=torch.zeros(size, dtype=torch.int64, device=device),
                logprobs=torch.zeros(size, dtype=torch.float32, device=device),
                no_speech=torch.zeros(size, dtype=torch.float32, device=device),
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

    def launch(self, rows: Sequence[BatchRow], noisy: bool) -> Readback:
        """Run a forward of at most `max_batch` rows; noisy: some have a temperature above 0.

        Returns:
            tokens int64 and logprobs float32, [len(rows)] each; of prompts also the probabilities
            of no speech, float32.
        """
        n = len(rows)
        size = min(size for size in self._buckets if size >= n)
        bucket = self._buckets[size]
        self._fill(bucket, [*rows, *[self._inert] * (size - n)])
        bucket.replays[noisy]()
        no_speech = bucket.no_speech[:n] if self._inert.tokens else None
        return Readback((bucket.tokens[:n], bucket.logprobs[:n], no_speech), reused=True)

    def _fill(self, bucket: _Bucket, rows: Sequence[BatchRow]) -> None:
        """Bring the rows into the bucket's buffers and plan; what has not changed stays."""
        slots = tuple(row.slot for row in rows)
        if slots != bucket.slots:
            bucket.slots = slots
            bucket.index.copy_(upload(slots, torch.int64, self._device), non_blocking=True)
        if self._inert.tokens:
            flat = [token for row in rows for token in row.tokens]
            bucket.fed.copy_(upload(flat, torch.int64, self._device), non_blocking=True)
        counts = [len(self._inert.tokens) or 1] * len(rows)
        windows = [(row.cross_pages, row.n_frames) for row in rows]
        if bucket.cross_kv is None or windows != bucket.windows:
            bucket.windows = windows
            pages, frames = zip(*windows, strict=True)
            bucket.cross_kv = PagedKV.make(counts, pages, frames, self._page_frames)
        self_kv = PagedKV.make(
            counts,
            [row.self_pages for row in rows],
            [row.length for row in rows],
            self._page_tokens,
        )
        bucket.decoder.plan(AttentionBatch(self_kv, bucket.cross_kv))

    def _run(self, bucket: _Bucket, noisy: bool) -> None:
        """The captured part."""
        every = bucket.every if noisy else None
        if self._inert.tokens:
            sampled, no_speech = self._step.start(bucket.fed, bucket.index, bucket.decoder, every)
            bucket.no_speech.copy_(no_speech)
        else:
            sampled = self._step(bucket.index, bucket.decoder, every)
        bucket.tokens.copy_(sampled.tokens)
        bucket.logprobs.copy_(sampled.logprobs)


def bucket_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, ... and `max_batch`; above 8 at most a third is filled up."""
    sizes, step = [1], 1
    while sizes[-1] < max_batch:
        sizes.append(min(sizes[-1] + step, max_batch))
        step = max(1, 2 ** (sizes[-1].bit_length() - 1) // (2 if sizes[-1] >= 8 else 1))
    return sizes


def _call_again(body: Body) -> Body:
    return body


def _capture_graph(memory: Any, body: Body) -> Body:
    warm_up(body)
    return capture(body, memory)
