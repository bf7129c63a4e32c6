"""Behind a prefix the tokens are openai-whisper's, and so is where its attention has its peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import whisper
from torch import Tensor
from whisper.decoding import DecodingOptions
from whisper.model import disable_sdpa

from cluster.common.messages import SAMPLE_RATE, DecodeOptions, DecodeResult, QualityGates
from cluster.common.model.checkpoint import open_checkpoint
from tests.support.audio.speech import pcm_of
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import make_pcm
from tests.support.references.openai_whisper import (
    cross_kv,
    log_mel,
    openai_model,
    openai_vocabulary,
    reference_options,
)
from tests.support.workers.decoder_engines import ANSWER_S, Stand, make_stand

DEMO = open_checkpoint("demo").path
N_TOKENS = 40
NO_GATES = QualityGates(None, None, None)


def speech(begin_s: float, seconds: float) -> np.ndarray[Any, Any]:
    begin = round(begin_s * SAMPLE_RATE)
    pcm = pcm_of("long")[begin : begin + round(seconds * SAMPLE_RATE)]
    return pcm.astype(np.float32) / 32_768


def noise(seconds: float) -> np.ndarray[Any, Any]:
    return make_pcm(seconds, seed=4).astype(np.float32) / 32_768


def theirs(folder: Path, mel: Tensor, prefix: tuple[int, ...], *, blank: bool) -> tuple[int, ...]:
    """blank: end-of-text and a blank may follow the prefix at once."""
    model = openai_model(folder)
    options = DecodingOptions(
        language="en",
        without_timestamps=True,
        prefix=list(prefix),
        sample_len=N_TOKENS,
        suppress_blank=not blank,
        **reference_options(folder),
    )
    with openai_vocabulary(folder):
        return tuple(whisper.decode(model, mel, options).tokens)


def ours(stand: Stand, kv: Tensor, prefix: tuple[int, ...] = (), **options: Any) -> DecodeResult:
    chosen = {"timestamps": False, "max_new_tokens": N_TOKENS, "gates": NO_GATES, **options}
    handle = stand.publish(0, kv)
    request = stand.request(handle=handle, prefix_tokens=prefix, **chosen)
    return stand.engine.submit(request).result(ANSWER_S)


@pytest.mark.parametrize(
    ("folder", "audio"),
    [(DEMO, speech(0.0, 9.0)), (cached_checkpoint("micro"), noise(5.0))],
    ids=["bundled", "random"],
)
def test_tokens_behind_a_prefix_are_the_reference_s(
    folder: Path, audio: np.ndarray[Any, Any]
) -> None:
    """Behind the whole text ours ends; the reference goes on or divides by zero."""
    model = openai_model(folder)
    mel = log_mel(model, audio)
    kv = cross_kv(model, mel)
    with make_stand(folder, max_batch=1, kv_windows=1, export_windows=1) as stand:
        free = ours(stand, kv)
        assert free.tokens[: N_TOKENS - 1] == theirs(folder, mel, (), blank=False)[: N_TOKENS - 1]
        if free.finish_reason == "stop":
            assert ours(stand, kv, free.tokens).tokens == ()
        for prefix in (free.tokens[:1], free.tokens[:12], tuple(range(300, 310))):
            found = ours(stand, kv, prefix)
            assert len(found.tokens) > 3
            assert found.tokens == theirs(folder, mel, prefix, blank=False), prefix
        assert ours(stand, kv, free.tokens[4:9]).tokens == theirs(
            folder, mel, free.tokens[4:9], blank=True
        )


def test_with_timestamps_no_word_is_lost_behind_a_prefix() -> None:
    """As much of each free decode as there may be is forced: the rest is what was there."""
    model = openai_model(DEMO)
    with make_stand(DEMO, max_batch=1, kv_windows=1, export_windows=1) as stand:
        for begin_s in (0.0, 12.0):
            kv = cross_kv(model, log_mel(model, speech(begin_s, 8.0)))
            free = ours(stand, kv, timestamps=True)
            assert len(free.tokens) > 10
            for n in range(1, len(free.tokens) + 1, 7):
                behind = ours(stand, kv, free.tokens[:n], timestamps=True)
                assert behind.tokens == free.tokens[n:], f"{n} tokens at {begin_s} s"


@torch.inference_mode()
def reference_looks(model: Any, mel: Tensor, tokens: list[int]) -> Tensor:
    """The alignment heads' mean cross-attention after each of `tokens`: [len(tokens), 1500]."""
    looks: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_: Any, inputs: Any, outputs: Any) -> None:
            looks[layer] = outputs[-1][0].softmax(-1)  # [head, n_tokens, 1500]

        return hook

    hooks = [
        block.cross_attn.register_forward_hook(keep(layer))
        for layer, block in enumerate(model.decoder.blocks)
    ]
    try:
        with disable_sdpa():
            model(mel[None], torch.tensor([tokens]))
    finally:
        for hook in hooks:
            hook.remove()
    heads = model.alignment_heads.indices().T.tolist()
    return torch.stack([looks[layer][head] for layer, head in heads]).mean(0)


@pytest.mark.parametrize(
    ("folder", "audio", "options"),
    [
        (DEMO, speech(0.0, 9.0), {}),
        (DEMO, speech(12.0, 9.0), {"timestamps": True, "beam_size": 3, "words": True}),
        (cached_checkpoint("micro"), noise(5.0), {"prompt_tokens": tuple(range(300, 340))}),
    ],
    ids=["bundled", "beams and words", "random, with context"],
)
def test_peaks_are_where_the_reference_s_attention_is_largest(
    folder: Path, audio: np.ndarray[Any, Any], options: dict[str, Any]
) -> None:
    model = openai_model(folder)
    mel = log_mel(model, audio)
    kv = cross_kv(model, mel)
    with make_stand(folder, max_batch=3, kv_windows=1, export_windows=1) as stand:
        free = ours(stand, kv, **options)
        prefix = free.tokens[:4]
        found = ours(stand, kv, prefix, peaks=True, **options)
        prompts = stand.engine._prompts
        asked = DecodeOptions(prefix_tokens=prefix, **{"timestamps": False, **options})
        prompt = prompts.prompt(asked, "en").tokens
    assert free.peak_positions is None
    assert found.peak_positions is not None
    assert len(found.peak_positions) == len(found.tokens) > 3
    looks = reference_looks(model, mel, [*prompt, *found.tokens])[len(prompt) - 1 : -1]
    for token, peak in enumerate(found.peak_positions):
        assert looks[token, peak] >= looks[token].max() - 1e-5, f"token {token} at {peak}"
    if folder == DEMO:
        assert max(found.peak_positions) <= 50 * 9.0 + 5, "hardly anything looks at the padding"
        assert np.corrcoef(range(len(found.tokens)), found.peak_positions)[0, 1] > 0.9
