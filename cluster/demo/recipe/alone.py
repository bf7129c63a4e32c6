"""The model of a checkpoint by itself, greedily, every window padded to 30 s.

Hugging Face's implementation computes it, so that the figures of the files stand beside those of
the server and do not depend on it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.utils import logging

from cluster.demo.recipe.text_tokens import TextTokens
from cluster.messages import SAMPLE_RATE

BATCH = 8
MAX_NEW_TOKENS = 220


class LoneModel:
    """A checkpoint's folder, loaded in float32."""

    def __init__(self, checkpoint: Path) -> None:
        quiet: Any = logging
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(checkpoint)
        model: Any = WhisperForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32
        )
        self._model = model.eval()
        self._tokens = TextTokens(checkpoint)

    @torch.inference_mode()
    def transcribe(
        self, recordings: Sequence[npt.NDArray[np.float32]], timestamps: bool
    ) -> list[str]:
        """Texts of recordings, float32 (n,) at 16 kHz, each of up to 30 s."""
        texts = []
        for i in range(0, len(recordings), BATCH):
            part = [np.asarray(audio) for audio in recordings[i : i + BATCH]]
            features = self._extract(part, sampling_rate=SAMPLE_RATE, return_tensors="pt")
            rows = self._model.generate(
                features.input_features,
                language="en",
                task="transcribe",
                return_timestamps=timestamps,
                num_beams=1,
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
            )
            texts += [self._tokens.decode(row).strip() for row in rows.tolist()]
        return texts
