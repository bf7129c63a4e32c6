"""The configuration of a realtime session, and the model names that it may use; values only.

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
    """The configuration of a session.

    audio: the format of the client's audio.
    noise_reduction: kept and repeated to the client. No noise is reduced, since Whisper was trained
        on noisy audio.
    live: the configuration that the engine gets.
    turn_detection_chosen: whether the client has chosen how turns end; until then the name of its
        model decides.
    """

    audio: AudioFormat = PCM_24_KHZ
    noise_reduction: str | None = None
    live: LiveConfig = field(default_factory=LiveConfig)
    turn_detection_chosen: bool = False


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What a session has to know of model names.

    languages: codes of the languages of the model of this name; raises ModelNotFoundError.
    are_one: whether two names mean the same model.
    without_vad: the names whose clients end turns by commits, unless they choose otherwise.
    """

    languages: Callable[[str], Collection[str]]
    are_one: Callable[[str, str], bool]
    without_vad: Collection[str] = ()
