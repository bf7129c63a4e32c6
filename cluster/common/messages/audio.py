"""How audio is counted: sample rate, window, mel frames and encoder positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the command line has this module, and no use for NumPy
    import numpy as np
    from numpy.typing import NDArray


SAMPLE_RATE = 16_000  # Hz, what every Whisper checkpoint takes
WINDOW_S = 30  # seconds in one encoder window
WINDOW_SAMPLES = WINDOW_S * SAMPLE_RATE  # 480000 samples
HOP_LENGTH = 160  # samples from one mel frame to the next, 10 ms
FRAMES_PER_S = SAMPLE_RATE // HOP_LENGTH  # 100 mel frames
WINDOW_FRAMES = WINDOW_SAMPLES // HOP_LENGTH  # 3000 mel frames in a window
WINDOW_POSITIONS = WINDOW_FRAMES // 2  # 1500 encoder positions of 20 ms
MEL_CONTEXT_SAMPLES = 2 * HOP_LENGTH  # an n_fft of 400 looks 200 samples to each side
Pcm: TypeAlias = "NDArray[np.int16]"  # [n_samples], mono at SAMPLE_RATE


@dataclass(frozen=True, slots=True)
class FileMel:
    """What makes a window's log-mel a slice of its whole file's, as openai/whisper computes it.

    n_before: samples of `pcm` in front of the window's own, a multiple of the hop: true audio, so
        that no frame of the window sees an edge. 0 at the file's start. Samples behind the
        window's own may follow likewise; where they end, the file does.
    n_frames: mel frames of the window, 1 to 3000. All later frames are 0.0 after scaling, which
        is no silence, but what openai/whisper pads with.
    log_max: largest log10 of the file's mel power; what is 8 below it is cut.
    """

    n_before: int
    n_frames: int
    log_max: float
