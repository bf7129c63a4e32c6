"""The bundled recordings as samples, cut and joined, and as files of any format."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import av

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.demo.samples import sample_path
from tests.support.audio.sounds import joined


@dataclass(frozen=True, slots=True)
class Sentence:
    text: str
    start: float
    end: float


@functools.cache
def pcm_of(name: str) -> Pcm:
    with av.open(str(sample_path(name))) as file:
        return joined(*(frame.to_ndarray().reshape(-1) for frame in file.decode(audio=0)))


def sentences_of(name: str) -> list[Sentence]:
    facts = json.loads(sample_path(name).with_suffix(".json").read_text())
    return [Sentence(**sentence) for sentence in facts["sentences"]]


def sentence_pcm(name: str, index: int, margin_s: float = 0.5) -> Pcm:
    sentence = sentences_of(name)[index]
    first = max(0, round((sentence.start - margin_s) * SAMPLE_RATE))
    return pcm_of(name)[first : round((sentence.end + margin_s) * SAMPLE_RATE)]


def wav_of(pcm: Pcm, size_bytes: int | None = None) -> bytes:
    """A WAV file; with `size_bytes`, a chunk that players skip makes it exactly so long."""
    whole = wav_bytes(pcm)
    if size_bytes is None:
        return whole
    junk = size_bytes - len(whole) - 8
    assert junk >= 0
    assert junk % 2 == 0, "chunks have even lengths"
    riff = (size_bytes - 8).to_bytes(4, "little")
    chunk = b"JUNK" + junk.to_bytes(4, "little") + bytes(junk)
    return whole[:4] + riff + whole[8:36] + chunk + whole[36:]
