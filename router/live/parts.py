"""What all live sessions of an engine share."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.clock import Clock
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.tracing import NO_TRACER, Tracer
from router.live.activity import VoiceActivity
from router.live.observer import LiveObserver
from router.live.pace import Pace, Patience
from router.live.policies import Policy
from router.live.updates import Updates


@dataclass(frozen=True, slots=True)
class SessionParts:
    """delay: what sessions get that ask for none. tracer: begins a trace for each turn."""

    activity: VoiceActivity
    updates: Updates
    tokenizer: WhisperTokenizer
    policy: Policy
    pace: Pace
    observer: LiveObserver
    clock: Clock
    delay: Patience
    tracer: Tracer = NO_TRACER
