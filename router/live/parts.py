"""What all live sessions of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.clock import Clock
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.tracing import NO_TRACER, Tracer
from router.live.activity import VoiceActivity
from router.live.observer import LiveObserver
from router.live.pace import DelayProfile, Pace
from router.live.policies import Policy
from router.live.update_decoder import UpdateDecoder


@dataclass(frozen=True, slots=True)
class SessionParts:
    """delay: for sessions that ask for none. tracer: begins a trace for each turn."""

    activity: VoiceActivity
    update_decoder: UpdateDecoder
    tokenizer: WhisperTokenizer
    policy: Policy
    pace: Pace
    observer: LiveObserver
    clock: Clock
    delay: DelayProfile
    tracer: Tracer = NO_TRACER
