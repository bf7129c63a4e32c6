"""Small files that ask for much: endless elements, lying lengths, packed blocks.

Each is built from its container's parts, and well formed but for what it lies about.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping

MOST = 0xFFFF_FFFF


def chunk(name: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    return name + struct.pack("<I", len(body) if length is None else length) + body


def page(packets: bytes, lacing: bytes, *, kind: int = 0, serial: int = 1, nth: int = 0) -> bytes:
    """Of Ogg. kind: 2 begins a stream."""
    head = struct.pack("<4sBBqIII", b"OggS", 0, kind, 0, serial, nth, 0) + bytes([len(lacing)])
    whole = head + lacing + packets
    return whole[:22] + struct.pack("<I", _ogg_crc(whole)) + whole[26:]


def _ogg_crc(content: bytes) -> int:
    crc = 0
    for byte in content:
        crc = (crc << 8 & MOST) ^ _CRC[crc >> 24 ^ byte]
    return crc


def _crc_of(byte: int) -> int:
    crc = byte << 24
    for _ in range(8):
        crc = (crc << 1 ^ (0x04C11DB7 if crc >> 31 else 0)) & MOST
    return crc


_CRC = [_crc_of(byte) for byte in range(256)]


def synchsafe(number: int) -> bytes:
    return bytes(number >> shift & 0x7F for shift in (21, 14, 7, 0))


def id3(*frames: bytes, length: int | None = None) -> bytes:
    body = b"".join(frames)
    return b"ID3\4\0\0" + synchsafe(len(body) if length is None else length) + body


def id3_frame(name: bytes, body: bytes, flags: int = 0) -> bytes:
    return name + synchsafe(len(body)) + struct.pack(">H", flags) + body


Bombs = Iterator[tuple[str, bytes]]


def numbered(name: bytes, n_bytes: int) -> list[bytes]:
    return [b"%b%07d=b" % (name, n) for n in range(n_bytes // (len(name) + 24))]


def many_texts(n_bytes: int) -> bytes:
    texts = (b"\0" + one.replace(b"=", b"\0") for one in numbered(b"a", n_bytes))
    return id3(*(id3_frame(b"TXXX", text) for text in texts))


def filler(n_bytes: int) -> Callable[..., bytes]:
    def filled(head: bytes, piece: bytes, tail: bytes = b"") -> bytes:
        return head + piece * ((n_bytes - len(head) - len(tail)) // len(piece)) + tail

    return filled


def wav(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    form = chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16))
    head, data = b"RIFF" + struct.pack("<I", MOST) + b"WAVE", chunk(b"data", bytes(32_000))
    long = b"RF64" + struct.pack("<I", MOST) + b"WAVE"
    ds64 = struct.pack("<QQQI", 2**63 - 1, 2**63 - 1, 2**62, MOST)
    yield "wav: endless empty chunks", filled(head, chunk(b"junk"), form + data)
    yield "wav: endless empty chunks behind its format", filled(head + form, chunk(b"junk"), data)
    yield "wav: endless lists", filled(head + form, chunk(b"LIST", b"INFOINAM\2\0\0\0a\0"), data)
    names = b"".join(chunk(b"I%03d" % (n % 1000), b"a\0") for n in range(50_000))
    yield "wav: a list of names", head + form + chunk(b"LIST", b"INFO" + names) + data
    yield "wav: endless formats", filled(head, form, data)
    yield "wav: endless cue points", filled(head + form, chunk(b"cue ", bytes(28)), data)
    yield "wav: RF64 with the longest lengths", long + chunk(b"ds64", ds64) + form + data
    yield (
        "wav: RF64 with a table without end",
        filled(long + chunk(b"ds64", ds64, MOST) + form, bytes(12), data),
    )
    yield "wav: a chunk as long as can be", head + form + chunk(b"bext", data, MOST)
    yield "wav: an ID3 tag of texts", head + form + chunk(b"ID3 ", many_texts(n_bytes)) + data
    yield "wav: an ID3 tag as long as can be", head + form + chunk(b"id3 ", id3(length=MOST)) + data
    for what, fields in {
        "65,535 channels": (1, 65_535, 16_000, 32_000, 2, 16),
        "the highest rate": (1, 1, MOST, MOST, 2, 16),
        "no bytes a frame": (1, 1, 16_000, 0, 0, 0),
        "65,535 bytes a frame": (2, 2, 16_000, 32_000, 65_535, 4),
        "65,535 bits": (1, 1, 16_000, 32_000, 2, 65_535),
    }.items():
        yield f"wav: {what}", head + chunk(b"fmt ", struct.pack("<HHIIHH", *fields)) + data


def mp3(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    sound, packed = good["mp3"], zlib.compress(bytes(200_000), 9)
    yield "mp3: a tag of texts", many_texts(n_bytes) + sound
    many = id3_frame(b"APIC", b"\0image/png\0\0\0" + bytes(20))
    yield "mp3: a tag of pictures", id3(filled(b"", many)) + sound
    chapters = filled(b"", id3_frame(b"CHAP", b"a\0" + bytes(16)))
    yield "mp3: a tag of chapters", id3(chapters) + sound
    for times in (1, 100):
        frame = id3_frame(b"TXXX", struct.pack(">I", 200_000) + packed, 0x0009)
        yield f"mp3: {times} packed frames", id3(frame * times) + sound
    lying = id3_frame(b"TXXX", synchsafe(0xFFF_FFFF) + packed, 0x0009)
    yield "mp3: a packed frame that lies", id3(lying) + sound
    yield "mp3: a tag longer than the file", id3(length=0xFFF_FFFF) + sound
    yield "mp3: endless tags", filled(b"", id3(), sound)
    yield "mp3: endless tags of a frame", filled(b"", id3(id3_frame(b"TIT2", b"\0a")), sound)
    xing = bytearray(sound)
    at = max(xing.find(b"Xing"), xing.find(b"Info"))
    xing[at + 4 : at + 16] = struct.pack(">III", 3, MOST, 1)
    yield "mp3: the most frames", bytes(xing)
    yield "mp3: heads of frames alone", filled(b"", b"\xff\xfb\x90\x00")
    yield "mp3: the slowest frames", filled(b"", b"\xff\xe3\x18\xc4" + bytes(68))
    yield "mp3: ones", filled(b"", b"\xff")
    yield "mp3: a frame between zeros", filled(sound[:2000], bytes(4096) + sound[1000:1400])


def aac(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    empty = b"\xff\xf1\x50\x80\x00\xff\xfc"
    yield "aac: empty frames", filled(good["aac"], empty)
    yield "aac: tags between frames", filled(good["aac"], id3() + good["aac"][:400])
    yield "aac: frames that are longer", filled(b"", b"\xff\xf1\x50\x83\xff\xff\xfc")


def ogg(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    opus = good["opus"]
    second = opus.find(b"OggS", 4)
    head = opus[:second]
    yield "ogg: endless empty pages", filled(opus, page(b"", b"", nth=9))
    yield "ogg: endless empty packets", filled(opus, page(b"", bytes(255), nth=9))
    yield "ogg: a packet without end", filled(head, page(bytes(255 * 255), b"\xff" * 255))
    streams = b"".join(page(opus[28:47], b"\x13", kind=2, serial=n) for n in range(n_bytes // 60))
    yield "ogg: endless streams", streams
    yield "ogg: endless streams one after the other", filled(b"", opus)
    yield "ogg: comments", of_comments(opus, n_bytes)
    body = b"OpusTags" + struct.pack("<II", 0, MOST) + bytes(100)
    yield "ogg: more comments than there are", head + page(body, bytes([len(body)])) + opus[second:]
    lying = bytearray(opus[28:47] + bytes(255))
    lying[9], lying[18] = 255, 255
    yield "ogg: 255 channels", page(bytes(lying), b"\xff\x13", kind=2) + opus[second:]
    vorbis = b"\1vorbis" + struct.pack("<IBIiiiBB", 0, 255, MOST, 0, 0, 0, 0xDD, 1)
    yield "ogg: vorbis of 255 channels", page(vorbis, bytes([len(vorbis)]), kind=2) + opus[second:]
    books = b"\5vorbis\xff" + (b"BCV\xff\xff\xff\xff\xff" + b"\x20" * 40) * 256
    setup = page(vorbis.replace(b"\xff" * 5, b"\1\x80\x3e\0\0", 1), b"\x1e", kind=2)
    empty = b"\3vorbis" + bytes(8) + b"\1"
    setup += page(empty, bytes([len(empty)])) + b"".join(_packet_pages(books))
    yield "ogg: vorbis of huge codebooks", setup


def of_comments(opus: bytes, n_bytes: int) -> bytes:
    second = opus.find(b"OggS", 4)
    texts = numbered(b"a", n_bytes)
    comments = b"".join(struct.pack("<I", len(one)) + one for one in texts)
    body = b"OpusTags" + struct.pack("<II", 0, len(texts)) + comments
    return opus[:second] + b"".join(_packet_pages(body)) + opus[second:]


def _packet_pages(packet: bytes) -> Iterator[bytes]:
    most = 255 * 255
    for at in range(0, len(packet), most):
        piece = packet[at : at + most]
        full, rest = divmod(len(piece), 255)
        lacing = b"\xff" * full + (bytes([rest]) if full < 255 else b"")
        yield page(piece, lacing, kind=1 if at else 0, nth=1 + at // most)


def flac(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    sound = good["flac"]
    info = sound[:4] + b"\0" + sound[5:42]  # and the stream's description, which is not the last
    padding, texts = b"\1\0\0\0", numbered(b"a", n_bytes)
    yield "flac: endless empty blocks", filled(info, padding)
    yield "flac: endless application blocks", filled(info, b"\2\0\0\4abcd", sound[42:])
    body = struct.pack("<II", 0, len(texts)) + b"".join(
        struct.pack("<I", len(one)) + one for one in texts
    )
    body = body[: 2**24 - 1]
    yield "flac: comments", info + b"\4" + len(body).to_bytes(3) + body + sound[42:]
    picture = struct.pack(">III", 3, 9, 0) + bytes(4) + struct.pack(">IIIII", 1, 1, 1, 1, MOST)
    block = b"\6" + len(picture).to_bytes(3) + picture
    yield "flac: a picture that lies", info + block + sound[42:]
    small = struct.pack(">II", 3, 9) + b"image/png" + struct.pack(">IIIIIIB", 0, 1, 1, 1, 1, 1, 9)
    block = b"\6" + len(small).to_bytes(3) + small
    yield "flac: endless pictures", filled(info, block, sound[42:])
    seeks = filled(b"", bytes(18))[: 2**24 - 7]
    yield "flac: a table of seeks", info + b"\3" + len(seeks).to_bytes(3) + seeks + sound[42:]
    longest = bytearray(sound)
    longest[21:26] = b"\x0f" + b"\xff" * 4
    yield "flac: the most samples", bytes(longest)
