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


def create(server: Server, file: Any, **options: Any) -> Any:
    client = server.client(max_retries=0)
    return client.audio.transcriptions.create(model="whisper-1", file=file, **options)


@pytest.fixture(scope="module")
def copies_heard(server: Server) -> Any:
    copies = wav_of(joined(*(pcm_of("short"), silence(GAP_S)) * COPIES))
    both = ["word", "segment"]
    return create(server, copies, response_format="verbose_json", timestamp_granularities=both)


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
