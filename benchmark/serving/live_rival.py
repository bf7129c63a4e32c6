"""openai-whisper as a live transcriber of one stream, beside our sessions in the same run."""

from __future__ import annotations

import time

import numpy as np

from benchmark.shared.talks import Talk
from cluster.messages import SAMPLE_RATE


def rival(talk: Talk, model_name: str, hop_s: float, threads: int) -> dict[str, float]:
    """openai-whisper by LocalAgreement-2 on one talk: compute for each second of its audio.

    It knows where the pauses are, so it pays for no voice detector, and its buffer is cut there.
    """
    import torch
    import whisper

    from cluster.model.locate import locate
    from tests.support.references.openai_whisper import (
        openai_model,
        openai_vocabulary,
        reference_options,
    )

    torch.set_num_threads(threads)
    checkpoint = locate(model_name, weights=True)
    model, options = openai_model(checkpoint), reference_options(checkpoint)
    audio = talk.pcm.astype(np.float32) / 32768
    spent_s, updates, start, text, last = 0.0, 0, 0.0, [], [""]
    pauses = [
        (a[1] + 0.25) for a, b in zip(talk.words, talk.words[1:], strict=False) if b[1] - a[1] > 1.0
    ]
    with openai_vocabulary(checkpoint), torch.no_grad():
        now_s = hop_s
        while now_s < talk.duration_s + hop_s:
            end_s = min(now_s, talk.duration_s)
            mel = whisper.log_mel_spectrogram(
                whisper.pad_or_trim(audio[round(start * SAMPLE_RATE) : round(end_s * SAMPLE_RATE)])
            )
            began = time.perf_counter()
            asked = whisper.DecodingOptions(
                language="en",
                without_timestamps=True,
                prefix=" ".join(text) or None,
                **options,
            )
            result = whisper.decode(model, mel, asked)
            spent_s += time.perf_counter() - began
            updates += 1
            words = result.text.split()
            agreed = 0
            for new, old in zip(words, last, strict=False):
                if new != old:
                    break
                agreed += 1
            text, last = words[: max(agreed - 1, len(text))], words
            if pauses and pauses[0] < end_s:
                start, text, last = pauses.pop(0), [], [""]
            now_s += hop_s
    return {"compute_s_per_audio_s": spent_s / talk.duration_s, "updates": updates}
