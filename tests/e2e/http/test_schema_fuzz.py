"""Schemathesis reads /openapi.json and sends what it allows, and what it does not.

Against the whole server in one process: hundreds of requests, each through real HTTP. What the
document leaves open (which models there are, what is audio) is narrowed first, or next to no
request would come as far as the transcriber.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import BaseSchema

from tests.support.audio.speech import sentence_pcm, wav_of
from tests.support.in_process import in_process_server

# Cases of each operation, for 100 in all: those without parameters have next to nothing to vary.
SHARES = {
    ("POST", "/v1/audio/transcriptions"): 72,
    ("POST", "/v1/audio/translations"): 24,
    ("POST", "/v1/audio/alignments"): 12,
    ("GET", "/v1/models"): 2,
    ("GET", "/v1/models/{model_id}"): 12,
    ("GET", "/health"): 2,
    ("GET", "/readyz"): 2,
    ("POST", "/v1/realtime/client_secrets"): 8,
    ("POST", "/v1/realtime/transcription_sessions"): 8,
}
# A schema cannot say that fields exclude each other, or that bytes are no audio.
NEVER_CHECKED = ("positive_data_acceptance",)
ANSWER_S = 60.0

load_all_checks()


@pytest.fixture(scope="module")
def schema() -> Iterator[BaseSchema]:
    speech = st.just(wav_of(sentence_pcm("short", 1)))
    schemathesis.openapi.format("binary", st.one_of(speech, speech, speech, st.binary()))
    with in_process_server() as url:
        document = narrowed(httpx.get(f"{url}/openapi.json").json())
        found = schemathesis.openapi.from_dict(document)
        found.config.update(base_url=url)
        yield found


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document, with values for the fields whose values depend on the model."""
    for path in ("transcriptions", "translations", "alignments"):
        body = document["paths"][f"/v1/audio/{path}"]["post"]["requestBody"]
        del body["content"]["application/json"]  # numbers in texts are taken there too
        fields = body["content"]["multipart/form-data"]["schema"]["properties"]
        fields["model"]["enum"] = ["whisper-1", "demo", "openai/demo"]
        if "language" in fields:
            fields["language"]["enum"] = ["en", "English", "haw"]
    return document


def checks_of(case: Case) -> list[Any]:
    """What is held against the answer. A field that is empty counts as not sent, whatever it is."""
    unchecked = list(NEVER_CHECKED)
    if isinstance(case.body, dict) and "" in case.body.values():
        unchecked.append("negative_data_rejection")
    return [check for check in CHECKS.get_all() if check.__name__ not in unchecked]


def send_generated(schema: BaseSchema, cases: int, run: int) -> None:
    """Send `cases` or a few more, each answer checked."""
    statuses: Counter[int] = Counter()
    for (method, path), share in SHARES.items():
        operation = schema[path][method]
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
    assert statuses.total() >= cases
    assert statuses[200] > cases // 20, statuses
    assert set(statuses) <= {200, 400, 404, 405}


def test_every_answer_to_200_generated_requests_is_as_documented(schema: BaseSchema) -> None:
    send_generated(schema, 200, run=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", range(4))
def test_every_answer_to_2000_generated_requests_is_as_documented(
    schema: BaseSchema, run: int
) -> None:
    send_generated(schema, 500, run=100 + run)
