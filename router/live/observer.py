"""What is counted of live sessions, in one place: whoever exports metrics reads or extends this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LiveObserver:
    """Counts of one engine, from its start on.

    sessions: open now. refused: not opened, for want of room. updates: answered; overtaken and
    failed ones are counted apart. encode_s: encoder seconds of those answered.
    audio_s: seconds of audio in finished turns.
    """

    sessions: int = 0
    opened: int = 0
    refused: int = 0
    updates: int = 0
    overtaken: int = 0
    failed: int = 0
    encode_s: float = 0.0
    turns: int = 0
    failed_turns: int = 0
    audio_s: float = 0.0

    def session_opened(self) -> None:
        self.sessions += 1
        self.opened += 1

    def session_ended(self) -> None:
        self.sessions -= 1

    def session_refused(self) -> None:
        self.refused += 1

    def update_answered(self, seconds: float, encode_s: float) -> None:
        """seconds: from the call to the answer."""
        self.updates += 1
        self.encode_s += encode_s

    def update_overtaken(self) -> None:
        self.overtaken += 1

    def update_failed(self) -> None:
        self.failed += 1

    def word_told(self, delay_s: float) -> None:
        """delay_s: of one word, from where attention found it in the audio to the newest audio."""

    def turn_ended(self, audio_s: float, *, failed: bool) -> None:
        self.turns += 1
        self.failed_turns += failed
        self.audio_s += audio_s
