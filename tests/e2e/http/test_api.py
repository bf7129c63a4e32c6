"""Several models and keys on one server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import yaml

from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server, serving
from tests.e2e.test_reuse import ask
from tests.support.audio.recordings import lengthened

KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    (folder / "keys").write_text(f"# keys\nof-this-test {KEY}\n")
    settings = {
        "models": {
            "org/first": {"model": "demo", "aliases": "one"},
            "second": {"model": "demo", "decoder": {"max_batch": 2}},
        },
        "router": {"api_key": "another", "api_key_file": str(folder / "keys")},
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    with serving(folder, "--config", "settings.yaml") as server:
        yield server
    assert KEY not in server.output()


def client_of(server: Server, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.mark.slow
def test_each_model_answers_under_its_names_and_all_alike(several: Server) -> None:
    client = client_of(several)
    assert [model.id for model in client.models.list()] == ["org/first", "second"]
    assert client.models.retrieve("org/first").id == "org/first"
    texts = {
        client.audio.transcriptions.create(model=name, file=sample_path("short")).text
        for name in ("org/first", "one", "whisper-1", "second")
    }
    assert len(texts) == 1
    assert texts.pop()
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="third", file=sample_path("short"))


@pytest.mark.slow
def test_each_model_has_workers_of_its_own(several: Server) -> None:
    health = several.health()
    assert health["models"] == {
        name: {"status": "ready", "replicas": {"encoder": 1, "decoder": 1}}
        for name in ("org/first", "second")
    }
    assert len({worker["replica"] for worker in health["pools"]["decoder"]["workers"]}) == 2


@pytest.mark.slow
def test_what_one_key_has_sent_is_encoded_again_for_another(several: Server) -> None:
    audio = lengthened("short", 11)
    said = [ask(several, audio, key)[1] for key in (KEY, KEY, "another", "another", KEY)]
    assert [one.partition(";")[0] for one in said] == ["miss", "hit", "miss", "hit", "hit"]
