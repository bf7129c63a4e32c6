"""What a realtime session was told to do, and what it may be told; values only.

`router.live.protocol.session_updates` reads them from a client's update, and
`router.live.protocol.session_objects` writes them into answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from router.live.interface import LiveConfig
from router.live.protocol.audio_format import G711_RATE, AudioFormat

LOGPROBS = "item.input_audio_transcription.logprobs"

PCM_24_KHZ = AudioFormat()
BETA_FORMATS = {
    "pcm16": PCM_24_KHZ,
    "g711_ulaw": AudioFormat("pcmu", G711_RATE),
    "g711_alaw": AudioFormat("pcma", G711_RATE),
}


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session was told to do.

    noise_reduction: kept and repeated to the client; nothing is reduced, since Whisper was trained
        on noise. live: what transcription is told.
    turn_detection_chosen: the client has said how turns end; until then its model's name does.
    """

    audio: AudioFormat = PCM_24_KHZ
    noise_reduction: str | None = None
    live: LiveConfig = field(default_factory=LiveConfig)
    turn_detection_chosen: bool = False


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names that `model` may have.

    languages: codes of the languages that a model knows; raises ModelNotFoundError.
    are_one: whether two names mean the same model.
    without_vad: the names whose clients end turns themselves.
    """

    languages: Callable[[str], Collection[str]]
    are_one: Callable[[str, str], bool]
    without_vad: Collection[str] = ()
