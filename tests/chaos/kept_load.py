"""Repeated and new audio mixed, for export pools that hold much less than is asked for again.

Every second request is one of a few pieces of speech; each piece has a text of its own, so that
another window's KV would be seen.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import openai

from benchmark.shared.clips import Clip
from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import HOP_LENGTH, SAMPLE_RATE
from cluster.demo.samples import sample_path
from tests.chaos.load import CLIPS, Load, Sent, reference_texts

TIGHT = {"SPLITSCRIBE_ENCODER__EXPORT_WINDOWS": "3"}  # of a cluster that must evict
PIECE_S, STEP_S = 5.0, 2.0
N_REPEATED = 6  # as many as both encoders hold, if nothing else came
# Silence of so many samples is other audio, with the same features, context and timestamps.
N_VARIANTS = HOP_LENGTH // 2 - 1
SEED = 15


def pieces() -> dict[str, bytes]:
    found = {}
    size, step = round(PIECE_S * SAMPLE_RATE), round(STEP_S * SAMPLE_RATE)
    for recording in ("medium", "long"):
        pcm = Clip(recording, sample_path(recording)).pcm()
        for start in range(0, len(pcm) - size + 1, step):
            found[f"{recording} from {start / SAMPLE_RATE:04.1f} s"] = pcm[
                start : start + size
            ].tobytes()
    return found


def texts_alone(url: str) -> dict[str, str]:
    """What each piece says, asked for alone; of pieces that say the same, the first."""
    texts: dict[str, str] = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for name, pcm in pieces().items():
            answer = client.audio.transcriptions.create(
                model="whisper-1", file=("a.wav", _wav(pcm)), language="en", temperature=0.0
            )
            if answer.text and answer.text not in texts.values():
                texts[name] = answer.text
    assert len(texts) > 3 * N_REPEATED, texts
    return texts


def kept_load(url: str, texts: Mapping[str, str], rate: float) -> Load:
    speech = pieces()
    names = list(texts)
    rng = random.Random(SEED)
    repeated = rng.sample(names, N_REPEATED)
    # Those of the first half of the list come most: some are kept when they come, and some are not.
    shares = [1 / (1 + place) for place in range(N_REPEATED)]
    turns = [
        names[number % len(names)] if number % 2 else rng.choices(repeated, shares)[0]
        for number in range(2 * len(names) + 1)  # odd: each piece is new audio once in two rounds
    ]

    def audio_of(sent: Sent) -> bytes:
        is_new = sent.number % 2 == 1
        n_samples = 1 + sent.number // len(turns) % N_VARIANTS if is_new else 0
        return _wav(speech[sent.clip], n_samples)

    return Load(url, texts, rate, turns, audio_of)


def steady_load(url: str, rate: float, *, kept: bool = False, clips: Sequence[str] = CLIPS) -> Load:
    """Not begun yet. clips: by the names that `lengthened` takes; not of kept audio."""
    if kept:
        return kept_load(url, texts_alone(url), rate)
    return Load(url, reference_texts(url, clips), rate, clips)


def _wav(pcm: bytes, n_samples: int = 0) -> bytes:
    """As a file, with so many samples of silence at its end."""
    return wav_bytes(np.frombuffer(pcm + bytes(2 * n_samples), np.int16))
