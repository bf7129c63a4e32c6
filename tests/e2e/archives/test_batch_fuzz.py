"""Generated lines of batches, by real routes over a fake transcriber: each batch ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.e2e.archives.test_batches import ended, upload
from tests.support.batches import ENDPOINT, desk, line, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BATCHES = 150
GENERATED: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],
    "suppress_health_check": list(HealthCheck),
}
AUDIO = "data:audio/wav;base64,AAAA"


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[str]:
    async with desk(folder, max_batches_per_key=10**6) as at, served(at) as counter:
        yield counter.url


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("kept")
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(opened(folder)) as url,
    ):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


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
    drawn = draw(st.lists(st.tuples(good, bodies), min_size=1, max_size=6))
    return [
        line(f"l{i}", **{**extra, **audio}).rstrip()
        for i, (audio, extra) in enumerate(drawn)
        if not {"file_id", "file_url", "input_audio"} & extra.keys()
    ] or [line("l", url=AUDIO).rstrip()]


def test_whatever_stands_in_a_line_its_batch_ends_and_adds_up(
    client: openai.OpenAI, record_property: Callable[[str, int], None]
) -> None:
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
    record_property("inputs", outcomes.total())
