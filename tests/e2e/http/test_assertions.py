"""What vLLM's and SGLang's public suites assert of their transcription servers, on our audio."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import sample_path, sample_text
from tests.e2e.conftest import Server
from tests.support.audio.sounds import joined, silence
from tests.support.audio.speech import pcm_of, sentences_of, wav_of

COPIES = 10
SLACK_S = 0.6
GAP_S = 23.0  # with the recording, too long for two copies in one window
WORDS: dict[str, Any] = {
    "response_format": "verbose_json",
    "timestamp_granularities": ["word", "segment"],
}


def create(server: Server, file: Any, **options: Any) -> Any:
    client = server.client(max_retries=0)
    return client.audio.transcriptions.create(model="whisper-1", file=file, **options)


@pytest.fixture(scope="module")
def copies() -> bytes:
    return wav_of(joined(*(pcm_of("short"), silence(GAP_S)) * COPIES))


@pytest.fixture(scope="module")
def copies_heard(server: Server, copies: bytes) -> Any:
    return create(server, copies, **WORDS)


def test_ten_copies_of_a_phrase_are_the_phrase_ten_times(server: Server, copies_heard: Any) -> None:
    alone = create(server, sample_path("short")).text
    assert copies_heard.text == " ".join([alone] * COPIES)


def test_times_in_later_chunks_are_true_ones(copies_heard: Any) -> None:
    """Within `SLACK_S`: a first word may reach back to where its window begins."""
    sentences = sentences_of("short")
    period_s = len(pcm_of("short")) / SAMPLE_RATE + GAP_S
    spoken = [
        (n * period_s + sentence.start, n * period_s + sentence.end)
        for n in range(COPIES)
        for sentence in sentences
    ]
    assert len(copies_heard.segments) == len(spoken)
    for segment, (start, end) in zip(copies_heard.segments, spoken, strict=True):
        assert segment.start == pytest.approx(start, abs=SLACK_S)
        assert segment.end == pytest.approx(end, abs=SLACK_S)
    for word in copies_heard.words:
        assert any(
            start - SLACK_S <= word.start <= word.end <= end + SLACK_S for start, end in spoken
        )
    assert copies_heard.duration == pytest.approx(COPIES * period_s, abs=0.01)


@pytest.mark.parametrize("decoding", ["parallel", "sequential"])
def test_a_prompt_is_not_heard(server: Server, decoding: str) -> None:
    prompt = sentences_of("long")[3].text
    heard = create(
        server, sample_path("short"), prompt=prompt, extra_body={"decoding": decoding}
    ).text
    said = set(sample_text("short").lower().split())
    assert len(said & set(heard.lower().split())) >= 0.8 * len(said)
    assert not (set(prompt.lower().split()) - said) & set(heard.lower().split())


@pytest.mark.parametrize("name", ["short", "medium"])
def test_a_language_that_is_detected_gives_what_a_named_one_gives(
    server: Server, name: str
) -> None:
    detected = create(server, sample_path(name), response_format="verbose_json")
    named = create(server, sample_path(name), response_format="verbose_json", language="en")
    assert detected.language == named.language == "english"
    assert detected.text == named.text


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 0.7, "extra_body": {"seed": 7}}],
    ids=["greedy", "sampled with a seed"],
)
def test_three_runs_are_the_same_to_the_last_number(
    server: Server, options: dict[str, Any]
) -> None:
    runs = [create(server, sample_path("short"), **WORDS, **options) for _ in range(3)]
    assert runs[0].words
    assert runs[1:] == runs[:1] * 2


def test_one_beam_is_greedy(server: Server) -> None:
    bodies = ({"fallback": False}, {"fallback": False, "beam_size": 1})
    greedy, beam = (create(server, sample_path("medium"), extra_body=body) for body in bodies)
    assert greedy.text == beam.text
