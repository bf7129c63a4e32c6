"""The bundled model's words do not depend on how long its workers take to answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

import pytest

from cluster.common.errors import SequenceFailedError
from cluster.common.settings_sources import load_settings
from cluster.demo.samples import sample_text
from router.live.interface import LiveConfig, ServerVad
from tests.support.audio.speech import pcm_of
from tests.support.live.late_pools import BackgroundEngines, LatePools, background_engines, hear

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
    text = hear(background, pcm_of(name), config, LatePools(background, late_s)).text
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
    text = hear(background, pcm_of("medium"), config, pools).text
    assert words_of(text) == words_of(sample_text("medium"))
