"""What one upload may take, and the errors of those who pass it.

Shared by the router and its audio workers; imports no codec and no model, so that the router
process stays light.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.errors import AudioTooShortError, InvalidAudioError, PayloadTooLargeError


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """max_busy_s: processor time for decoding and finding windows.
    memory_bytes: what an audio worker may allocate beyond what it takes when idle.
    when_idle: its process computes only while nobody else on the machine wants its core.
    """

    max_upload_bytes: int
    max_audio_s: float
    min_audio_s: float
    max_busy_s: float
    memory_bytes: int
    when_idle: bool = False

    def too_short(self) -> AudioTooShortError:
        least = f"Minimum audio length is {self.min_audio_s:g} seconds."
        why = least if self.min_audio_s else "There is no audio in it."
        return AudioTooShortError(f"Audio file is too short. {why}", param="file")

    def too_long(self) -> InvalidAudioError:
        return InvalidAudioError(
            f"The audio is longer than this server allows: {self.max_audio_s:g} s.",
            param="file",
            code="audio_too_long",
        )

    def too_slow(self) -> InvalidAudioError:
        return InvalidAudioError(
            f"The audio takes longer than {self.max_busy_s:g} s to decode.", param="file"
        )

    def too_big(self) -> InvalidAudioError:
        megabytes = self.memory_bytes // 2**20
        return InvalidAudioError(
            f"The audio needs more than {megabytes} MB of memory to decode.", param="file"
        )


def too_large(limit_bytes: int, read_bytes: int) -> PayloadTooLargeError:
    """The error for an upload over its limit, in OpenAI's words."""
    return PayloadTooLargeError(
        f"Maximum content size limit ({limit_bytes}) exceeded ({read_bytes} bytes read)"
    )
