"""Counts what live sessions do, in one place, and records it in the router's metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.common.metrics import ROUTER_METRICS, Recorder, silent_recorder


@dataclass(slots=True)
class LiveObserver:
    """Counts of one engine, from its start on.

    sessions: open now. refused: sessions that were not opened because the workers had no time.
    updates: answered ones; overtaken and failed ones are counted apart. encode_s: encoder seconds
    of answered updates. audio_s: seconds of audio in turns that ended. recorder: of the metrics.
    """

    recorder: Recorder = field(default_factory=lambda: silent_recorder(ROUTER_METRICS))

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

    def update_answered(self, seconds: float, encode_s: float, hop_s: float) -> None:
        """seconds: from the call to the answer. hop_s: the hop that the load asks for."""
        self.updates += 1
        self.encode_s += encode_s
        self._update("answered")
        self.recorder.observe("splitscribe_live_update_seconds", seconds)
        self.recorder.set("splitscribe_live_hop_seconds", hop_s)

    def update_overtaken(self) -> None:
        self.overtaken += 1
        self._update("overtaken")

    def update_failed(self) -> None:
        self.failed += 1
        self._update("failed")

    def _update(self, outcome: str) -> None:
        self.recorder.add("splitscribe_live_updates_total", outcome=outcome)

    def word_told(self, delay_s: float) -> None:
        """delay_s: audio after the attention peak of a word, at the time when it was emitted."""
        self.recorder.observe("splitscribe_live_word_delay_seconds", delay_s)

    def turn_ended(self, audio_s: float, *, failed: bool) -> None:
        self.turns += 1
        self.failed_turns += failed
        self.audio_s += audio_s
        outcome = "failed" if failed else "completed"
        self.recorder.add("splitscribe_live_turns_total", outcome=outcome)
        self.recorder.add("splitscribe_live_audio_seconds_total", audio_s)
