"""What OpenAI withdraws on 26 February 2027, called here by its own clients.

Every answer is what the SDK's types say, with nothing beside it but `ADDED`.
"""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject, audio
from openai.types.realtime import RealtimeServerEvent
from pydantic import BaseModel, TypeAdapter

from cluster.demo.samples import sample_path
from tests.e2e.http.test_node_sdk import FOLDER, install
from tests.e2e.live.test_realtime import MOST_WRONG, pcm_24_khz, wrong_share
from tests.support.in_process import in_process_server, translating_model
from tests.support.programs import needs
from tests.support.proxies import proxy_in_front

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
LIVE_EVENT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
# Fields of ours, by the SDK's type. `task`, and those of a session, are in OpenAI's own answers.
LIVE_SESSION = "RealtimeTranscriptionSessionCreateRequest"  # of which the SDK knows what is sent
ADDED = {
    *((LIVE_SESSION, name) for name in ("id", "object", "expires_at")),
    ("Batch", "paused"),
    ("TranscriptionVerbose", "task"),
    *(("TranslationVerbose", name) for name in ("task", "source_language")),
    ("TranscriptionWord", "probability"),
    ("Usage", "seconds"),
}
ENDED = ("completed", "failed", "cancelled", "expired")
Answers = dict[str, Any]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = base64.b64encode(SHORT.read_bytes()).decode()
    line = {"method": "POST", "url": "/v1/audio/transcriptions"}
    good = {"model": "whisper-1", "file_url": f"data:audio/flac;base64,{content}"}
    bodies = {"good": good, "wrong": {**good, "temperature": 7}}
    path = tmp_path_factory.mktemp("batch") / "lines.jsonl"
    path.write_text(
        "".join(f"{json.dumps({**line, 'custom_id': k, 'body': v})}\n" for k, v in bodies.items())
    )
    return path


def live_by_python(client: openai.OpenAI, pcm: bytes) -> list[Any]:
    events = []
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        transcription = {"model": "whisper-1", "language": "en"}
        audio_input = {"transcription": transcription, "turn_detection": None}
        session: Any = {"type": "transcription", "audio": {"input": audio_input}}
        connection.session.update(session=session)
        for start in range(0, len(pcm), 9600):
            piece = base64.b64encode(pcm[start : start + 9600]).decode()
            connection.input_audio_buffer.append(audio=piece)
        connection.input_audio_buffer.commit()
        for event in connection:
            events.append(event.to_dict())
            if event.type.endswith(("error", ".failed", ".completed")):
                break
    return events


def batch_by_python(client: openai.OpenAI, lines: Path) -> list[Any]:
    file = client.files.create(file=lines, purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/audio/transcriptions",  # type: ignore[arg-type]
        completion_window="24h",
    )
    while batch.status not in ENDED:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    texts = [
        client.files.content(str(one)).text for one in (batch.output_file_id, batch.error_file_id)
    ]
    return [file.to_dict(), batch.to_dict(), *texts]


def by_python(lines: Path, pcm: Path) -> list[Any]:
    client, found = openai.OpenAI(), []
    for endpoint, fields in CALLS.values():
        create = getattr(client.audio, endpoint).create
        answer = create(**{"model": "whisper-1", "file": SHORT, **fields})
        if fields.get("stream"):
            found.append([event.to_dict() for event in answer])
        else:
            found.append(answer if isinstance(answer, str) else answer.to_dict())
    return [*found, batch_by_python(client, lines), live_by_python(client, pcm.read_bytes())]


def by_node(lines: Path, pcm: Path, url: str, certificate: Path) -> list[Any]:
    install()
    calls = [(endpoint, {"model": "whisper-1", **fields}) for endpoint, fields in CALLS.values()]
    found: list[Any] = run_node("calls.mjs", SHORT, json.dumps(calls), lines)
    backend = url.removeprefix("http://")
    with proxy_in_front("haproxy", backend, pcm.parent, certificate) as port:  # it speaks TLS alone
        address = f"https://localhost:{port}/v1"
        live = run_node("realtime.mjs", address, "whisper-1", pcm, certificate)
    return [*found, live]


def run_node(*arguments: str | Path) -> Any:
    done = subprocess.run(
        ["node", *map(str, arguments)],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=CALLS_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    settings = {"model": translating_model(folder), "batches": {"folder": str(folder / "batches")}}
    with in_process_server(settings) as running:
        yield running


NODE = pytest.param("node", marks=needs("node", "npm", "openssl"))


@pytest.fixture(scope="module", params=["python", NODE])
def answers(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    url: str,
    lines: Path,
    certificate: Path,
) -> Answers:
    pcm = tmp_path_factory.mktemp("pcm") / "short.pcm"
    pcm.write_bytes(pcm_24_khz("short"))
    known = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in known.items():
            patch.setenv(name, value)
        is_python = request.param == "python"
        found = by_python(lines, pcm) if is_python else by_node(lines, pcm, url, certificate)
    return dict(zip((*CALLS, "batch", "realtime"), found, strict=True))


@pytest.fixture
def said(answers: Answers) -> str:
    text: str = answers[f"{SPEECH} json"]["text"]
    assert len(text.split()) > 8
    return text


def beside_the_type(value: Any) -> Iterator[tuple[str, str]]:
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
    file, batch, *_ = answers["batch"]
    added |= set(beside_the_type(FileObject.model_validate(file)))
    added |= set(beside_the_type(Batch.model_validate(batch)))
    for event in answers["realtime"]:
        added |= set(beside_the_type(LIVE_EVENT.validate_python(event)))
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


def test_a_realtime_session_hears_what_is_said(answers: Answers) -> None:
    events = answers["realtime"]
    assert [event["type"] for event in events[:2]] == ["session.created", "session.updated"]
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    transcript = events[-1]["transcript"]
    assert "".join(deltas) == transcript
    assert wrong_share(transcript) <= MOST_WRONG
