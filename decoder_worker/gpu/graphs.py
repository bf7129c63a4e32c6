"""Decode steps and prompts at a few fixed sizes, each captured once and then replayed.

A forward runs in the smallest bucket that holds its windows, padded with inert rows. A capture
reads only buffers made here or planned by the bucket's decoder, which the host writes in the
stream's order. On a CPU, "captured" means that the same forward is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cluster.common.model.streams import Body, capture, new_graph_memory, upload, warm_up
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.model import TextDecoder
from decoder_worker.step import DecodeStep, Prompts, Readback

Capture = Callable[[Body], Body]


class Outcome(Enum):
    GREEDY = "greedy"
    NOISY = "noisy"  # some of the rows have a temperature above 0
    LOGITS = "logits"


@dataclass(frozen=True, slots=True)
class Form:
    """n_tokens: of a prompt, with padding; 0: decode steps. n_sharing: rows of one window."""

    n_tokens: int
    outcomes: tuple[Outcome, ...]
    n_sharing: int = 1


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of a forward.

    length: positions of self-attention with the token that a decode step feeds. n_frames: of the
    window in `cross_pages`. tokens: of a prompt, with the start of transcript at `sot`.
    """

    slot: int
    self_pages: tuple[int, ...]
    length: int
    cross_pages: tuple[int, ...]
    n_frames: int
    tokens: tuple[int, ...] = ()
    sot: int = 0


@dataclass(slots=True)
class _Bucket:
    """The buffers for a number of windows, and what the host wrote to them last.

    index, every: int64 [rows], slots, and 0 to rows - 1. tokens: int64, logprobs: float32 [rows],
    sampled. no_speech: float32 [rows], of prompts.
    """

    decoder: TextDecoder
    index: Tensor
    every: Tensor
    prompts: Prompts
    tokens: Tensor
    logprobs: Tensor
    no_speech: Tensor
    replays: dict[Outcome, Body] = field(default_factory=dict)
    slots: tuple[int, ...] = ()
    windows: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    cross_kv: PagedKV | None = None  # of `windows`: the same object while they are the same


@dataclass(frozen=True, slots=True)
class Common:
    """What all buckets of a worker share.

    inert: its slot and self-attention pages belong to no sequence; about a frame of its window is
        read, so any cross page will do.
    page_sizes: positions in a page of the self pool, frames in one of the cross pool.
    logits: float32 [rows, n_vocab], of the last forward with that outcome.
    """

    step: DecodeStep
    inert: BatchRow
    page_sizes: tuple[int, int]
    logits: Tensor
    device: torch.device


class Buckets:
    """Launches forwards of one form by bucket. For one thread and one stream at a time."""

    def __init__(
        self,
        common: Common,
        form: Form,
        decoder_for: Callable[[int], TextDecoder],
        sizes: Sequence[int],
    ) -> None:
        """decoder_for: makes a decoder for a number of rows. sizes: windows of each bucket."""
        self.form = form
        self.max_windows = max(sizes)
        self._common = common
        self._buckets = {  # the largest first: the others fit into its memory
            size: _make_bucket(decoder_for(size * form.n_sharing), common, form, size)
            for size in sorted(sizes, reverse=True)
        }

    def capture_all(self, cross_pages: int, n_frames: int, capture: Capture) -> None:
        """Capture every bucket with every outcome; before the first launch.

        Captures run, so they contain only inert rows, planned as windows of `cross_pages` pages
        with `n_frames` frames: a graph captured over empty windows would lack the cross-attention.
        """
        pages = (0,) * cross_pages
        full = [replace(self._common.inert, cross_pages=pages, n_frames=n_frames)]
        for size, bucket in self._buckets.items():
            for outcome in self.form.outcomes:
                self._fill(bucket, [full] * size)
                body = partial(self._run, bucket, outcome)
                bucket.replays[outcome] = capture(body)

    def launch(self, windows: Sequence[Sequence[BatchRow]], outcome: Outcome) -> Readback:
        """Run a forward of at most `max_windows` windows; only for forms with `n_sharing` 1.

        Returns tokens int64, logprobs float32 and, for prompts, no-speech probabilities float32,
        each [len(windows)].
        """
        n, bucket = len(windows), self._launch(windows, outcome)
        no_speech = bucket.no_speech[:n] if self.form.n_tokens else None
        return Readback((bucket.tokens[:n], bucket.logprobs[:n], no_speech), reused=True)

    def logits(self, windows: Sequence[Sequence[BatchRow]]) -> tuple[Tensor, Tensor | None]:
        """Run a forward without sampling: float32 [rows of the windows, n_vocab].

        At most `max_windows` windows of `n_sharing` rows each. The result holds until the next
        forward. For prompts, returns no-speech probabilities too.
        """
        n, bucket = len(windows), self._launch(windows, Outcome.LOGITS)
        logits = self._common.logits
        if self.form.n_tokens:
            return logits[:n], bucket.no_speech[:n].clone()
        if self.form.n_sharing == 1:
            return logits[:n], None
        begins = range(0, n * self.form.n_sharing, self.form.n_sharing)
        rows = [
            begin + i for begin, own in zip(begins, windows, strict=True) for i in range(len(own))
        ]
        return logits[upload(rows, torch.int64, self._common.device)], None

    def _launch(self, windows: Sequence[Sequence[BatchRow]], outcome: Outcome) -> _Bucket:
        size = min(size for size in self._buckets if size >= len(windows))
        bucket = self._buckets[size]
        self._fill(bucket, [*windows, *[[self._common.inert]] * (size - len(windows))])
        bucket.replays[outcome]()
        return bucket

    def _fill(self, bucket: _Bucket, windows: Sequence[Sequence[BatchRow]]) -> None:
        """Write the rows to the bucket's buffers and plan; what has not changed stays."""
        form, inert = self.form, self._common.inert
        page_tokens, page_frames = self._common.page_sizes
        rows = [row for own in windows for row in (*own, *[inert] * (form.n_sharing - len(own)))]
        slots = tuple(row.slot for row in rows)
        if slots != bucket.slots:
            self._put(bucket.index, slots)
            bucket.slots = slots  # after the copy: an error before it leaves the old ones
        if form.n_tokens:
            self._put_prompts(bucket.prompts, rows)
        now = [(own[0].cross_pages, own[0].n_frames) for own in windows]
        if bucket.cross_kv is None or now != bucket.windows:
            counts = [(form.n_tokens or 1) * form.n_sharing] * len(windows)
            pages, frames = zip(*now, strict=True)
            bucket.cross_kv = PagedKV.make(counts, pages, frames, page_frames)
            bucket.windows = now
        self_kv = PagedKV.make(
            [form.n_tokens or 1] * len(rows),
            [row.self_pages for row in rows],
            [form.n_tokens or row.length for row in rows],
            page_tokens,
        )
        bucket.decoder.plan(AttentionBatch(self_kv, bucket.cross_kv))

    def _put_prompts(self, prompts: Prompts, rows: Sequence[BatchRow]) -> None:
        n_tokens = self.form.n_tokens
        flat = [
            token for row in rows for token in (*row.tokens, *[0] * (n_tokens - len(row.tokens)))
        ]
        begins = range(0, n_tokens * len(rows), n_tokens)
        pairs = list(zip(begins, rows, strict=True))
        lasts = [begin + max(1, len(row.tokens)) - 1 for begin, row in pairs]
        self._put(prompts.tokens, flat)
        self._put(prompts.read, [*(begin + row.sot for begin, row in pairs), *lasts])

    def _put(self, buffer: Tensor, values: Sequence[int]) -> None:
        buffer.copy_(upload(values, buffer.dtype, buffer.device), non_blocking=True)

    def _run(self, bucket: _Bucket, outcome: Outcome) -> None:
        """The captured part."""
        step, decoder, prompts = self._common.step, bucket.decoder, bucket.prompts
        every = bucket.every if outcome is Outcome.NOISY else None
        if outcome is Outcome.LOGITS:
            if self.form.n_tokens:
                sots, logits = step.prompt_logits(prompts, decoder)
                bucket.no_speech.copy_(step.no_speech_probs(sots))
            else:
                logits = step.logits(bucket.index, decoder)
            self._common.logits[: len(logits)].copy_(logits)
            return
        if self.form.n_tokens:
            sampled, no_speech = step.start(prompts, bucket.index, decoder, every)
            bucket.no_speech.copy_(no_speech)
        else:
            sampled = step(bucket.index, decoder, every)
        bucket.tokens.copy_(sampled.tokens)
        bucket.logprobs.copy_(sampled.logprobs)


def _make_bucket(decoder: TextDecoder, common: Common, form: Form, n_windows: int) -> _Bucket:
    rows, device = n_windows * form.n_sharing, common.device
    int64: dict[str, Any] = {"dtype": torch.int64, "device": device}
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    return _Bucket(
        decoder=decoder,
        index=torch.full((rows,), common.inert.slot, device=device),
        every=torch.arange(rows, device=device),
        prompts=Prompts(
            tokens=torch.zeros(rows * form.n_tokens, **int64),
            positions=torch.arange(form.n_tokens, device=device).repeat(rows),
            read=torch.zeros(2 * rows, **int64),
        ),
        tokens=torch.zeros(rows, **int64),
        logprobs=torch.zeros(rows, **float32),
        no_speech=torch.zeros(rows, **float32),
    )


def bucket_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, ... and `max_batch`; above 8 at most a third is padding."""
    sizes, step = [1], 1
    while sizes[-1] < max_batch:
        sizes.append(min(sizes[-1] + step, max_batch))
        step = max(1, 2 ** (sizes[-1].bit_length() - 1) // (2 if sizes[-1] >= 8 else 1))
    return sizes


def few_sizes(max_batch: int, step: int) -> list[int]:
    """1, `step`, its square, ... and `max_batch`; a bucket's plans take 16 MB of the device."""
    sizes = [1]
    while sizes[-1] < max_batch:
        sizes.append(min(sizes[-1] * step, max_batch))
    return sizes


def capture_on(device: torch.device) -> Capture:
    """Return how to capture on a device: as CUDA graphs that share memory; on a CPU not at all."""
    if device.type == "cuda":
        return partial(_capture_graph, new_graph_memory())
    return call_again


def call_again(body: Body) -> Body:
    return body


def _capture_graph(memory: Any, body: Body) -> Body:
    warm_up(body)
    return capture(body, memory)
