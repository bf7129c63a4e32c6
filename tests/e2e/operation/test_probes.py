"""An operator's first day: probes, metrics, keys that come and go, and the log, of one server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from cluster.demo.samples import sample_path
from tests.e2e.conftest import start_server, stop_server, wait_until

KEY_S = 20.0

# As Kubernetes sets them for a Service splitscribe-serve-svc.
LINKS = {
    "SPLITSCRIBE_SERVE_SVC_SERVICE_HOST": "10.96.3.7",
    "SPLITSCRIBE_SERVE_SVC_PORT": "tcp://10.96.3.7:8000",
}


@pytest.mark.slow
def test_what_an_operator_asks_of_a_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann s3cret-ann\n")
    given = {"SPLITSCRIBE_ROUTER__API_KEY_FILE": "keys", "SPLITSCRIBE_LOG_FORMAT": "json"}
    running = start_server(tmp_path, env={**LINKS, **given})
    try:
        with httpx.Client(base_url=running.url, timeout=60) as client:

            def transcribe(key: str) -> int:
                return client.post(
                    "/v1/audio/transcriptions",
                    data={"model": "whisper-1"},
                    files={"file": sample_path("short").read_bytes()},
                    headers={"authorization": f"Bearer {key}", "x-request-id": f"of-{key[-3:]}"},
                ).status_code

            for path in ("/livez", "/readyz", "/version", "/health"):
                assert client.get(path).status_code == 200
            assert client.get("/metrics").status_code == 401
            assert (transcribe("s3cret-ann"), transcribe("s3cret-bob")) == (200, 401)
            keys.with_name("new").write_text("bob s3cret-bob\n")
            keys.with_name("new").replace(keys)
            wait_until(lambda: transcribe("s3cret-bob") == 200, KEY_S, "the new key opens")
            assert transcribe("s3cret-ann") == 401
            authorization = {"authorization": "Bearer s3cret-bob"}
            metrics = client.get("/metrics", headers=authorization).text
            assert 'splitscribe_key_requests_total{key="ann"} 1.0' in metrics
            assert 'splitscribe_worker_healthy{model="demo",role="encoder"' in metrics
            page = client.get(
                "/v1/organization/usage/audio_transcriptions", headers=authorization
            ).json()
            (used,) = page["data"][0]["results"]
            assert (used["api_key_id"], used["num_model_requests"]) == ("bob", 1)
    finally:
        assert stop_server(running) == 0
    found = re.findall(r'\{"time".*"request_id": "of-ann".*"status": 200.*\}', running.output())
    (line,) = [json.loads(text) for text in found]
    assert (line["key"], line["windows"]) == ("ann", 1)
    assert "s3cret" not in running.output()
