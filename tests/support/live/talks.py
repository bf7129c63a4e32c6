"""Talks that tests of live sessions play, and the configurations that they play them with."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from cluster.planning.virtual_time import run_virtually
from router.live.interface import (
    LiveConfig,
    ServerVad,
)
from router.live.policies import AttentionPeak, LocalAgreement, Policy
from tests.support.live.played_speech import pcm_of_words, spoken
from tests.support.live.virtual_sessions import PlayedEngine, Told, say

TALK = (
    "the first words come (0.2) and more of them. then another sentence follows here (0.9) "
    "after a long pause. it goes on and on (0.3) until it ends."
)
POLICIES: list[Policy] = [AttentionPeak(), LocalAgreement()]
GAP_S = 0.08  # between words that are cut apart: less than any pause
MANUAL = LiveConfig(language="en", turn_detection=None)
VAD = LiveConfig(language="en", turn_detection=ServerVad())


def plain(text: str) -> list[str]:
    """The words without what a pause may add to them."""
    return text.replace(".", "").split()


def said(talk: str) -> list[str]:
    return [word for word in plain(talk) if not word.startswith("(")]


async def run_talk(
    talk: str,
    config: LiveConfig,
    policy: Policy | None = None,
    *,
    commit: bool = False,
    gap_s: float = 0.0,
) -> tuple[Told, PlayedEngine]:
    words = spoken(talk, gap_s=gap_s)
    played = PlayedEngine(words, policy or AttentionPeak())
    told = await say(played, pcm_of_words(words, 1.5), config, commit=commit)
    await played.close()
    return told, played


def virtually(work: Coroutine[Any, Any, Any]) -> Any:
    return run_virtually(work)
