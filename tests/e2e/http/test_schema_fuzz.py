"""Schemathesis sends what /openapi.json allows and forbids to every route; then come broken bytes.

Against the whole server in one process. What the document leaves open is narrowed first, or next
to no request would come as far as the transcriber.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import BaseSchema

from tests.e2e.conftest import wait_until
from tests.e2e.http.test_floods import event, frame
from tests.support.audio.speech import sentence_pcm, wav_of
from tests.support.batches import line
from tests.support.in_process import in_process_server

# Cases of an operation for 100 in all; those that are not here have little to vary.
SHARES = {"transcriptions": 60, "translations": 20, "alignments": 10, "asr": 10}
USUAL_SHARE = 3
# A schema cannot say that fields exclude each other, or that bytes are no audio.
NEVER_CHECKED = ("positive_data_acceptance",)
DOCUMENTED = {200, 400, 404, 405, 409}
ANSWER_S = 60.0
LINE = line("a", url="data:audio/wav;base64,AAAA")

load_all_checks()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = str(tmp_path_factory.mktemp("kept"))
    with in_process_server({"batches": {"folder": folder}}, asr_webservice=True) as url:
        yield url
        wait_until(lambda: nothing_is_left(url), ANSWER_S, "nothing is left over")


@pytest.fixture(scope="module")
def schema(url: str) -> BaseSchema:
    speech = st.just(wav_of(sentence_pcm("short", 1)))
    schemathesis.openapi.format("binary", st.one_of(speech, speech, speech, st.binary()))
    found = schemathesis.openapi.from_dict(narrowed(httpx.get(f"{url}/openapi.json").json(), url))
    found.config.update(base_url=url)
    return found


def nothing_is_left(url: str) -> bool:
    router = httpx.get(f"{url}/health", timeout=ANSWER_S).json()["router"]
    return [router[name] for name in ("requests", "pending_audio_s", "realtime_sessions")] == [
        0
    ] * 3


def narrowed(document: dict[str, Any], url: str) -> dict[str, Any]:
    for path in ("transcriptions", "translations", "alignments"):
        body = document["paths"][f"/v1/audio/{path}"]["post"]["requestBody"]
        del body["content"]["application/json"]  # numbers in texts are taken there too
        fields = body["content"]["multipart/form-data"]["schema"]["properties"]
        fields["model"]["enum"] = ["whisper-1", "demo", "openai/demo"]
        if "language" in fields:
            fields["language"]["enum"] = ["en", "English", "haw"]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    files = [client.files.create(file=("in.jsonl", LINE), purpose="batch").id for _ in range(20)]
    batch = client.batches.create(
        input_file_id=files[0],
        endpoint="/v1/audio/transcriptions",  # type: ignore[arg-type]
        completion_window="24h",
    )
    ids = {"file_id": [*files[:10], "file-none", "%00"], "batch_id": [batch.id, "batch_none"]}
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in ids:
                    parameter["schema"] = {"enum": ids[parameter["name"]]}
    body = document["paths"]["/v1/batches"]["post"]["requestBody"]["content"]
    fields = body["application/json"]["schema"]["properties"]
    fields["input_file_id"] = {"enum": [*files[10:], "file-none"]}
    return document


def checks_of(case: Case) -> list[Any]:
    """What is held against the answer. A field that is empty counts as not sent, whatever it is."""
    unchecked = list(NEVER_CHECKED)
    if isinstance(case.body, dict) and "" in case.body.values():
        unchecked.append("negative_data_rejection")
    return [check for check in CHECKS.get_all() if check.__name__ not in unchecked]


def send_generated(schema: BaseSchema, cases: int, run: int) -> int:
    statuses: Counter[int] = Counter()
    operations = [one.ok() for one in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        share = SHARES.get(operation.path.rpartition("/")[2], USUAL_SHARE)
        allowed = operation.as_strategy(GenerationMode.POSITIVE)
        forbidden = operation.as_strategy(GenerationMode.NEGATIVE)

        @seed(run)
        @settings(
            max_examples=max(1, cases * share // 100),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.one_of(allowed, allowed, forbidden))
        def send(case: Case) -> None:
            answer = case.call(timeout=ANSWER_S)
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=checks_of(case))

        send()
    print(statuses)
    assert statuses.total() >= cases
    assert statuses[200] > cases // 20, statuses
    assert set(statuses) <= DOCUMENTED
    return statuses.total()


def test_every_answer_to_200_generated_requests_is_as_documented(
    schema: BaseSchema, record_property: Callable[[str, int], None]
) -> None:
    record_property("inputs", send_generated(schema, 200, run=1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", range(4))
def test_every_answer_to_2000_generated_requests_is_as_documented(
    schema: BaseSchema, run: int, record_property: Callable[[str, int], None]
) -> None:
    record_property("inputs", send_generated(schema, 500, run=100 + run))


N_BROKEN = 500
HEAD = (
    b"POST /v1/%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
)
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ndemo\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--x--\r\n'
)
SECRET = json.dumps({"session": {"type": "transcription"}}).encode()
UPGRADE = (
    b"GET /v1/realtime?intent=transcription HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
FRAMES = b"".join(
    (
        event(type="session.update", session={"type": "transcription"}),
        event(type="input_audio_buffer.append", audio="AAAA" * 100),
        frame(0x9, b"ping"),
        event(type="input_audio_buffer.commit"),
        frame(0x8),
    )
)
WHOLE = (
    b"GET /v1/models/demo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    HEAD % (b"audio/transcriptions", b"multipart/form-data; boundary=x", len(FORM), FORM),
    HEAD % (b"realtime/client_secrets", b"application/json", len(SECRET), SECRET),
    HEAD % (b"files", b"multipart/form-data; boundary=x", len(FORM), FORM),
    UPGRADE + FRAMES,
    UPGRADE + FRAMES,
)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


def broken(case: int) -> bytes:
    dice = random.Random(case)
    data = bytearray(WHOLE[case % len(WHOLE)])
    first = len(UPGRADE) if data.startswith(UPGRADE) and dice.random() < 0.8 else 0
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(first, len(data))
        piece = bytes(data[at : at + dice.randrange(1, 40)])
        odd = dice.choice(
            (b"\r\n", b"\0", b"\xff" * 4, b"-1", b"99999999999999999999", b": ", piece)
        )
        data[at : at + dice.choice((0, 1, len(piece)))] = dice.choice((odd, b"", 2 * piece))
    return bytes(data)


def test_500_broken_requests_and_sessions_end_in_an_answer(
    url: str, record_property: Callable[[str, int], None]
) -> None:
    address = httpx.URL(url)
    for case in range(N_BROKEN):
        with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
            try:
                connection.sendall(broken(case))
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(65_536), b""))
            except (ConnectionResetError, BrokenPipeError):
                continue
        for status in STATUS.findall(answer):
            assert int(status) < 500, (case, answer)
    assert httpx.get(f"{url}/livez").status_code == 200
    record_property("inputs", N_BROKEN)
