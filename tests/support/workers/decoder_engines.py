"""Engines on random checkpoints with KV published in this process, for tests of the decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.pool import PagePool
from cluster.common.messages import (
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    QualityGates,
)
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.settings import DecoderSettings
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.backends import Attentions, choose_attention, torch_attention
from decoder_worker.build import steps_ahead
from decoder_worker.engine import DecoderEngine
from tests.support.kv.ends import MemoryExporter, memory_importer

KEY = b"key of the tests"
ANSWER_S = 60.0  # generous: a test waits for a condition, never for a time


LADDER = (0.0, 0.4, 0.8)
NEVER_GOOD = QualityGates(avg_logprob=0.0)  # no text is certain

# Windows that differ in all that a request may ask for; up to eight rows each.
REQUESTS: tuple[dict[str, Any], ...] = (
    *({"seed": seed, "max_new_tokens": 40, "timestamps": seed % 2 == 1} for seed in range(6)),
    {"seed": 8, "temperatures": (0.9,), "max_new_tokens": 30},
    {"seed": 1, "temperatures": LADDER, "gates": NEVER_GOOD, "max_new_tokens": 30},
    {"seed": 5, "temperatures": LADDER, "gates": NEVER_GOOD, "words": True},
    {"seed": 3, "beam_size": 5, "max_new_tokens": 20},
    {"seed": 3, "beam_size": 2, "timestamps": False},
    {"seed": 5, "beam_size": 2, "patience": 2.0, "length_penalty": 1.0, "language": None},
    {"seed": 4, "temperatures": (0.7,), "best_of": 3, "words": True},
    {"seed": 5, "temperatures": (0.0, 0.6), "best_of": 8, "gates": NEVER_GOOD},
    {"seed": 4, "temperatures": (0.0, 0.5), "beam_size": 4, "best_of": 2, "gates": NEVER_GOOD},
    {"seed": 6, "prompt_tokens": tuple(range(10)), "task": "translate"},
    {"seed": 7, "language": None, "prompt_tokens": tuple(range(300)), "max_new_tokens": None},
    {"seed": 8, "prompt_tokens": tuple(range(70)), "beam_size": 4},
    {"seed": 9, "prompt_tokens": (5, 6), "temperatures": (0.9,)},
    {"seed": 4, "max_new_tokens": 1},
    {"seed": 6, "language": None, "detect_only": True},
    {"seed": 7, "language": None, "languages": ("es", "de"), "max_new_tokens": 20},
    {"seed": 2, "words": True, "max_new_tokens": 20},
)


@dataclass
class Stand:
    checkpoint: Checkpoint
    exporter: MemoryExporter
    importer: KVImporter
    engine: DecoderEngine

    def publish(self, seed: int, content: torch.Tensor | None = None) -> CrossKVHandle:
        """content: KV [n_frames, layer, 2, head, head_dim], or encoder states [n_frames, state]."""
        layout, pool = self.exporter.layout, self.exporter.pool.tensor
        pages = self.exporter.reserve(layout.pages_per_window, ANSWER_S)
        assert pages is not None
        if layout.payload == "encoder_states":
            pool[pages[0]] = random_states(self.checkpoint, seed) if content is None else content
        else:
            write_window(pool, pages, random_kv(layout, seed) if content is None else content)
        return self.exporter.publish(
            pages, request_id="test", window=seed, attempt=0, frames=layout.n_frames
        )

    def request(
        self,
        seed: int = 0,
        *,
        remaining_s: float = ANSWER_S,
        handle: CrossKVHandle | None = None,
        **options: Any,
    ) -> DecodeRequest:
        return DecodeRequest(
            request_id="test",
            window=seed,
            attempt=0,
            handle=self.publish(seed) if handle is None else handle,
            options=DecodeOptions(**{"language": "en", "max_new_tokens": 12, **options}),
            remaining_s=remaining_s,
        )

    def decode(self, seed: int = 0, **options: Any) -> DecodeResult:
        return self.engine.submit(self.request(seed, **options)).result(ANSWER_S)

    def decode_all(self, requests: Sequence[dict[str, Any]] = REQUESTS) -> list[DecodeResult]:
        futures = [self.engine.submit(self.request(**options)) for options in requests]
        return [future.result(ANSWER_S) for future in futures]

    def assert_all_returned(self) -> None:
        wait_until(lambda: self.engine.drain(0.0), "sequences are live")
        self.engine.check_integrity()
        wait_until(lambda: self.exporter.n_leases == 0, "leases are held")
        wait_until(lambda: self.exporter.pool.n_used == 0, "exported pages are held")


def assert_same(result: DecodeResult, alone: DecodeResult, what: Any = "") -> None:
    """The same text by the same attempt, whatever was in the batch; numbers within rounding."""
    for field in ("tokens", "language", "finish_reason", "attempt"):
        assert getattr(result, field) == getattr(alone, field), (what, field)
    assert result.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-4), what
    assert result.avg_logprob == pytest.approx(alone.avg_logprob, abs=1e-4), what
    assert result.no_speech_prob == pytest.approx(alone.no_speech_prob, abs=1e-6), what
    assert (result.alignment is None) == (alone.alignment is None), what
    if result.alignment and alone.alignment:
        assert result.alignment.tokens == alone.alignment.tokens, what
        assert result.alignment.times_s == pytest.approx(alone.alignment.times_s, abs=0.021), what


def assert_follow(
    found: Sequence[DecodeResult],
    expected: Sequence[DecodeResult],
    tolerance: float,
    share: float,
) -> None:
    """Each text of 16-bit arithmetic follows that of float32 until a near tie.

    tolerance: of log probabilities before it, in nats. share: of all tokens that come before one.
    """
    n_same = 0
    for one, other in zip(found, expected, strict=True):
        assert one.language == other.language
        both = zip(one.tokens, other.tokens, strict=False)
        n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        pairs = zip(one.token_logprobs[:n], other.token_logprobs[:n], strict=True)
        largest = max((abs(a - b) for a, b in pairs), default=0.0)
        assert largest <= tolerance, f"log probabilities differ by {largest}"
        n_same += n
    n_all = sum(len(other.tokens) for other in expected)
    assert n_same >= share * n_all, f"{n_same} of {n_all} tokens before the first that differs"


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.002)


def random_states(checkpoint: Checkpoint, seed: int) -> torch.Tensor:
    shape = (checkpoint.dims.n_audio_ctx, checkpoint.dims.n_audio_state)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_kv(layout: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.n_frames, layout.n_layer, 2, layout.n_head, layout.head_dim)
    return torch.randn(shape, generator=generator)


def write_window(pool: torch.Tensor, pages: tuple[int, ...], kv: torch.Tensor) -> None:
    """pool [page, layer, 2, page_frames, head, head_dim]; kv [frames, layer, 2, head, head_dim]."""
    page_frames = pool.shape[3]
    for page, part in zip(pages, kv.split(page_frames), strict=True):
        pool[page, :, :, : len(part)] = part.permute(1, 2, 0, 3, 4)


def bucketed_attention(own: torch.Tensor, cross: torch.Tensor, *, packed: bool) -> Attentions:
    def fixed(n_rows: int, n_tokens: int, n_sharing: int = 1) -> TorchAttention:
        return TorchAttention(own, cross, packed=packed)

    return replace(torch_attention(own, cross, packed=packed), fixed=fixed)


@contextmanager
def make_stand(
    folder: Path,
    *,
    page_frames: int = 0,
    page_tokens: int = 0,
    kv_dtype: str = "float32",
    export_windows: int = 8,
    landing_windows: int = 4,
    fetch_timeout_s: float = 10.0,
    reads_states: bool = False,
    bucketed: bool = False,
    device: str = "cpu",
    ahead: int | None = None,
    attention: Callable[[torch.Tensor, torch.Tensor], Attentions] | None = None,
    **settings: Any,
) -> Iterator[Stand]:
    """reads_states: encoder states are published, which land in `landing_windows` pages.

    bucketed: decode steps have fixed sizes, as on a GPU. ahead: steps; None: as on the device.
    attention: makes it of the self and the cross pool; on a GPU the settings choose.
    """

    def choose(
        _: str, own: torch.Tensor, cross: torch.Tensor, threads: int, *, packed: bool
    ) -> Any:
        if attention is not None:
            return attention(own, cross)
        make = bucketed_attention if bucketed else torch_attention
        return make(own, cross, packed=packed)

    chosen = DecoderSettings(
        **{"max_batch": 4, "kv_windows": 4, "threads": 1, "dtype": "float32", **settings}
    )
    checkpoint = open_checkpoint(str(folder))
    kv = kv_layout(checkpoint, page_frames, kv_dtype, device)
    layout = states_layout(checkpoint) if reads_states else kv
    n_pages = layout.pages_per_window
    exporter = MemoryExporter(layout, export_windows * n_pages, cluster_key=KEY, device=device)
    options: dict[str, Any] = {
        "cluster_key": KEY,
        "device": device,
        "fetch_timeout_s": fetch_timeout_s,
    }
    n_windows = landing_windows if reads_states else chosen.kv_windows
    importer = memory_importer(layout, n_windows * n_pages, **options)
    kv_pool = None
    if reads_states:
        kv_pool = PagePool(kv, chosen.kv_windows * kv.pages_per_window, device)
    n_ahead = steps_ahead(device) if ahead is None else ahead
    with (
        patch(
            "decoder_worker.build.choose_attention", choose if device == "cpu" else choose_attention
        ),
        patch("decoder_worker.build.steps_ahead", return_value=n_ahead),
    ):
        engine = DecoderEngine(
            checkpoint,
            importer,
            chosen,
            kv_pool=kv_pool,
            page_tokens=page_tokens,
        )
    try:
        yield Stand(checkpoint, exporter, importer, engine)
    finally:
        engine.close()
        importer.close()
        exporter.close()
