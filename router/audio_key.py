"""What names a window's audio, so that encoders can tell when they have its KV already.

The name is a digest of all that the router sends of the window and that shapes its features, keyed
by who sent it: two owners of the same audio get different names, so that neither can learn that the
other sent it.
Encoders add what is theirs (`encoder_worker.publisher`).
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from cluster.common.messages import FileMel, Pcm

KEY_BYTES = 32
_FILE_MEL = struct.Struct("<qqd")


def audio_key(pcm: Pcm, file_mel: FileMel | None, owner: bytes) -> bytes:
    """A digest of [n] samples and of what makes them a slice of their file.

    Takes 1 ms for a window of 30 s.

    Args:
        owner: opaque, at most 64 bytes; empty where the API needs no key, as all clients are one
            owner then.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, key=owner, person=b"window's audio")
    digest.update(b"alone" if file_mel is None else b"slice")
    if file_mel is not None:
        digest.update(_FILE_MEL.pack(file_mel.n_before, file_mel.n_frames, file_mel.log_max))
    digest.update(np.ascontiguousarray(pcm).data)
    return digest.digest()
