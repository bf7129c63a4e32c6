"""What a session update means: absent keeps, null clears, unknown is left alone, wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.common.errors import InvalidRequestError, ModelNotFoundError, SplitscribeError
from router.live.interface import LiveConfig, SemanticVad, ServerVad
from router.live.protocol.audio_format import AudioFormat
from router.live.protocol.session_config import SessionConfig, as_session, updated
from tests.unit.router.live.protocol.test_protocol import NAMES

FIRST = updated(SessionConfig(live=LiveConfig(model="one")), {}, NAMES)


def after(*updates: dict[str, Any]) -> SessionConfig:
    """The configuration after these updates of `audio.input`."""
    config = FIRST
    for fields in updates:
        config = updated(config, {"type": "transcription", "audio": {"input": fields}}, NAMES)
    return config


def test_what_is_left_out_stays_and_null_goes_back() -> None:
    spoken = {"language": "en-US", "prompt": "Names.", "keywords": ["Ray"], "delay": "low"}
    config = after({"transcription": spoken}, {"transcription": {"prompt": None}}, {})
    assert config.live == LiveConfig("one", language="en", keywords=("Ray",), delay="low")
    config = after({"transcription": spoken}, {"transcription": None})
    assert config.live == LiveConfig("one")
    everything = {"transcription": spoken, "turn_detection": None, "format": {"type": "audio/pcmu"}}
    assert updated(after(everything), {"audio": {"input": None}}, NAMES).audio == AudioFormat()
    assert updated(after(everything), {"audio": None}, NAMES).audio == AudioFormat()
    assert updated(after(everything), {"audio": {}}, NAMES) == after(everything)


def test_a_field_of_the_beta_is_refused_since_audio_would_be_misread_without_it() -> None:
    with pytest.raises(InvalidRequestError, match=r"session\.audio\.input") as refused:
        updated(FIRST, {"input_audio_format": "g711_ulaw"}, NAMES)
    assert refused.value.param == "session.input_audio_format"
    assert refused.value.code == "unknown_parameter"


def test_turn_detection_keeps_the_values_of_its_kind() -> None:
    config = after(
        {"turn_detection": {"type": "server_vad", "threshold": 0.7}},
        {"turn_detection": {"type": "server_vad", "silence_duration_ms": 350.0}},
    )
    assert config.live.turn_detection == ServerVad(threshold=0.7, silence_duration_ms=350)
    config = after({"turn_detection": {"type": "semantic_vad", "eagerness": "high"}}, {})
    assert config.live.turn_detection == SemanticVad("high")
    assert after({"turn_detection": None}).live.turn_detection is None


def test_names_whose_clients_end_turns_themselves_have_no_turn_detection_unless_asked() -> None:
    live = {"transcription": {"model": "gpt-realtime-whisper"}}
    assert after(live).live.turn_detection is None
    assert after(live, {"transcription": {"model": "one"}}).live.turn_detection == ServerVad()
    asked = {"turn_detection": {"type": "server_vad"}}
    assert after(asked, live).live.turn_detection == ServerVad()


def test_formats_are_read() -> None:
    assert after({"format": {"type": "audio/pcm"}}).audio == AudioFormat("pcm", 24_000)
    assert after({"format": {"rate": 16_000}}).audio == AudioFormat("pcm", 16_000)
    for law in ("pcmu", "pcma"):
        config = after({"format": {"type": f"audio/{law}"}})
        assert config.audio == AudioFormat(law, 8_000)  # type: ignore[arg-type]
        assert after({"format": {"type": f"audio/{law}"}}, {"format": None}) == FIRST


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"format": "pcm16"}, "format"),
        ({"format": {"type": "audio/opus"}}, "format.type"),
        ({"format": {"type": "audio/pcm", "rate": 7}}, "format.rate"),
        ({"format": {"type": "audio/pcm", "rate": True}}, "format.rate"),
        ({"transcription": {"language": "klingon"}}, "transcription.language"),
        ({"transcription": {"prompt": "x" * 10_001}}, "transcription.prompt"),
        ({"transcription": {"prompt": "\ud800"}}, "transcription.prompt"),
        ({"transcription": {"keywords": "Ray"}}, "transcription.keywords"),
        ({"transcription": {"delay": "none"}}, "transcription.delay"),
        ({"transcription": []}, "transcription"),
        ({"turn_detection": {"type": "magic"}}, "turn_detection.type"),
        ({"turn_detection": {"threshold": float("nan")}}, "turn_detection.threshold"),
        ({"turn_detection": {"silence_duration_ms": -1}}, "turn_detection.silence_duration_ms"),
        ({"noise_reduction": {"type": "all"}}, "noise_reduction.type"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        after(fields)
    assert raised.value.param == f"session.audio.input.{param}"


@pytest.mark.parametrize(
    ("session", "error"),
    [
        (None, InvalidRequestError),
        ({"type": "realtime"}, InvalidRequestError),
        ({"audio": {"input": {"transcription": {"model": "nobody"}}}}, ModelNotFoundError),
        (
            {"audio": {"input": {"transcription": {"model": "two", "language": "de"}}}},
            InvalidRequestError,
        ),
    ],
)
def test_sessions_that_cannot_be_served_are_refused(
    session: Any, error: type[SplitscribeError]
) -> None:
    with pytest.raises(error):
        updated(FIRST, session, NAMES)


def test_unknown_fields_are_left_alone() -> None:
    odd = {"instructions": "?", "audio": {"output": {}, "input": {"new": 1}}, "include": ["new"]}
    assert updated(FIRST, odd, NAMES) == FIRST


def test_what_is_written_reads_back_to_the_same() -> None:
    fields = {
        "format": {"type": "audio/pcma"},
        "noise_reduction": {"type": "far_field"},
        "transcription": {"language": "de", "prompt": "A", "keywords": ["B"], "delay": "high"},
        "turn_detection": {"type": "semantic_vad", "eagerness": "low"},
    }
    config = after(fields)
    config = updated(config, {"include": ["item.input_audio_transcription.logprobs"]}, NAMES)
    written = as_session(config, "sess_1", 5)
    assert updated(FIRST, written, NAMES) == config
