"""Batched greedy decoding of the demo model, with Whisper's rules, for its own evaluation.

The server has an engine of its own; this one knows nothing of it, so that the recipe measures a
checkpoint without a server.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.demo.recipe.text_tokens import TextTokens
from cluster.demo.recipe.whisper import KeyValues, Whisper

MAX_INITIAL_TIMESTAMP = 50  # steps of 20 ms


@dataclass(frozen=True, slots=True)
class Heard:
    """What one window gave: its text, its segments with times in s, and its tokens."""

    text: str
    segments: list[tuple[float, float, str]]
    no_speech_prob: float
    tokens: list[int]


@torch.inference_mode()
def listen(model: Whisper, mel: Tensor) -> list[KeyValues]:
    """Encode full windows, mel float32 (batch, 80, 3000), into each layer's cross K and V."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        audio = model.encoder(mel, torch.zeros(len(mel), dtype=torch.long), 0.0)
        return model.decoder.project(audio)


@torch.inference_mode()
def transcribe(
    model: Whisper,
    tokens: TextTokens,
    cross: list[KeyValues],
    timed: bool,
    max_tokens: int = 220,
) -> list[Heard]:
    """Decode what `listen` gave, greedily."""
    model.eval()
    prefix = [tokens.sot, tokens.english, tokens.transcribe]
    if not timed:
        prefix.append(tokens.no_timestamps)
    n = len(cross[0][0])
    ids = torch.tensor([prefix] * n)
    new, past = ids, None
    alive = torch.ones(n, dtype=torch.bool)
    no_speech = torch.zeros(n)
    while alive.any() and ids.shape[1] < len(prefix) + max_tokens:
        with torch.autocast("cpu", torch.bfloat16):
            hidden, past = model.decoder.extend(new, cross, past)
            logits = model.decoder.logits(hidden[:, -1]).float()
            if ids.shape[1] == len(prefix):
                first = model.decoder.logits(hidden[:, 0]).float().softmax(dim=-1)
                no_speech = first[:, tokens.no_speech]
        logits[:, tokens.eot + 1 : tokens.timestamp_begin] = -torch.inf
        if timed:
            for row in range(n):
                _apply_timestamp_rules(logits[row], ids[row, len(prefix) :].tolist(), tokens)
        else:
            logits[:, tokens.timestamp_begin :] = -torch.inf
        best = logits.argmax(dim=-1)
        best = torch.where(alive, best, tokens.eot)
        alive = alive & (best != tokens.eot)
        new = best[:, None]
        ids = torch.cat([ids, new], dim=1)
    return [_heard(ids[i, len(prefix) :].tolist(), float(no_speech[i]), tokens) for i in range(n)]


def _apply_timestamp_rules(logits: Tensor, sampled: list[int], tokens: TextTokens) -> None:
    """Whisper's timestamp rules on one row of logits, (n_vocab,), in place."""
    begin = tokens.timestamp_begin
    if not sampled:
        logits[:begin] = -torch.inf
        logits[begin + MAX_INITIAL_TIMESTAMP + 1 :] = -torch.inf
        return
    last_timed = sampled[-1] >= begin
    before_timed = len(sampled) < 2 or sampled[-2] >= begin
    if last_timed and before_timed:
        logits[begin:] = -torch.inf
    elif last_timed:
        logits[: tokens.eot] = -torch.inf
    stamps = [t for t in sampled if t >= begin]
    if stamps:
        # Times never fall; a segment that has begun must have a length.
        least = stamps[-1] if last_timed and not before_timed else stamps[-1] + 1
        logits[begin:least] = -torch.inf
    scores = logits.log_softmax(dim=-1)
    if scores[begin:].logsumexp(dim=-1) > scores[:begin].max():
        logits[:begin] = -torch.inf


def _heard(sampled: list[int], no_speech_prob: float, tokens: TextTokens) -> Heard:
    ids = sampled[: sampled.index(tokens.eot)] if tokens.eot in sampled else sampled
    segments: list[tuple[float, float, str]] = []
    start, text = 0.0, []
    for token in ids:
        if token < tokens.timestamp_begin:
            text.append(token)
            continue
        at = 0.02 * (token - tokens.timestamp_begin)
        if text:
            segments.append((start, at, tokens.decode(text).strip()))
            text = []
        start = at
    return Heard(tokens.decode(ids).strip(), segments, no_speech_prob, ids)
