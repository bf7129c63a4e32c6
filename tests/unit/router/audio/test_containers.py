"""What a container says of itself is read without libav, and bounded."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from router.audio.containers import Container, forged_table, missing_bytes, sniff
from tests.support.audio.sounds import FORMATS, encode_as, tone


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_file_misses_nothing(name: str, tmp_path: Path) -> None:
    with encode_as(name, tmp_path, tone(2.0)).open("rb") as file:
        container, start = sniff(file)
        assert container is not None
        assert missing_bytes(file, container, start) == 0


@pytest.mark.parametrize("container", Container)
def test_headers_of_noise_never_crash_the_check(container: Container, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    path = tmp_path / "upload"
    heads = [b"", b"RIFF", b"OggS\0", b"\x1a\x45\xdf\xa3", b"\0\0\0\x18ftyp", b"ID3\x04", b"\xff"]
    for size in (0, 1, 5, 12, 30, 400):
        for head in heads:
            path.write_bytes(head + rng.bytes(size))
            with path.open("rb") as file:
                assert missing_bytes(file, container) >= 0
                forged_table(file)


def test_what_has_too_many_elements_is_not_walked_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.audio.containers.MAX_ELEMENTS", 1000)
    elements = io.BytesIO(b"\x1a\x45\xdf\xa3\x80" + b"\xec\x80" * 10_000)
    assert missing_bytes(elements, Container.MATROSKA) == 0
    assert elements.tell() < 2100
    boxes = io.BytesIO(b"\0\0\0\x08moov" + b"\0\0\0\x08skip" * 10_000)
    assert missing_bytes(boxes, Container.MOV) == 0
    assert boxes.tell() < 8100
    assert forged_table(boxes) == "it has too many boxes"
