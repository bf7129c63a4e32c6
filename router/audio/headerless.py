"""Audio without a header, as `ffmpeg -f s16le -ar 16000 -ac 1` writes it: a header for it.

With this in front, headerless samples are a wav file of unknown length, and everything behind
treats them as any other upload.
"""

from __future__ import annotations

import struct

from cluster.messages import SAMPLE_RATE

SAMPLE_BYTES = 2
BYTES_PER_S = SAMPLE_RATE * SAMPLE_BYTES
UNKNOWN_BYTES = 0xFFFF_FFFF  # as writers to a pipe say it


def wav_head() -> bytes:
    """The 44 bytes of a wav file in front of 16 kHz mono int16 samples, little-endian."""
    pcm, n_channels, bits = 1, 1, 8 * SAMPLE_BYTES
    form = (pcm, n_channels, SAMPLE_RATE, BYTES_PER_S, SAMPLE_BYTES, bits)
    return b"".join(
        (
            struct.pack("<4sI4s", b"RIFF", UNKNOWN_BYTES, b"WAVE"),
            struct.pack("<4sIHHIIHH", b"fmt ", 16, *form),
            struct.pack("<4sI", b"data", UNKNOWN_BYTES),
        )
    )
