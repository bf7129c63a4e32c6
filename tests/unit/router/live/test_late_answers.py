"""The bundled model's words do not depend on how long its workers take to answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest

from cluster.demo.samples import sample_text
from cluster.errors import SequenceFailedError
from cluster.messages import SAMPLE_RATE, Pcm
from cluster.settings_sources import load_settings
from router.live.interface import LiveConfig, ServerVad
from tests.support.late_pools import (
    BackgroundEngines,
    LatePools,
    background_engines,
    late_live_engine,
)
from tests.support.live import Told, listen, speak
from tests.support.speech import pcm_of
from tests.support.virtual_time import run_virtually, virtual_clock

MANUAL = LiveConfig(language="en", turn_detection=None)
VAD = LiveConfig(language="en", turn_detection=ServerVad())
Late = Callable[[int], float]


@pytest.fixture(scope="module")
def background() -> Iterator[BackgroundEngines]:
    settings = load_settings(None, {}, environ={})
    with background_engines(next(iter(settings.by_model().values()))) as engines:
        yield engines


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def hear(background: BackgroundEngines, pcm: Pcm, config: LiveConfig, pools: LatePools) -> str:
    """The text of all turns of a session that speaks in real time."""

    async def run() -> Told:
        engine, activity = late_live_engine(background, pools)
        clock = virtual_clock()
        session = engine.open(config, session_id="late")
        listening = asyncio.ensure_future(listen(session, clock))
        await speak(session, np.concatenate((pcm, np.zeros(SAMPLE_RATE, np.int16))), clock, 0.1)
        session.commit()
        await session.drain()
        told = await listening
        await engine.close()
        await activity.close()
        return told

    told = run_virtually(run())
    told.check_ends()
    return " ".join(told.texts[turn] for turn in sorted(told.texts))


def constant(late_s: float) -> Late:
    return lambda nth: late_s


def scattered(most_s: float) -> Late:
    rng = Random(1)
    return lambda nth: rng.uniform(0.0, most_s)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("config", [MANUAL, VAD], ids=["commit", "vad"])
@pytest.mark.parametrize(
    ("name", "late_s"),
    [
        pytest.param("short", constant(0.05), id="short, at once"),
        pytest.param("short", constant(4.0), id="short, 4 s late"),
        *(
            pytest.param("medium", late_s, id=f"medium, {id}", marks=pytest.mark.slow)
            for id, late_s in {
                "at once": constant(0.05),
                "1 s late": constant(1.0),
                "3 s late": constant(3.0),
                "10 s late": constant(10.0),
                "up to 8 s late": scattered(8.0),
            }.items()
        ),
    ],
)
def test_words_do_not_depend_on_how_late_answers_are(
    background: BackgroundEngines, name: str, late_s: Late, config: LiveConfig
) -> None:
    text = hear(background, pcm_of(name), config, LatePools(background, late_s))
    assert words_of(text) == words_of(sample_text(name))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("config", [MANUAL, VAD], ids=["commit", "vad"])
def test_words_do_not_depend_on_what_fails_and_is_tried_again(
    background: BackgroundEngines, config: LiveConfig
) -> None:
    rng = Random(2)
    pools = LatePools(
        background,
        scattered(4.0),
        lambda nth: SequenceFailedError("lost") if rng.random() < 0.3 else None,
    )
    text = hear(background, pcm_of("medium"), config, pools)
    assert words_of(text) == words_of(sample_text("medium"))
