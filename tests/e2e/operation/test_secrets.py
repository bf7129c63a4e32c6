"""No log of a running cluster holds what clients sent, or what was heard."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import httpx
import openai
import pytest

from cluster.demo.samples import sample_path
from tests.e2e.conftest import WITH_DASHBOARD, Server, serving, wait_until
from tests.e2e.operation.test_metrics import metrics_addresses

REQUEST_ID = f"seen-{secrets.token_hex(4)}"


def session_folder(server: Server) -> Path:
    found: list[Path] = []

    def named() -> bool:
        for address in metrics_addresses(server):
            text = httpx.get(f"http://{address}/metrics", timeout=20).text
            found.extend(
                Path("/tmp/ray") / name for name in re.findall(r'SessionName="(\w+[^"]*)"', text)
            )
        return bool(found)

    wait_until(named, 30.0, "the session's name")
    return found[0]


def logged(server: Server) -> str:
    files = [file for file in session_folder(server).glob("logs/**/*") if file.is_file()]
    assert any("serve" in file.parts for file in files)
    return server.output() + "".join(file.read_text(errors="replace") for file in files)


def test_no_log_holds_text_prompts_keys_or_file_names(server: Server) -> None:
    check_logs(server)


@pytest.mark.slow
def test_nor_at_the_level_that_tells_most(tmp_path: Path) -> None:
    key = f"known{secrets.token_hex(8)}"
    env = {"SPLITSCRIBE_LOG_FORMAT": "json", "SPLITSCRIBE_ROUTER__API_KEY": key}
    with serving(tmp_path, "--log-level", "DEBUG", env=env | WITH_DASHBOARD) as running:
        check_logs(running, key)
        text = logged(running)
    assert key not in text + running.output()


def check_logs(server: Server, key: str | None = None) -> None:
    word = {
        what: f"{what}{secrets.token_hex(6)}" for what in ("key", "prompt", "hot", "name", "bad")
    }
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or word["key"], max_retries=0)
    upload = (f"{word['name']}.flac", sample_path("medium").read_bytes())
    headers = {"x-request-id": REQUEST_ID}
    create = client.audio.transcriptions.create
    heard = create(
        model="whisper-1",
        file=upload,
        prompt=word["prompt"],
        extra_body={"hotwords": word["hot"]},
        extra_headers=headers,
    ).text
    stream = create(
        model="whisper-1", file=upload, prompt=word["prompt"], stream=True, extra_headers=headers
    )
    assert list(stream)
    for refused in (
        {"model": word["bad"]},
        {"language": word["bad"]},
        {"file": (f"{word['name']}.wav", word["bad"].encode())},
        {"response_format": word["bad"]},
        {"extra_body": {word["bad"]: word["bad"]}},
        {"extra_body": {"chunking_strategy": word["bad"]}},
    ):
        arguments = {"model": "whisper-1", "file": upload, "extra_headers": headers, **refused}
        with pytest.raises(openai.APIStatusError):
            create(**arguments)
    wait_until(lambda: logged(server).count(REQUEST_ID) >= 4, 20.0, "the requests' lines")
    text = logged(server)
    assert not [what for what, secret in word.items() if secret in text]
    phrase = " ".join(heard.split()[:4])
    assert len(phrase) > 10
    assert phrase not in text
