"""What OpenAI withdraws on 26 February 2027, called here by its own clients, as programs call it.

Of the server the clients know an address and a key. Every answer must be what the SDK's types say,
field by field, with nothing beside it but `ADDED`, which `configs/FROM-OPENAI.md` tells of.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import audio
from pydantic import BaseModel

from cluster.demo.samples import sample_path
from tests.e2e.http.test_node_sdk import FOLDER, install
from tests.support.in_process import in_process_server, translating_model
from tests.support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the SDK's, of what is withdrawn
]
PAGE = Path(__file__).parents[3] / "configs" / "FROM-OPENAI.md"
CALLS_S = 240
SHORT = sample_path("short")
SPEECH, ENGLISH = "transcriptions", "translations"
VERBOSE = {"response_format": "verbose_json"}
LOGPROBS = {"include": ["logprobs"]}
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{SPEECH} {one}": (SPEECH, {"response_format": one}) for one in FORMATS},
    **{f"{ENGLISH} {one}": (ENGLISH, {"response_format": one}) for one in FORMATS},
    "words": (SPEECH, {**VERBOSE, "timestamp_granularities": ["word"]}),
    "both": (SPEECH, {**VERBOSE, "timestamp_granularities": ["word", "segment"]}),
    "logprobs": (SPEECH, LOGPROBS),
    "stream": (SPEECH, {"stream": True}),
    "logprobs in a stream": (SPEECH, {"stream": True, **LOGPROBS}),
    "prompt": (SPEECH, {"prompt": "A talk.", "temperature": 0, "language": "en"}),
    "sampled": (SPEECH, {"temperature": 0.2, "chunking_strategy": "auto"}),
    "successor": (SPEECH, {"model": "gpt-transcribe", "languages": ["en", "de"]}),
    "newer": (SPEECH, {"model": "gpt-4o-mini-transcribe-2025-12-15", "keywords": ["Ada"]}),
}
EVENTS: dict[str, type[BaseModel]] = {
    "transcript.text.delta": audio.TranscriptionTextDeltaEvent,
    "transcript.text.done": audio.TranscriptionTextDoneEvent,
}
# Fields of ours, by the SDK's type. `task` is in OpenAI's own answers and examples.
ADDED = {
    ("TranscriptionVerbose", "task"),
    ("TranslationVerbose", "task"),
    ("TranscriptionWord", "probability"),
    ("Usage", "seconds"),
}
Answers = dict[str, Any]


def by_python() -> list[Any]:
    client, found = openai.OpenAI(), []
    for endpoint, fields in CALLS.values():
        create = getattr(client.audio, endpoint).create
        answer = create(**{"model": "whisper-1", "file": SHORT, **fields})
        if fields.get("stream"):
            found.append([event.to_dict() for event in answer])
        else:
            found.append(answer if isinstance(answer, str) else answer.to_dict())
    return found


def by_node() -> list[Any]:
    install()
    calls = [(endpoint, {"model": "whisper-1", **fields}) for endpoint, fields in CALLS.values()]
    done = subprocess.run(
        ["node", "calls.mjs", str(SHORT), json.dumps(calls)],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=CALLS_S,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server whose model translates and has languages to choose from."""
    model = translating_model(tmp_path_factory.mktemp("model"))
    with in_process_server({"model": model}) as running:
        yield running


@pytest.fixture(scope="module", params=["python", pytest.param("node", marks=needs("node", "npm"))])
def answers(request: pytest.FixtureRequest, url: str) -> Answers:
    """By the names of `CALLS`."""
    known = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in known.items():
            patch.setenv(name, value)
        found = by_python() if request.param == "python" else by_node()
    return dict(zip(CALLS, found, strict=True))


@pytest.fixture
def said(answers: Answers) -> str:
    text: str = answers[f"{SPEECH} json"]["text"]
    assert len(text.split()) > 8
    return text


def beside_the_type(value: Any) -> Iterator[tuple[str, str]]:
    """The fields that the SDK's types do not have, with the type, at any depth."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or ():
            yield type(value).__name__, name
        for name in value.model_fields_set & type(value).model_fields.keys():
            yield from beside_the_type(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from beside_the_type(item)


def type_of(endpoint: str, fields: dict[str, Any]) -> type[BaseModel]:
    if fields.get("response_format") == "verbose_json":
        return audio.TranscriptionVerbose if endpoint == SPEECH else audio.TranslationVerbose
    return audio.Transcription if endpoint == SPEECH else audio.Translation


def test_answers_are_what_the_sdk_s_types_say(answers: Answers) -> None:
    added: set[tuple[str, str]] = set()
    for name, (endpoint, fields) in CALLS.items():
        answer = answers[name]
        if fields.get("response_format") in ("text", "srt", "vtt"):
            assert isinstance(answer, str), name
        elif fields.get("stream"):
            for event in answer:
                added |= set(beside_the_type(EVENTS[event["type"]].model_validate(event)))
        else:
            added |= set(beside_the_type(type_of(endpoint, fields).model_validate(answer)))
    assert added == ADDED
    page = PAGE.read_text()
    assert all(f"`{field}`" in page for _, field in ADDED)


def test_every_way_to_ask_gives_the_same_text(answers: Answers, said: str) -> None:
    assert answers[f"{SPEECH} text"] == f"{said}\n"
    for name in (f"{SPEECH} verbose_json", "words", "both", "logprobs", "successor"):
        assert answers[name]["text"] == said
    for name in ("prompt", "sampled", "newer"):
        assert answers[name]["text"]
    assert answers["successor"]["languages"] == [{"code": "en"}]


def test_segments_are_the_cues_of_both_subtitle_formats(answers: Answers) -> None:
    for kind in (SPEECH, ENGLISH):
        verbose = answers[f"{kind} verbose_json"]
        texts = [segment["text"].strip() for segment in verbose["segments"]]
        srt, vtt = answers[f"{kind} srt"], answers[f"{kind} vtt"]
        assert texts == [cue.split("\n", 2)[2] for cue in srt.strip().split("\n\n")]
        assert srt.startswith("1\n00:00:0")
        assert texts == [cue.split("\n", 1)[1] for cue in vtt.strip().split("\n\n")[1:]]
        assert vtt.startswith("WEBVTT\n\n00:0")


def test_word_times_lie_within_the_audio_and_in_order(answers: Answers, said: str) -> None:
    alone, both = answers["words"], answers["both"]
    assert "segments" not in alone
    assert "words" not in answers[f"{SPEECH} verbose_json"]
    assert both["segments"]
    assert alone["words"] == both["words"]
    assert " ".join(word["word"] for word in alone["words"]) == said
    times = [word[end] for word in alone["words"] for end in ("start", "end")]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= alone["duration"] + 0.01


def spelt(logprobs: list[dict[str, Any]]) -> str:
    assert all(one["logprob"] <= 0 for one in logprobs)
    return b"".join(bytes(map(int, one["bytes"])) for one in logprobs).decode().strip()


def test_log_probabilities_and_deltas_spell_the_text(answers: Answers, said: str) -> None:
    assert spelt(answers["logprobs"]["logprobs"]) == said
    for name in ("stream", "logprobs in a stream"):
        *deltas, done = answers[name]
        assert {event["type"] for event in deltas} == {"transcript.text.delta"}
        assert "".join(event["delta"] for event in deltas) == done["text"] == said
    streamed = [one for event in deltas for one in event.get("logprobs", ())]
    assert spelt(streamed) == spelt(done["logprobs"]) == said


def test_translations_are_english_in_every_format(answers: Answers) -> None:
    text = answers[f"{ENGLISH} json"]["text"]
    assert text
    assert answers[f"{ENGLISH} text"] == f"{text}\n"
    verbose = answers[f"{ENGLISH} verbose_json"]
    assert (verbose["text"], verbose["language"]) == (text, "english")
