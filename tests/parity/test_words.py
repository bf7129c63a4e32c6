"""Words, their times and probabilities are openai-whisper's, for the same weights and tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import whisper
from whisper import timing
from whisper.tokenizer import Tokenizer

from cluster.common.messages import FRAMES_PER_S, TokenAlignment
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.words import split_words
from cluster.demo.samples import SAMPLES, sample_path
from router.transcript import Segment
from router.words import add_words
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


@pytest.mark.parametrize("name", SAMPLES)
def test_words_of_the_samples_are_the_references(name: str) -> None:
    audio, _ = soundfile.read(sample_path(name), dtype="float32")
    script = json.loads(sample_path(name).with_suffix(".json").read_text())
    model, tokenizer, bench = openai_model(DEMO), reference_tokenizer(DEMO), AlignerBench(DEMO, 1)
    window_s = SAMPLE_FRAMES / FRAMES_PER_S
    last_speech_s = 0.0
    for begin_s in np.arange(0.0, script["duration"], window_s).tolist():
        sentences = [
            sentence
            for sentence in script["sentences"]
            if begin_s <= sentence["start"] and sentence["end"] <= begin_s + window_s
        ]
        own = audio[round(begin_s * 16_000) : round((begin_s + window_s) * 16_000)]
        frames = len(own) // 160
        mel = log_mel(model, own)
        bench.write(0, cross_kv(model, mel))
        expected = reference_segments(sentences, bench, begin_s)
        ours = [our_segment(segment) for segment in expected]
        timing.add_word_timestamps(
            segments=expected,
            model=model,
            tokenizer=tokenizer,
            mel=mel,
            num_frames=frames,
            last_speech_timestamp=last_speech_s,
        )
        text = tuple(token for segment in expected for token in segment["tokens"])
        (alignment,) = bench.align([bench.item(0, text, frames)])
        found = add_words(
            ours,
            alignment,
            bench.tokenizer,
            language="en",
            offset_s=begin_s,
            last_speech_s=last_speech_s,
        )
        assert_equal_segments(found, expected)
        last_speech_s = found[-1].words[-1].end


def reference_segments(sentences: Any, bench: AlignerBench, begin_s: float) -> list[dict[str, Any]]:
    return [
        {
            "seek": round(begin_s * FRAMES_PER_S),
            "start": sentence["start"],
            "end": sentence["end"],
            "text": sentence["text"],
            "tokens": bench.tokenizer.encode(" " + sentence["text"]),
        }
        for sentence in sentences
    ]


def our_segment(segment: dict[str, Any]) -> Segment:
    return Segment(
        id=0,
        seek=segment["seek"],
        start=segment["start"],
        end=segment["end"],
        text=segment["text"],
        tokens=tuple(segment["tokens"]),
        temperature=0.0,
        avg_logprob=-0.1,
        compression_ratio=1.0,
        no_speech_prob=0.0,
    )


def assert_equal_segments(found: Sequence[Segment], expected: Sequence[dict[str, Any]]) -> None:
    assert found
    for segment, other in zip(found, expected, strict=True):
        assert (segment.start, segment.end) == (other["start"], other["end"])
        assert [word.word for word in segment.words] == [word["word"] for word in other["words"]]
        for word, theirs in zip(segment.words, other["words"], strict=True):
            assert (word.start, word.end) == (theirs["start"], theirs["end"]), word
            assert word.probability == pytest.approx(theirs["probability"], abs=1e-4), word
