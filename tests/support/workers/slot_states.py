"""Slots whose rows stand in every state of the grammar of timestamps."""

from __future__ import annotations

import numpy as np

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.sampling.slots import SlotOptions, SlotTable
from tests.support.checkpoints import cached_checkpoint

N = 24  # rows


def make_tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint("tiny"))))


def filled_slots(tokenizer: WhisperTokenizer, seed: int, device: str = "cpu") -> SlotTable:
    rng = np.random.default_rng(seed)
    first, eot = tokenizer.special.timestamp_begin, tokenizer.special.eot
    slots = SlotTable(N, device)
    texts: list[list[int]] = []
    for row in range(N):
        stamps = sorted(rng.integers(first, first + 1501, 4).tolist())
        words = rng.integers(0, eot, 3).tolist()
        states = (
            [],
            [stamps[0]],
            [stamps[0], *words],
            [stamps[0], *words, stamps[1]],
            [stamps[0], *words, stamps[1], stamps[1]],
            [stamps[0], *words, stamps[1], stamps[2], *words],
        )
        texts.append(states[row % len(states)])
    options = [SlotOptions(bool(row % 4), 0.0, 0, 1 + 3 * (row % 3)) for row in range(N)]
    positions = [3 + max(0, len(text) - 1) for text in texts]
    slots.load(range(N), options, texts, positions, first)
    return slots
