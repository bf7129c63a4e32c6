"""Generated requests to `/v1/files` and `/v1/batches`, and generated lines of batches.

Through a router's own listener and the real service on a real folder; only the transcriber is a
fake one. Schemathesis reads the routes from /openapi.json and checks each answer against it; the
lines come from Hypothesis. Whatever comes, an answer is documented, a batch ends, and what it says
of its lines adds up.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from tests.e2e.archives.test_batches import ended, upload
from tests.support.batches import ENDPOINT, desk, line, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES = 40  # of each route
BATCHES = 150
GENERATED: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}
AUDIO = "data:audio/wav;base64,AAAA"
# What a schema cannot say: which ids there are, and that a batch has ended.
NEVER_CHECKED = ("positive_data_acceptance",)
DOCUMENTED = {200, 400, 404, 405, 409}

load_all_checks()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a thread of its own."""
    folder = tmp_path_factory.mktemp("kept")
    started, over, found = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with desk(folder, max_batches_per_key=10**6) as at, served(at) as counter:
            found.extend([counter.url, asyncio.get_running_loop()])
            started.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    yield found[0]
    found[1].call_soon_threadsafe(over.set)
    thread.join(60)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def narrowed(document: dict[str, Any], client: openai.OpenAI) -> dict[str, Any]:
    """The routes of files and batches alone, with ids of which some are there."""
    files = [
        client.files.create(file=(f"{i}.jsonl", line(f"l{i}", url=AUDIO)), purpose="batch").id
        for i in range(CASES)
    ]
    batches = [upload(client, [line("l", url=AUDIO)]).id for _ in range(4)]
    ids = {"file_id": [*files[:20], "file-none", "%00"], "batch_id": [*batches, "batch_none"]}
    paths = document["paths"]
    document["paths"] = {p: paths[p] for p in paths if p.startswith(("/v1/files", "/v1/batches"))}
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in ids:
                    parameter["schema"] = {"enum": ids[parameter["name"]]}
    body = document["paths"]["/v1/batches"]["post"]["requestBody"]["content"]
    fields = body["application/json"]["schema"]["properties"]
    fields["input_file_id"] = {"enum": [*files[20:], "file-none"]}
    fields["endpoint"] = {"enum": [ENDPOINT, "/v1/audio/translations"]}
    return document


def test_every_answer_is_as_documented(url: str, client: openai.OpenAI) -> None:
    document = narrowed(httpx.get(f"{url}/openapi.json").json(), client)
    found = schemathesis.openapi.from_dict(document)
    found.config.update(base_url=url)
    checks = [check for check in CHECKS.get_all() if check.__name__ not in NEVER_CHECKED]
    statuses: Counter[int] = Counter()
    operations = [one.ok() for one in found.get_all_operations()]
    assert len(operations) >= 9
    for operation in operations:
        allowed = operation.as_strategy(GenerationMode.POSITIVE)
        forbidden = operation.as_strategy(GenerationMode.NEGATIVE)

        @seed(7)
        @settings(**GENERATED, max_examples=CASES)
        @given(st.one_of(allowed, allowed, forbidden))
        def send(case: Case) -> None:
            answer = case.call(timeout=30)
            statuses[answer.status_code] += 1
            assert answer.status_code in DOCUMENTED, answer.text
            case.validate_response(answer, checks=checks)

        send()
    print(statuses)
    assert statuses[200] > 50


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["whisper-1", "none"]) | values,
        "url": st.sampled_from([AUDIO, "http://127.0.0.1/", "data:,", "file:///etc/passwd"])
        | values,
        "file_id": st.sampled_from(["file-none", "../../etc/passwd"]) | values,
        "file_url": values,
        "input_audio": st.fixed_dictionaries({"data": st.just("AAAA"), "format": st.just("wav")})
        | values,
        "language": st.sampled_from(["en", "German"]) | values,
        "temperature": st.floats(0, 1) | values,
        "response_format": st.sampled_from(["json", "text", "srt", "vtt", "verbose_json"]) | values,
        "timestamp_granularities": st.just(["word"]) | values,
        "stream": st.booleans(),
        "prompt": values,
    },
)
good = st.fixed_dictionaries({"model": st.just("whisper-1"), "url": st.just(AUDIO)})
whole_lines = st.fixed_dictionaries(
    {
        "custom_id": st.text(min_size=1, max_size=10) | values,
        "method": st.sampled_from(["POST", "POST", "POST", "GET"]),
        "url": st.sampled_from([ENDPOINT, ENDPOINT, "/v1/embeddings"]),
        "body": good | bodies,
    }
).map(lambda one: json.dumps(one).encode())
odd_lines = st.binary(max_size=40) | values.map(lambda one: json.dumps(one).encode())
mistaken = st.lists(st.one_of(whole_lines, whole_lines, odd_lines), max_size=6)


@st.composite
def passable(draw: st.DrawFn) -> list[bytes]:
    """Lines that the check of the input lets through, with whatever fields."""
    drawn = draw(st.lists(st.tuples(good, bodies), min_size=1, max_size=6))
    return [
        line(f"l{i}", **{**extra, **audio}).rstrip()
        for i, (audio, extra) in enumerate(drawn)
        if not {"file_id", "file_url", "input_audio"} & extra.keys()
    ] or [line("l", url=AUDIO).rstrip()]


def test_whatever_stands_in_a_line_its_batch_ends_and_adds_up(client: openai.OpenAI) -> None:
    outcomes: Counter[str] = Counter()

    @seed(7)
    @settings(**GENERATED, max_examples=BATCHES)
    @given(mistaken | passable())
    def run(lines: list[bytes]) -> None:
        content = [b"\n".join(lines) + b"\n"]
        batch = ended(client, upload(client, content).id, step_s=0.01)
        outcomes[batch.status] += 1
        assert batch.status in ("completed", "failed"), batch
        if batch.status == "failed":
            assert batch.errors.data
            assert all(one.code and one.message for one in batch.errors.data)
            return
        counts, answered = batch.request_counts, 0
        assert counts.total == counts.completed + counts.failed
        for file_id, good_one in ((batch.output_file_id, True), (batch.error_file_id, False)):
            text = client.files.content(file_id).text if file_id else ""
            for one in map(json.loads, text.splitlines()):
                answered += 1
                assert (one["response"]["status_code"] == 200) == good_one
                assert one["response"]["status_code"] < 500, one
        assert answered == counts.total

    run()
    print(outcomes)
    assert min(outcomes["completed"], outcomes["failed"]) > BATCHES // 10
