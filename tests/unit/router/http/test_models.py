"""Several models behind one router: each name leads to its own transcriber."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.common.errors import ConfigurationError, ModelNotFoundError
from cluster.common.settings import Settings
from cluster.serve.model_parts import served_model
from router.http.models import OPENAI_ALIASES, ModelRegistry, ServedModel
from router.http.routes import create_app
from tests.support.router_fakes import (
    TRANSLATIONS_URL,
    FakeTranscriber,
    client_of,
    error_of,
    make_settings,
    post,
)


class TwoModels:
    """A multilingual default called "large", and an English one."""

    def __init__(self) -> None:
        self.large, self.english = FakeTranscriber(), FakeTranscriber()
        self.registry = ModelRegistry(
            [
                ServedModel(("large", "openai/whisper-large-v3"), ("en", "de"), self.large),
                ServedModel(("openai/small.en",), ("en",), self.english, aliases=("quick",)),
            ]
        )


@pytest.fixture
def two() -> TwoModels:
    return TwoModels()


@pytest.mark.parametrize(
    "name",
    [
        "large",
        "openai/large",
        "openai/whisper-large-v3",
        "whisper-large-v3",
        "openai%2Fwhisper-large-v3",
        "whisper-1",
    ],
)
def test_a_model_is_found_under_every_spelling_of_its_names(name: str, two: TwoModels) -> None:
    assert two.registry.find(name).transcriber is two.large


@pytest.mark.parametrize("name", ["", "Large", "small", "openai/", "whisper-2"])
def test_other_names_are_not_found(name: str, two: TwoModels) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'large', .*'openai/small\.en'"):
        two.registry.find(name)


def test_the_hosted_name_can_be_claimed_and_the_newer_ones_with_it() -> None:
    """As on Kubernetes, where KubeRay and Helm sort models by their names."""
    first, second = FakeTranscriber(), FakeTranscriber()
    registry = ModelRegistry(
        [
            ServedModel(("a",), ("en",), first),
            ServedModel(("b",), ("en",), second, aliases=("whisper-1",)),
        ]
    )
    for name in ("whisper-1", *OPENAI_ALIASES):
        assert registry.find(name).transcriber is second


def test_two_models_cannot_share_a_name() -> None:
    transcriber = FakeTranscriber()
    models = [
        ServedModel(("a",), (), transcriber),
        ServedModel(("b",), (), transcriber, aliases=("a",)),
    ]
    with pytest.raises(ConfigurationError, match="'a'"):
        ModelRegistry(models)
    with pytest.raises(ConfigurationError, match="no model"):
        ModelRegistry([])


def test_names_are_listed_and_aliases_are_not(two: TwoModels) -> None:
    listed = [model.id for model in two.registry.listing().data]
    assert listed == ["large", "openai/whisper-large-v3", "openai/small.en"]
    assert two.registry.describe("quick").id == "quick"


@pytest.mark.parametrize("model", ["demo", "openai/whisper-tiny"])
async def test_only_the_bundled_model_is_described_and_as_a_toy(model: str) -> None:
    transcriber: Any = SimpleNamespace(tokenizer=SimpleNamespace(languages=("en",)))
    registry = ModelRegistry([served_model(Settings(model=model), model, transcriber)])
    async with client_of(create_app(registry, make_settings())) as client:
        (listed,) = (await client.get("/v1/models")).json()["data"]
        assert (await client.get(f"/v1/models/{model}")).json() == listed
    assert ("toy" in listed.get("description", "")) == (model == "demo")
    assert ("description" in listed) == (model == "demo")


async def test_requests_go_to_the_pipeline_of_their_model(two: TwoModels) -> None:
    async with client_of(create_app(two.registry, make_settings())) as client:
        assert (await post(client, model="small.en")).status_code == 200
        assert (len(two.large.params), len(two.english.params)) == (0, 1)
        assert (await post(client, model="large", language="de")).status_code == 200
        assert (len(two.large.params), len(two.english.params)) == (1, 1)


async def test_what_a_model_cannot_do_is_refused_by_its_own_languages(two: TwoModels) -> None:
    async with client_of(create_app(two.registry, make_settings())) as client:
        answer = await post(client, model="quick", language="de")
        assert (answer.status_code, error_of(answer)["param"]) == (400, "language")
        answer = await post(client, url=TRANSLATIONS_URL, model="quick")
        error = error_of(answer)
        assert (answer.status_code, error["param"]) == (400, "model")
        assert error["code"] == "unsupported_value"
        assert (await post(client, url=TRANSLATIONS_URL, model="large")).status_code == 200
    assert two.english.params == []


async def test_health_tells_of_every_model_and_is_ready_when_all_are(two: TwoModels) -> None:
    async with client_of(create_app(two.registry, make_settings())) as client:
        answer = await client.get("/health")
        assert answer.status_code == 200
        assert answer.json()["pools"]["encoder"]["replicas"] == 2
        assert len(answer.json()["pools"]["encoder"]["workers"]) == 2
        two.english.ready = False
        answer = await client.get("/health")
        assert answer.status_code == 503
        states = {name: one["status"] for name, one in answer.json()["models"].items()}
        assert states == {"large": "ready", "openai/small.en": "not ready"}


@pytest.mark.parametrize("name", OPENAI_ALIASES)
def test_openais_newer_names_mean_the_first_model_unless_one_claims_them(name: str) -> None:
    two = TwoModels()
    assert two.registry.find(name).transcriber is two.large
    claimed = ServedModel(("own",), ("en",), two.english, aliases=(name,))
    registry = ModelRegistry([two.registry.models[0], claimed])
    assert registry.find(name).transcriber is two.english
    with pytest.raises(ModelNotFoundError):
        ModelRegistry(two.registry.models, openai_aliases=False).find(name)


def test_openais_names_are_listed_only_where_that_is_asked_for() -> None:
    models = TwoModels().registry.models
    listed = [one.id for one in ModelRegistry(models, list_openai_aliases=True).listing().data]
    assert listed[3:] == ["whisper-1", *OPENAI_ALIASES]
    few = ModelRegistry(models, openai_aliases=False, list_openai_aliases=True)
    assert [one.id for one in few.listing().data][3:] == ["whisper-1"]
    assert len(ModelRegistry(models).listing().data) == 3
