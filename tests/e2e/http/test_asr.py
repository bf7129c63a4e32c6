"""`/asr`, `/detect-language` and JSON bodies on the whole server: the form endpoint's texts."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import whisper

from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.model.checkpoint import open_checkpoint
from cluster.demo.samples import sample_path
from tests.support.audio.speech import pcm_of
from tests.support.in_process import in_process_server
from tests.support.references.openai_whisper import openai_model, openai_vocabulary

DEMO = open_checkpoint("demo").path
FLOAT32 = {"encoder": {"dtype": "float32", "context": "full"}, "decoder": {"dtype": "float32"}}
SAME_PROBABILITY = 2e-3  # other sums, and silence in front of speech is cut off


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_process_server(FLOAT32, asr_webservice=True) as base:
        yield base


def asr(url: str, content: bytes, path: str = "/asr", **query: str) -> httpx.Response:
    files = {"audio_file": ("audio_file", content)}
    answer = httpx.post(f"{url}{path}", params=query, files=files, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def openai_detects(pcm: Pcm) -> tuple[str, float]:
    with openai_vocabulary(DEMO):
        model = openai_model(DEMO)
        audio = whisper.pad_or_trim(pcm.astype(np.float32) / 32_768)
        mel = whisper.log_mel_spectrogram(audio, model.dims.n_mels)
        _, probs = model.detect_language(mel)
    language = max(probs, key=probs.get)
    return language, probs[language]


@pytest.mark.parametrize("name", ["short", "medium", "long"])
def test_the_language_and_its_probability_are_whispers(url: str, name: str) -> None:
    pcm = pcm_of(name)
    answer = asr(url, pcm.tobytes(), "/detect-language", encode="false").json()
    language, probability = openai_detects(pcm)
    assert answer["language_code"] == language
    assert answer["detected_language"] == "english"
    assert answer["confidence"] == pytest.approx(probability, abs=SAME_PROBABILITY)
    encoded = asr(url, sample_path(name).read_bytes(), "/detect-language").json()
    assert encoded == answer


def test_silence_has_a_language_too(url: str) -> None:
    silence = bytes(2 * 3 * SAMPLE_RATE)
    answer = asr(url, silence, "/detect-language", encode="false").json()
    assert 0 < answer["confidence"] <= 1
