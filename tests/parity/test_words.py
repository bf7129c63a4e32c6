"""Words, their times and probabilities are openai-whisper's, for the same weights and tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import whisper
from whisper import timing
from whisper.tokenizer import Tokenizer

from cluster.common.messages import FRAMES_PER_S, TokenAlignment
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.words import split_words
from tests.support.checkpoints import cached_checkpoint, make_checkpoint
from tests.support.references.hugging_face import make_pcm
from tests.support.references.openai_whisper import (
    TRANSCRIBE,
    cross_kv,
    log_mel,
    openai_model,
    openai_vocabulary,
)
from tests.support.workers.model_runners import AlignerBench

DEMO = open_checkpoint("demo").path
SAMPLE_FRAMES = 3000  # mel frames in a window


def reference_tokenizer(folder: Path, language: str = "en") -> Tokenizer:
    model = openai_model(folder)
    with openai_vocabulary(folder):
        return TRANSCRIBE.get_tokenizer(
            model.is_multilingual,
            num_languages=model.num_languages,
            language=language,
            task="transcribe",
        )


def assert_equal_words(
    alignment: TokenAlignment, bench: AlignerBench, expected: Sequence[timing.WordTiming]
) -> None:
    words = split_words(alignment.tokens, bench.tokenizer, "en")
    assert [list(word.tokens) for word in words] == [word.tokens for word in expected]
    assert [word.text for word in words] == [word.word for word in expected]
    first = 0
    for word, other in zip(words, expected, strict=True):
        end = first + len(word.tokens)
        assert alignment.times_s[first] == other.start, word
        assert alignment.times_s[end] == other.end, word
        probability = np.mean(alignment.probs[first:end])
        assert probability == pytest.approx(other.probability, abs=1e-4), word
        first = end


def compare_random_texts(folder: Path, model: Any, lengths: list[tuple[int, int]]) -> None:
    """lengths: of each window its tokens and its mel frames of audio."""
    bench = AlignerBench(folder, len(lengths))
    tokenizer = reference_tokenizer(folder)
    items, expected = [], []
    for window, (n_tokens, content_frames) in enumerate(lengths):
        audio = make_pcm(content_frames / FRAMES_PER_S, seed=window).astype(np.float32) / 32_768
        mel = log_mel(model, audio)
        bench.write(window, cross_kv(model, mel))
        rng = np.random.default_rng(window)
        tokens = rng.integers(300, tokenizer.eot, n_tokens).tolist()
        items.append(bench.item(window, tuple(tokens), content_frames))
        expected.append(timing.find_alignment(model, tokenizer, tokens, mel, content_frames))
    for alignment, words in zip(bench.align(items), expected, strict=True):
        assert_equal_words(alignment, bench, words)


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ("micro", [(1, 3000), (30, 700), (224, 3000), (12, 51), (5, 8)]),
        ("tiny", [(224, 3000), (12, 331)]),
        ("tiny.en", [(60, 2000)]),
    ],
)
def test_random_texts_are_aligned_as_by_the_reference(
    shape: str, lengths: list[tuple[int, int]]
) -> None:
    folder = cached_checkpoint(shape)
    compare_random_texts(folder, openai_model(folder), lengths)


def test_without_alignment_heads_the_upper_half_looks_as_in_the_reference(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, decoder_layers=3)
    model = openai_model(folder)
    heads = whisper.model.Whisper(model.dims).alignment_heads  # its default
    model.register_buffer("alignment_heads", heads, persistent=False)
    file = folder / "generation_config.json"
    config = json.loads(file.read_text())
    del config["alignment_heads"]
    file.write_text(json.dumps(config))
    compare_random_texts(folder, model, [(40, 1500), (3, 3000)])
