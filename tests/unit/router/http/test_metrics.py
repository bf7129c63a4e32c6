"""`/metrics`: what Prometheus reads is what was counted, under names that stay."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.common.metrics import ROUTER_METRICS
from router.http.routes import create_app
from tests.support.router_fakes import (
    NAMES,
    FakeTranscriber,
    client_of,
    make_registry,
    make_settings,
    post,
)


def read(answer: httpx.Response) -> dict[tuple[str, ...], float]:
    """Values by name and labels, as Prometheus' own parser reads them."""
    assert answer.status_code == 200
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_what_was_counted_is_read() -> None:
    transcriber = FakeTranscriber()
    async with client_of(create_app(make_registry(transcriber), make_settings())) as client:
        await post(client)
        await post(client, model="nobody")
        found = read(await client.get("/metrics"))
        names = {name for name, *_ in found}
        declared = {spec.name for spec in ROUTER_METRICS if not spec.tags}
        assert not [name for name in declared if not names & {name, f"{name}_bucket"}]
        assert not [name for name in names if not name.startswith(("splitscribe_", "process_"))]
        assert found["splitscribe_requests_total", "200"] == 1
        assert found["splitscribe_request_seconds_count",] == 2
        assert found["splitscribe_errors_total", "404", "model_not_found"] == 1
        assert found["splitscribe_worker_pages_free", "demo", "encoder", "encoder-1"] == 3
        assert found["splitscribe_workers", "decoder", NAMES[0]] == 1
        transcriber.ready, transcriber.n_workers = False, 0
        later = read(await client.get("/metrics"))
        assert [later[name] for name in later if name[0] == "splitscribe_ready"] == [0]
        assert not [name for name in later if "worker_" in name[0]], "they are gone"


@pytest.mark.parametrize(
    ("settings", "without_key", "with_key"),
    [
        ({}, 200, 200),
        ({"api_key": "key"}, 401, 200),
        ({"api_key": "key", "metrics": "on"}, 200, 200),
        ({"metrics": "off"}, 404, 404),
    ],
)
async def test_a_key_is_needed_where_there_are_keys_unless_a_setting_says_else(
    settings: dict[str, Any], without_key: int, with_key: int
) -> None:
    app = create_app(make_registry(FakeTranscriber()), make_settings(**settings))
    async with client_of(app) as client:
        assert (await client.get("/metrics")).status_code == without_key
        headers = {"authorization": "Bearer key"}
        assert (await client.get("/metrics", headers=headers)).status_code == with_key
