"""Which audio container an upload is, and whether its end is missing: both read from its bytes.

A file is opened with the one demuxer that its first bytes name, so neither a file name nor a
playlist can choose another. Most decoders play a truncated file without complaint; `missing_bytes`
compares what the container declares with what is there. `forged_table` finds what makes libav ask
for gigabytes. A container that declares no size (a live recording, raw MPEG audio) is found
truncated only where the cut goes through a page or an element, and not where it has too many to
walk them.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import islice
from typing import BinaryIO

from cluster.common.messages import SAMPLE_RATE

HEAD_BYTES = 64  # what `sniff` needs when no ID3 tag comes first

MAX_OGG_PAGE_BYTES = 27 + 255 + 255 * 255
STREAMED_WAV_BYTES = 0x7FFF_0000  # from here up, writers to a pipe mean "unknown"
WAV_SLACK_BYTES = 1024  # some writers count a header or a pad byte too many
MP3_SLACK_BYTES = 2048  # a frame and a tag that was stripped afterwards

MOV_BOXES = frozenset(
    (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"moof", b"styp", b"sidx", b"pnot")
)
# Boxes in which libav looks for others; it takes a `free` one for the index, too.
MOV_PARENTS = frozenset(
    (
        *(b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf", b"mvex", b"edts", b"dinf"),
        *(b"udta", b"meta", b"tref", b"wave", b"sinf", b"schi", b"free", b"hoov"),
    )
)
MOV_SAMPLES = frozenset((b"stsz", b"stz2", b"trun"))  # tables with an entry for each sample
# Bytes of an entry of each table that says how many it has, at the least.
MOV_TABLES = {
    **dict.fromkeys(MOV_SAMPLES, 0),
    **dict.fromkeys((b"stco", b"stss", b"stps"), 4),
    **dict.fromkeys((b"stts", b"ctts", b"co64"), 8),
    **dict.fromkeys((b"stsc", b"elst"), 12),
}
_TABLE_NAMES = re.compile(b"|".join(MOV_TABLES))
MKV_SEGMENT = 0x18538067
MKV_CLUSTER = 0x1F43B675
MAX_TAGS = 100  # before the audio
MAX_ELEMENTS = 200_000  # or boxes, that are walked: each takes a microsecond or two
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
    """The container by its first bytes, or None where they match none, and where it begins.

    ID3 tags before it are left out: libav compares each text in them with all before it, for hours
    where there are many. Moves the position.
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
    """Length of the ID3v2 tag at the start; its size is 4 bytes of 7 bits each."""
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    size = 0
    for byte in head[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size + (10 if head[5] & 0x10 else 0)


def missing_bytes(file: BinaryIO, container: Container, start: int = 0) -> int:
    """What the container, from byte `start` on, declares beyond the file's end. Reads headers and
    moves the position."""
    check = _CHECKS.get(container)
    return max(0, check(file, file.seek(0, os.SEEK_END), start)) if check else 0


def _missing_wav(file: BinaryIO, size: int, _: int) -> int:
    long_bytes = 0
    for name, body, length in _wav_chunks(file):
        if name == b"ds64" and (sizes := _read(file, body, 16)):
            long_bytes = struct.unpack("<QQ", sizes)[1]
        if name == b"data":
            missing = body + (long_bytes if length >= STREAMED_WAV_BYTES else length) - size
            return missing if missing > WAV_SLACK_BYTES else 0
    return 0


def _wav_chunks(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """(name, where the body begins, its length)."""
    form, position = _read(file, 0, 4), 12
    while head := _read(file, position, 8):
        name, length = struct.unpack("<4sI", head)
        yield name, position + 8, length
        if (form, name, length) == (b"RIFF", b"data", 0):
            return  # to libav, all that follows is audio
        position += 8 + length + length % 2


def _missing_ogg(file: BinaryIO, size: int, _: int) -> int:
    """Check that the last page is complete. Its end-of-stream flag is no help: players and
    recorders leave it out."""
    start = max(0, size - 2 * MAX_OGG_PAGE_BYTES)
    file.seek(start)
    tail = file.read(size - start)
    page = tail.rfind(b"OggS\x00")
    if page < 0:
        return 1 if tail.rfind(b"Ogg", -4) >= 0 or tail[-1:] == b"O" else 0
    table_at = page + 27
    if len(tail) < table_at or len(tail) < table_at + tail[page + 26]:
        return 1
    table = tail[table_at : table_at + tail[page + 26]]
    missing: int = table_at + len(table) + sum(table) - len(tail)
    return missing


def _missing_matroska(file: BinaryIO, size: int, _: int) -> int:
    """Walk the elements. A Segment or Cluster of unknown size (a live recording) is entered."""
    position = 0
    for _ in range(MAX_ELEMENTS):
        if position >= size:
            break
        element, length, body = _ebml_header(file, position)
        if element is None:
            return body - size
        if length is None:
            if element not in (MKV_SEGMENT, MKV_CLUSTER):
                return 0
            position = body
            continue
        position = body + length
        if element == MKV_SEGMENT or position > size:
            return position - size
    return 0


def _ebml_header(file: BinaryIO, position: int) -> tuple[int | None, int | None, int]:
    """(id, None where the file ends in the header; length, or None if unknown; where the body
    begins).
    """
    file.seek(position)
    head = file.read(12)
    id_bytes = 9 - head[0].bit_length()
    if len(head) <= id_bytes:
        return None, None, position + id_bytes + 1
    size_bytes = 9 - head[id_bytes].bit_length()
    body = position + id_bytes + size_bytes
    if len(head) < id_bytes + size_bytes:
        return None, None, body
    element = int.from_bytes(head[:id_bytes])
    value = int.from_bytes(head[id_bytes : id_bytes + size_bytes])
    all_ones = (1 << 7 * size_bytes) - 1
    length = value & all_ones
    return element, None if length == all_ones else length, body


def _missing_mov(file: BinaryIO, size: int, _: int) -> int:
    indexed = False
    for name, body, end in islice(_mov_boxes(file, 0, size), MAX_ELEMENTS):
        if end < body or (name not in MOV_BOXES and not name.isalnum()):
            break  # not a box: something was appended to the file
        indexed = indexed or name in (b"moov", b"moof")
        if end > size and name in MOV_BOXES:
            return end - size
    return 0 if indexed else 1


def _mov_boxes(file: BinaryIO, position: int, span_end: int) -> Iterator[tuple[bytes, int, int]]:
    """(name, where the body begins, where the box ends: by itself, or with its parent).

    The last one may end behind the span, or before its body, as no real one does.
    """
    while position + 8 <= span_end:
        length, name = struct.unpack(">I4s", _read(file, position, 8))
        body = position + 8
        if length == 1 and (large := _read(file, body, 8)):
            (length,), body = struct.unpack(">Q", large), body + 8
        end = position + length if length else span_end
        yield name, body, end
        if end < body:
            return
        position = end


def forged_table(file: BinaryIO) -> str | None:
    """What is wrong with the boxes of an MP4 file, where a table states more than there can be:
    every sample takes a byte of the file, in whichever track and table.
    """
    size = file.seek(0, os.SEEK_END)
    n_boxes = n_samples = 0
    spans = [(0, size)]
    while spans:
        position, span_end = spans.pop()
        for name, body, end in _mov_boxes(file, position, span_end):
            end = min(end, span_end)
            if end < body:
                break
            n_boxes += 1
            if n_boxes > MAX_ELEMENTS or name == b"cmov":
                return "it has too many boxes" if name != b"cmov" else "its index is compressed"
            if name in MOV_PARENTS:
                spans.append((body, end))
                if name == b"meta":  # which may have a version first
                    spans.append((body + 4, end))
            for table, start in _mov_tables(file, name, body, end):
                n_entries = _mov_entries(file, table, start)
                n_samples += n_entries if table in MOV_SAMPLES else 0
                if n_samples > size or n_entries * MOV_TABLES[table] > end - start:
                    return f"its table {table.decode()!r} says to have {n_entries} entries"
    return None


def _mov_tables(file: BinaryIO, name: bytes, body: int, end: int) -> Iterator[tuple[bytes, int]]:
    """(name, where the body begins) of the table that a box is, or of all in sample descriptions:
    each codec has other fields before the boxes in its description.
    """
    if name in MOV_TABLES:
        yield name, body
    elif name == b"stsd":
        file.seek(body)
        for found in _TABLE_NAMES.finditer(file.read(end - body)):
            yield found[0], body + found.end()


def _mov_entries(file: BinaryIO, table: bytes, body: int) -> int:
    """Behind version and flags, and behind the sizes of samples if in one."""
    number = _read(file, body + (8 if table in (b"stsz", b"stz2") else 4), 4)
    return int.from_bytes(number)


def _missing_mp3(file: BinaryIO, size: int, start: int) -> int:
    """By the byte count of the Xing or Info header, where the encoder wrote one."""
    file.seek(start)
    frame = file.read(256)
    at = max(frame.find(b"Xing"), frame.find(b"Info"))
    if at < 0 or len(frame) < at + 16:
        return 0
    flags, first, second = struct.unpack_from(">III", frame, at + 4)
    if not flags & 2:
        return 0
    missing: int = start + (second if flags & 1 else first) - size
    return missing if missing > MP3_SLACK_BYTES else 0


def _read(file: BinaryIO, position: int, n_bytes: int) -> bytes:
    """Exactly `n_bytes`, or nothing when the file ends before them."""
    file.seek(position)
    data = file.read(n_bytes)
    return data if len(data) == n_bytes else b""


_CHECKS: dict[Container, Callable[[BinaryIO, int, int], int]] = {
    Container.WAV: _missing_wav,
    Container.OGG: _missing_ogg,
    Container.MATROSKA: _missing_matroska,
    Container.MOV: _missing_mov,
    Container.MP3: _missing_mp3,
}


SAMPLE_BYTES = 2
BYTES_PER_S = SAMPLE_RATE * SAMPLE_BYTES
UNKNOWN_BYTES = 0xFFFF_FFFF  # as writers to a pipe say it


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
