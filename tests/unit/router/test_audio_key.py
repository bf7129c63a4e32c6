"""A window's name changes with all that shapes its features, and with its owner."""

from __future__ import annotations

import struct

import numpy as np

from cluster.common.messages import FileMel
from router.audio_key import audio_key

PCM = np.arange(-800, 800, dtype=np.int16)
OWNER = b"o" * 32


def test_the_same_audio_of_the_same_owner_has_one_name() -> None:
    longer = np.concatenate([PCM, PCM])
    assert audio_key(PCM, None, OWNER) == audio_key(longer[: len(PCM)], None, OWNER)
    assert audio_key(PCM, None, OWNER) == audio_key(np.repeat(PCM, 2)[::2], None, OWNER)
    assert len(audio_key(PCM, None, b"")) == 32


def test_whatever_differs_gives_another_name() -> None:
    louder = PCM.copy()
    louder[17] += 1
    names = [
        *(audio_key(PCM, None, owner) for owner in (OWNER, b"p" * 32, b"")),
        *(audio_key(pcm, None, OWNER) for pcm in (louder, PCM[:-1], np.append(PCM, np.int16(0)))),
        *(
            audio_key(PCM, FileMel(*mel), OWNER)
            for mel in ((0, 10, 0.5), (160, 10, 0.5), (0, 9, 0.5), (0, 10, 0.25))
        ),
    ]
    assert len(set(names)) == len(names)


def test_samples_cannot_pass_for_what_stands_before_them() -> None:
    mel = FileMel(0, 10, 0.5)
    packed = np.frombuffer(struct.pack("<qqd", 0, 10, 0.5), np.int16)
    assert audio_key(PCM, mel, OWNER) != audio_key(np.append(packed, PCM), None, OWNER)
