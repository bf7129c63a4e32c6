"""Live transcription with one model, for all sessions of this process.

Builds what the sessions share, opens and closes them, and refuses new ones while the workers have
too much to do. The other modules do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.errors import OverloadedError
from cluster.common.metrics import Recorder
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import LiveSettings
from cluster.common.tracing import NO_TRACER, Tracer
from router.live.activity import VoiceActivity
from router.live.interface import LiveConfig
from router.live.observer import LiveObserver
from router.live.policies import Policy
from router.live.schedule import DEFAULT_DELAY, DELAY_PROFILES, Pace
from router.live.session import Session
from router.live.update_decoder import SessionParts, UpdateDecoder
from router.pipeline import Pipeline

RETRY_AFTER_S = 10.0


class LiveSessions:
    """Implements `router.live.interface.LiveEngine`."""

    def __init__(
        self,
        pipeline: Pipeline,
        tokenizer: WhisperTokenizer,
        settings: LiveSettings,
        *,
        policy: Policy,
        n_text_ctx: int,
        activity: VoiceActivity,
        context_for: Callable[[int], int] | None = None,
        recorder: Recorder | None = None,
        tracer: Tracer = NO_TRACER,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Build what the sessions share.

        Args:
            pipeline: one that keeps no KV for reuse, since the same audio never comes again.
            activity: voice activity of all engines of the process; its maker closes it.
            recorder: of the router's metrics. tracer: begins a trace for each turn.
            context_for: encoder positions by mel frames, as in `WindowAudio.of_samples`.
        """
        self.observer = LiveObserver() if recorder is None else LiveObserver(recorder)
        self.pace = Pace(settings.min_hop_s, settings.max_hop_s, clock)
        self._sessions: set[Session] = set()
        self._parts = SessionParts(
            activity=activity,
            update_decoder=UpdateDecoder(
                pipeline, tokenizer, n_text_ctx, context_for, clock, tracer
            ),
            tokenizer=tokenizer,
            policy=policy,
            pace=self.pace,
            observer=self.observer,
            clock=clock,
            delay=DELAY_PROFILES[DEFAULT_DELAY],
            tracer=tracer,
        )

    def open(self, config: LiveConfig, *, session_id: str, owner: bytes = b"") -> Session:
        """See `router.live.interface.LiveEngine.open`."""
        if self.pace.is_overloaded:
            self.observer.session_refused()
            raise OverloadedError(
                "the workers have no time for another live session: an update of the open ones "
                f"takes {self.pace.update_s:.1f} s",
                retry_after_s=RETRY_AFTER_S,
            )
        session = Session(
            self._parts, config, session_id=session_id, owner=owner, on_end=self._ended
        )
        self._sessions.add(session)
        self.observer.session_opened()
        return session

    async def close(self) -> None:
        """See `router.live.interface.LiveEngine.close`."""
        await asyncio.gather(*(session.close() for session in list(self._sessions)))

    def _ended(self, session: Session) -> None:
        self._sessions.discard(session)
        self.observer.session_ended()
