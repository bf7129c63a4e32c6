"""Any events in any order: the protocol answers, never crashes, and ends every item once.

The fake engine tells at once, so that after each event all that it told can be passed on; what is
held against the protocol is a small model of what OpenAI's clients rely on.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._models import construct_type_unchecked
from openai.types.realtime import RealtimeServerEvent

from cluster.common.errors import ModelNotFoundError
from router.live.interface import LiveConfig
from router.live.protocol.events import (
    MAX_BESIDE_AUDIO,
    Append,
    InvalidEvent,
    RealtimeWriter,
    read_event,
)
from router.live.protocol.session_config import ModelNames, SessionConfig, updated
from router.live.protocol.session_protocol import MAX_MISTAKES, LiveProtocol, TooManyMistakesError
from tests.support.live.fake_engine import BAD, FakeLiveEngine, spoken

MODELS = {"one": "a", "whisper-1": "a", "gpt-realtime-whisper": "a", "two": "b"}
RATE = 16_000
FORMAT = {"type": "audio/pcm", "rate": RATE}


def languages(name: str) -> tuple[str, ...]:
    if name not in MODELS:
        raise ModelNotFoundError(f"no model is called {name}")
    return ("en",) if MODELS[name] == "b" else ("en", "de")


NAMES = ModelNames(
    languages=languages,
    are_one=lambda one, other: MODELS[one] == MODELS[other],
    without_vad=("gpt-realtime-whisper",),
)


class Talk:
    """A client that sends, the protocol, the engine, and what the client has got."""

    def __init__(self) -> None:
        self.engine = FakeLiveEngine()
        self.writer = RealtimeWriter(Random(1))
        config = updated(SessionConfig(live=LiveConfig(model="one")), {}, NAMES)
        self.protocol = LiveProtocol(
            config,
            names=NAMES,
            open_session=lambda live: self.engine.open(live, session_id="s"),
            writer=self.writer,
            expires_at=0,
        )
        self.got: list[dict[str, Any]] = self.protocol.open()

    def say(self, sent: object) -> list[dict[str, Any]]:
        """Send an event, or raw text; returns what came of it."""
        before = len(self.got)
        text = sent if isinstance(sent, str | bytes) else json.dumps(sent)
        self.got += self.protocol.receive(read_event(text))
        self.hear()
        return self.got[before:]

    def send(self, type: str, **fields: Any) -> list[dict[str, Any]]:
        return self.say({"type": type, **fields})

    def append(self, *words: int) -> list[dict[str, Any]]:
        audio = base64.b64encode(spoken(*words, rate=RATE)).decode()
        return self.send("input_audio_buffer.append", audio=audio)

    def update(self, **fields: Any) -> list[dict[str, Any]]:
        return self.send("session.update", session={"audio": {"input": fields}})

    def hear(self) -> None:
        queue = self.engine.sessions[-1]._queue
        while not queue.empty():
            if (event := queue.get_nowait()) is not None:
                self.got += self.protocol.on_engine_event(event)

    def commit(self) -> list[dict[str, Any]]:
        return self.send("input_audio_buffer.commit")

    def transcripts(self) -> list[str]:
        return [one["transcript"] for one in self.got if one["type"].endswith(".completed")]


def types_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def manual() -> Talk:
    talk = Talk()
    talk.update(format=FORMAT, turn_detection=None)
    return talk


def test_audio_before_the_configuration_is_kept_for_it() -> None:
    talk = Talk()
    talk.protocol.config = SessionConfig(live=talk.protocol.config.live)
    half = base64.b64encode(spoken(5, rate=24_000)[:24_000]).decode()
    talk.send("input_audio_buffer.append", audio=half)
    assert not talk.engine.sessions[0].appended
    talk.update(turn_detection=None, transcription={"language": "de"})
    talk.send("input_audio_buffer.append", audio=half)
    talk.commit()
    assert talk.engine.sessions[0].config.language == "de"
    assert talk.got[-1]["usage"]["seconds"] == pytest.approx(1.0, abs=0.05)


def test_an_empty_commit_is_answered_behind_the_turns_that_are_open() -> None:
    talk = manual()
    assert types_of(talk.commit())[-1].endswith(".completed")
    talk.append(5)
    talk.commit()
    talk.commit()
    assert talk.transcripts() == ["", "w5", ""]
    assert "error" not in types_of(talk.got)


def test_a_second_commit_waits_for_a_turn_that_the_engine_has_not_told_of() -> None:
    """Whoever waits for one completion gets the one with the text."""
    talk = manual()
    half = base64.b64encode(spoken(5, rate=RATE)[:RATE]).decode()
    for event in (
        {"type": "input_audio_buffer.append", "audio": half},
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.commit"},
    ):
        talk.say(event)
    seconds = [one["usage"]["seconds"] for one in talk.got if one["type"].endswith(".completed")]
    assert seconds == [0.5, 0.0]


def test_items_are_chained_by_their_predecessors() -> None:
    talk = manual()
    for word in (1, 2, 3):
        talk.append(word)
        talk.commit()
    committed = [one for one in talk.got if one["type"].endswith(".committed")]
    ids = [one["item_id"] for one in committed]
    assert [one["previous_item_id"] for one in committed] == [None, *ids[:-1]]


def test_a_model_may_be_named_until_audio_has_come() -> None:
    talk = Talk()
    talk.update(format=FORMAT, transcription={"model": "two"})
    (replaced,) = talk.protocol.take_replaced()
    assert replaced is talk.engine.sessions[0]
    assert talk.protocol.session is talk.engine.sessions[1]
    talk.append(5)
    assert types_of(talk.update(transcription={"model": "whisper-1"})) == ["error"]
    assert talk.protocol.config.live.model == "two", "a refused update changes nothing"
    assert types_of(talk.update(transcription={"model": "two"})) == ["session.updated"]


def test_a_client_that_makes_only_mistakes_is_given_up() -> None:
    talk = Talk()
    for _ in range(MAX_MISTAKES):
        assert types_of(talk.say("no JSON")) == ["error"]
    with pytest.raises(TooManyMistakesError):
        talk.say("no JSON")


def test_the_resampled_tail_belongs_to_the_turn_that_is_committed() -> None:
    talk = manual()
    talk.update(format={"type": "audio/pcm", "rate": 48_000})
    audio = base64.b64encode(spoken(5, rate=48_000)).decode()
    talk.send("input_audio_buffer.append", audio=audio)
    talk.commit()
    assert sum(map(len, talk.engine.sessions[0].appended)) == 16_000


# ---- whatever comes ----

FIELDS = (
    "type", "audio", "input", "format", "rate", "transcription", "model", "language", "languages",
    "keywords", "prompt", "delay", "turn_detection", "threshold", "silence_duration_ms",
    "eagerness", "noise_reduction", "include", "session", "unknown",
)  # fmt: skip
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 100_000)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["whisper-1", "two", "en", "server_vad", "audio/pcmu", "low", "none"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
    ),
    max_leaves=12,
)
updates = st.builds(
    lambda session: {"type": "session.update", "session": session},
    json_values
    | st.builds(lambda fields: {"audio": {"input": fields}}, json_values)
    | st.sampled_from(
        [
            {"audio": {"input": {"turn_detection": None}}},
            {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}},
            {"audio": {"input": {"transcription": {"model": "two"}}}},
            {"audio": {"input": {"format": {"type": "audio/pcma"}}}},
            {"include": ["item.input_audio_transcription.logprobs"]},
        ]
    ),
)
appends = st.builds(
    lambda words, cut: {
        "type": "input_audio_buffer.append",
        "audio": base64.b64encode(spoken(*words, rate=RATE)[cut:]).decode(),
    },
    st.lists(st.sampled_from([0, 1, 2, BAD]), max_size=3),
    st.integers(0, 3),
)
plain = st.sampled_from(
    [{"type": "input_audio_buffer.commit"}, {"type": "input_audio_buffer.clear"}]
)
garbage = (
    st.text(max_size=20)
    | st.binary(max_size=5)
    | st.builds(json.dumps, json_values)
    | st.sampled_from(["[" * 100_000, '{"type": 1e999}', '{"type": "\\ud800"}', "1" * 5000])
    | st.builds(
        lambda audio: {"type": "input_audio_buffer.append", "audio": audio},
        st.none() | st.integers() | st.text(max_size=9),
    )
)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(updates | appends | plain | garbage, max_size=12))
def test_any_events_in_any_order_are_answered_and_every_item_ends_once(events: list[Any]) -> None:
    talk = Talk()
    for event in events:
        talk.protocol.take_replaced()
        answers = talk.say(event)
        kind = event.get("type") if isinstance(event, dict) else "garbage"
        heard = types_of(answers)
        if kind == "input_audio_buffer.clear":
            assert "input_audio_buffer.cleared" in heard
        elif kind == "session.update":
            assert heard[0] in ("error", "session.updated")
        elif kind == "garbage":
            assert heard[0] == "error"
        elif kind == "input_audio_buffer.commit":
            assert any(one.endswith((".completed", ".failed")) for one in heard)
    talk.got += talk.protocol.fail_open_items(ModelNotFoundError("over"))
    hold_to_what_clients_rely_on(talk.got)


def hold_to_what_clients_rely_on(got: list[dict[str, Any]]) -> None:
    text = json.dumps(got)
    text.encode()
    assert len({event["event_id"] for event in got}) == len(got)
    ends = Counter(
        event["item_id"] for event in got if event["type"].endswith((".completed", ".failed"))
    )
    told = {event["item_id"] for event in got if "item_id" in event}
    assert set(ends) == told
    assert set(ends.values()) <= {1}
    texts: dict[str, str] = {}
    over: set[str] = set()
    for event in got:
        construct_type_unchecked(value=event, type_=RealtimeServerEvent)
        item = event.get("item_id")
        assert item not in over, "an item that has ended is told of no more"
        match event["type"].rpartition(".")[2]:
            case "delta":
                texts[item] = texts.get(item, "") + event["delta"]
            case "completed":
                assert event["transcript"] == texts.get(item, "")
                over.add(item)
            case "failed":
                over.add(item)


JUNK = "[" + "[]," * 30_000 + "[]]"


@pytest.mark.parametrize(
    "event",
    [
        '{"type":"input_audio_buffer.append","x":JUNK,"audio":"AAAA"}',
        '{"type":"input_audio_buffer.append","audio":"AAAA","x":JUNK}',
        '{"type":"input_audio_buffer.clear","x":JUNK}',
        '{"type":"input_audio_buffer.append","audio":JUNK}',
        '{"type":"input_audio_buffer.append","x":"LONG","audio":"AAAA"}',
        '{"type":"input_audio_buffer.append","audio":"LONG',
        '{"type":"input_audio_buffer.append","x":{"audio":"LONG"},"audio":"AAAA"}',
    ],
)
def test_a_long_event_is_refused_for_what_is_not_audio_before_it_is_parsed(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []

    def loads(content: bytes, **_: Any) -> None:
        parsed.append(content)

    monkeypatch.setattr("router.api.documents.json.loads", loads)
    read = read_event(event.replace("JUNK", JUNK).replace("LONG", "A" * 100_000))
    assert isinstance(read, InvalidEvent)
    assert read.error.code == "event_too_large"
    assert all(len(content) < MAX_BESIDE_AUDIO for content in parsed)


@pytest.mark.parametrize("spelling", ["/", "\\/", "\\u002f"])
@pytest.mark.parametrize("form", ['{"audio" : "%s","type":"%s"}', '{"type":"%s", "audio":"%s"}'])
def test_a_long_event_is_read_like_a_short_one(form: str, spelling: str) -> None:
    kind = "input_audio_buffer.append"
    for n_bytes in (300, 300_000):
        audio = b"\xff\xff\xff" * (n_bytes // 3)
        text = base64.b64encode(audio).decode().replace("/", spelling)
        parts = (text, kind) if form.startswith('{"audio"') else (kind, text)
        assert read_event(form % parts) == Append(None, audio)
    assert isinstance(read_event('{"audio":"' + "A" * 100_000 + '"]'), InvalidEvent)
