"""Bombs in nested containers, in playlists and in formats that are not taken; and all of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

from tests.support.audio.bombs_of_frames import (
    MOST,
    Bombs,
    aac,
    filler,
    flac,
    id3,
    id3_frame,
    mp3,
    numbered,
    ogg,
    wav,
)


def box(name: bytes, *bodies: bytes, length: int | None = None) -> bytes:
    body = b"".join(bodies)
    return struct.pack(">I", len(body) + 8 if length is None else length) + name + body


def element(name: int, *bodies: bytes) -> bytes:
    body = b"".join(bodies)
    return _ebml_id(name) + struct.pack(">Q", len(body) | 1 << 56) + body


def endless(name: int) -> bytes:
    return _ebml_id(name) + b"\xff"


def _ebml_id(name: int) -> bytes:
    return name.to_bytes((name.bit_length() + 7) // 8)


def bombs(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    """Yield names and files of about `n_bytes` at most. good: files of all `sounds.FORMATS`."""
    for makers in (wav, mp3, aac, ogg, flac, matroska, mov, mpeg, untaken):
        yield from makers(good, n_bytes)
    yield from playlists()


def matroska(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    head = element(0x1A45DFA3, element(0x4282, b"matroska"), element(0x4287, b"\4"))
    sound = element(0xE1, element(0xB5, struct.pack(">d", 16_000.0)), element(0x9F, b"\1"))

    def track(*more: bytes, codec: bytes = b"A_PCM/INT/LIT") -> bytes:
        parts = (element(0xD7, b"\1"), element(0x83, b"\2"), element(0x86, codec), sound, *more)
        return element(0xAE, element(0x73C5, b"\1"), *parts)

    def packed(algorithm: int) -> bytes:
        how = element(0x5034, element(0x4254, bytes([algorithm])))
        coding = element(0x6240, element(0x5031, b"\0"), element(0x5032, b"\1"), how)
        return element(0x6D80, coding)

    def clusters(block: bytes) -> bytes:
        return element(0x1F43B675, element(0xE7, b"\0"), block)

    segment, silence = head + endless(0x18538067), element(0xA3, b"\x81\0\0\x80" + bytes(3200))
    plain = segment + element(0x1654AE6B, track())
    zeros = zlib.compress(bytes(9_900_000), 9)
    block = b"\x81\0\0\x80" + zeros
    with_zlib = segment + element(0x1654AE6B, track(packed(0)))
    yield "mkv: packed blocks", with_zlib + clusters(element(0xA3, block)) * 40
    for algorithm, name in enumerate(("zlib", "bzlib", "lzo", "a head")):
        junk = segment + element(0x1654AE6B, track(packed(algorithm)))
        yield f"mkv: junk that says to be packed by {name}", junk + clusters(silence) * 900
    yield "mkv: void elements of two bytes", filled(plain, b"\xec\x80", clusters(silence))
    yield "mkv: endless clusters", filled(plain, clusters(b""), clusters(silence))
    yield "mkv: clusters without end in one another", filled(plain, endless(0x1F43B675))
    yield "mkv: segments in one another", filled(head, endless(0x18538067))
    laces = element(0xA3, b"\x81\0\0\x82\xff" + bytes(255))
    yield "mkv: blocks of empty laces", filled(plain, clusters(laces))
    yield "mkv: empty blocks", filled(plain, element(0xA3, b"\x81\0\0\x80"))
    yield "mkv: tracks", segment + element(0x1654AE6B, filled(b"", track())) + clusters(silence)
    cue = element(0xBB, element(0xB3, b"\1"), element(0xB7, element(0xF7, b"\1")))
    yield "mkv: cues", plain + element(0x1C53BB6B, filled(b"", cue)) + clusters(silence)
    seek = element(0x4DBB, element(0x53AB, b"\x1c\x53\xbb\x6b"), element(0x53AC, b"\1"))
    yield "mkv: seeks", segment + element(0x114D9B74, filled(b"", seek)) + plain[len(segment) :]
    atom = element(0xB6, element(0x73C4, b"\1"), element(0x91, b"\1"))
    chapters = element(0x1043A770, element(0x45B9, filled(b"", atom)))
    yield "mkv: chapters", plain + chapters + clusters(silence)
    simple = [
        element(0x67C8, element(0x45A3, one[:-2]), element(0x4487, b"a"))
        for one in numbered(b"a", n_bytes)
    ]
    both = element(0x1254C367, element(0x7373, *simple))
    yield "mkv: tags", plain + both + clusters(silence)
    nested = b""
    for _ in range(2_000):
        nested = element(0x67C8, element(0x45A3, b"a"), nested)
    yield "mkv: tags in tags", plain + element(0x1254C367, element(0x7373, nested))
    file = element(0x61A7, element(0x466E, b"a"), element(0x465C, b"a"), element(0x46AE, b"\1"))
    yield "mkv: attachments", plain + element(0x1941A469, filled(b"", file)) + clusters(silence)
    private = element(0x63A2, bytes(100_000))
    yield "mkv: private data", segment + element(0x1654AE6B, track(private, codec=b"A_VORBIS"))


def mov(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    m4a = good["m4a"]
    at = m4a.find(b"moov") - 4
    size = struct.unpack(">I", m4a[at : at + 4])[0]
    before, moov, after = m4a[:at], m4a[at + 8 : at + size], m4a[at + size :]

    def with_index(*more: bytes) -> bytes:
        return before + box(b"moov", moov, *more) + after

    items = b"".join(
        box(b"----", box(b"mean", bytes(4), b"a"), box(b"name", bytes(4), one[:-2]))
        for one in numbered(b"a", n_bytes)
    )
    meta = box(b"meta", bytes(4), box(b"hdlr", bytes(8), b"mdir", bytes(13)))
    yield "mp4: tags", with_index(box(b"udta", meta, box(b"ilst", items)))
    within = box(b"meta", bytes(4), box(b"ilst", items))
    yield "mp4: tags in a meta box", with_index(box(b"udta", within))
    keys = filled(b"", box(b"mdta", b"a"))
    count = struct.pack(">II", 0, MOST)
    lying = box(b"meta", bytes(4), box(b"keys", count, keys))
    yield "mp4: more keys than there are", with_index(lying)
    trak = moov[moov.find(b"trak") - 4 :]
    trak = trak[: struct.unpack(">I", trak[:4])[0]]
    yield "mp4: tracks", with_index(filled(b"", trak))
    header, run = struct.pack(">II", 0, 1), struct.pack(">III", 0x200, 1, 1)
    traf = box(b"traf", box(b"tfhd", header), box(b"trun", run))
    fragment = box(b"moof", box(b"mfhd", bytes(8)), traf)
    extends = box(b"mvex", box(b"trex", struct.pack(">6I", 0, 1, 1, 1, 1, 0)))
    sizes = moov.find(b"stsz")
    table = b"stz2" + bytes(7) + b"\4" + struct.pack(">I", 400_000_000)
    index = box(b"moov", moov[:sizes] + table + moov[sizes + len(table) :])
    yield "mp4: a table of more samples than there are", before + index + after
    yield "mp4: endless fragments", filled(with_index(extends), fragment)
    yield "mp4: endless free boxes", filled(before, box(b"free"), m4a[at:])
    yield "mp4: endless empty indices", filled(m4a, box(b"moov"))
    nested = b""
    for _ in range(3_000):
        nested = box(b"udta", nested)
    yield "mp4: boxes in boxes", with_index(nested)
    sidx = struct.pack(">6IHH", 0, 1, 1, 0, 0, 0, 0, 65_535) + bytes(12 * 65_535)
    yield "mp4: indices of segments", filled(m4a, box(b"sidx", sidx))
    chapters = filled(b"", b"\0" * 8 + b"\1a")
    chpl = box(b"chpl", b"\1" + bytes(7) + b"\xff" + chapters)
    yield "mp4: chapters", with_index(box(b"udta", chpl))
    edits = filled(b"", struct.pack(">III", MOST, 0, 0x10000))
    elst = box(b"elst", struct.pack(">II", 0, len(edits) // 12), edits)
    edited = moov.replace(trak, box(b"trak", trak[8:], box(b"edts", elst)))
    yield "mp4: edits", before + box(b"moov", edited) + after
    yield "mp4: data as long as can be", m4a[:at] + box(b"mdat", struct.pack(">Q", 2**63), length=1)
    link = box(b"url ", b"\0\0\0\0http://127.0.0.1:9/a\0")
    url = m4a.find(b"url ")
    yield "mp4: data at an address", m4a.replace(m4a[url - 4 : url + 8], link[:12])


def mpeg(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    pack = b"\0\0\1\xba\x44\0\4\0\4\1\0\0\3\xf8"
    yield "mpeg: endless packs", filled(b"", pack)
    yield "mpeg: endless packs before sound", filled(b"", pack, good["mpeg"])
    yield "mpeg: empty packets", filled(good["mpeg"], b"\0\0\1\xc0\0\0")
    yield "mpeg: a map without end", filled(pack, b"\0\0\1\xbc\xff\xff" + b"\xff" * 60)
    streams = b"".join(b"\0\0\1%c\0\3\x80\0\0" % n for n in range(0xC0, 0xF0))
    yield "mpeg: streams of every number", filled(pack, streams)


def playlists() -> Bombs:
    address = b"http://127.0.0.1:9/a.wav"
    yield "a playlist", b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n" + address + b"\n"
    yield "a playlist of a file", b"#EXTM3U\n#EXTINF:9,\n/etc/passwd\n#EXT-X-ENDLIST\n"
    yield "a list of files", b"ffconcat version 1.0\nfile /etc/passwd\nfile " + address + b"\n"
    yield "concat", b"concat:/etc/passwd|/etc/hostname"
    yield "subfile", b"subfile,,start,0,end,9,,:/etc/passwd"
    yield "an address", address
    yield "a session", b"v=0\nc=IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n"
    manifest = b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period>'
    manifest += b"<AdaptationSet><Representation><BaseURL>" + address + b"</BaseURL>"
    manifest += b"</Representation></AdaptationSet></Period></MPD>"
    yield "a manifest", manifest
    yield "entities", b'<!DOCTYPE a [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><a>&b;</a>'
    yield "a playlist behind a tag", id3(id3_frame(b"TIT2", b"\0a")) + b"#EXTM3U\n" + address


def untaken(good: Mapping[str, bytes], n_bytes: int) -> Bombs:
    filled = filler(n_bytes)
    for name, head in {
        "amr": b"#!AMR\n",
        "caf": b"caff\0\1\0\0desc" + struct.pack(">q", 32),
        "aiff": b"FORM\xff\xff\xff\xffAIFFCOMM",
        "asf": bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c") + b"\xff" * 14,
        "avi": b"RIFF\xff\xff\xff\xffAVI LIST\xff\xff\xff\xffhdrl",
        "flv": b"FLV\1\4\0\0\0\x09\0\0\0\0",
        "mpeg-ts": b"\x47\x40\0\x10",
        "au": b".snd\0\0\0\x18\xff\xff\xff\xff\0\0\0\3",
        "gzip": b"\x1f\x8b\x08\0",
        "zip": b"PK\3\4",
        "nothing": b"",
    }.items():
        yield f"{name} and zeros", filled(head, bytes(188))
        yield f"{name} and itself", filled(head, head.ljust(188, b"\xff"))
