"""What a request asks of the speakers: how they are told apart, how many, and by what names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Way = Literal["voice", "channel"]


@dataclass(frozen=True, slots=True)
class SpeakerOptions:
    """How speakers are told apart.

    by: their voices, or the channels of the file; None: they are not.
    num_speakers, min_speakers, max_speakers: how many voices there are; None: that is found.
    names: of known voices, each with the file in `references` that it is heard in; or of the
        channels, in their order.
    """

    by: Way | None = None
    num_speakers: int | None = None
    min_speakers: int | None = None
    max_speakers: int | None = None
    names: tuple[str, ...] = ()
    references: tuple[bytes, ...] = field(default=(), repr=False)


NO_SPEAKERS = SpeakerOptions()
