"""Which audio container an upload is, read from its first bytes.

A file is opened with the one demuxer that these bytes name, so neither a file name nor a playlist
can choose another.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import BinaryIO

from cluster.common.messages import SAMPLE_RATE

HEAD_BYTES = 64  # enough to tell a container

MOV_BOXES = frozenset(
    (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"moof", b"styp", b"sidx", b"pnot")
)
MAX_TAGS = 100  # before the audio
EBML_MAGIC = b"\x1a\x45\xdf\xa3"


class Container(StrEnum):
    """The containers that are taken; each value is the name of libav's demuxer."""

    WAV = "wav"
    FLAC = "flac"
    OGG = "ogg"
    MATROSKA = "matroska"
    MOV = "mov"
    MP3 = "mp3"
    AAC = "aac"
    MPEG = "mpeg"


def sniff(file: BinaryIO) -> tuple[Container | None, int]:
    """The container that the first bytes name, if any, and the byte at which it begins.

    Skips ID3 tags, whose texts libav compares with one another for hours. Moves the position.
    """
    start = 0
    for _ in range(MAX_TAGS):
        file.seek(start)
        head = file.read(HEAD_BYTES)
        if not (n_bytes := _id3_bytes(head)):
            break
        start += n_bytes
    return _by_magic(head) or (Container.MP3 if start else None), start


def _by_magic(head: bytes) -> Container | None:
    if head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE":
        return Container.WAV
    if head[:4] == b"fLaC":
        return Container.FLAC
    if head[:4] == b"OggS":
        return Container.OGG
    if head[:4] == EBML_MAGIC:
        return Container.MATROSKA
    if head[4:8] in MOV_BOXES:
        return Container.MOV
    if head[:4] == b"\x00\x00\x01\xba":
        return Container.MPEG
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return _mpeg_audio(head)
    return None


def _mpeg_audio(head: bytes) -> Container | None:
    """Tell ADTS from MPEG audio by the layer bits, after a sync word."""
    if head[1] & 0xF6 == 0xF0:
        return Container.AAC
    layer, bit_rate, rate = head[1] & 0x06, head[2] >> 4, head[2] >> 2 & 3
    return Container.MP3 if layer and bit_rate != 15 and rate != 3 else None


def _id3_bytes(head: bytes) -> int:
    """Length of the ID3v2 tag at the start, 0 without one. It is stored in 7 bits a byte."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    size = 0
    for byte in head[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size + (10 if head[5] & 0x10 else 0)


SAMPLE_BYTES = 2
BYTES_PER_S = SAMPLE_RATE * SAMPLE_BYTES
UNKNOWN_BYTES = 0xFFFF_FFFF  # as written to a pipe


def wav_head() -> bytes:
    """The 44 bytes of a wav file in front of 16 kHz mono int16 samples."""
    pcm, n_channels, bits = 1, 1, 8 * SAMPLE_BYTES
    form = (pcm, n_channels, SAMPLE_RATE, BYTES_PER_S, SAMPLE_BYTES, bits)
    return b"".join(
        (
            struct.pack("<4sI4s", b"RIFF", UNKNOWN_BYTES, b"WAVE"),
            struct.pack("<4sIHHIIHH", b"fmt ", 16, *form),
            struct.pack("<4sI", b"data", UNKNOWN_BYTES),
        )
    )
