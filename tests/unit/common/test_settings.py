"""Settings: precedence, strictness, and errors that name the field."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.reference_config import reference_config
from cluster.cli.serve import as_yaml
from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings, read_api_keys
from cluster.serve.distribution import package_root
from cluster.serve.ray_environment import deployment_suffixes
from cluster.serve.start.resolve import resolve_settings
from router.http.keys import KeyFile


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: from-file\nrouter:\n  port: 1\n  host: from-file\n  audio_workers: 7\n")
    environ = {"SPLITSCRIBE_ROUTER__PORT": "2", "SPLITSCRIBE_ROUTER__HOST": "from-env"}
    settings = load_settings(file, {"router": {"port": 3, "host": None}}, environ)
    assert settings.router.port == 3
    assert settings.router.host == "from-env"
    assert settings.router.audio_workers == 7
    assert settings.model == "from-file"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("router:\n  prot: 9\n", "there is no setting router.prot; did you mean router.port?"),
        ("models: {a: {model: x, encoder: {repli: 1}}}", "mean models.a.encoder.replicas?"),
        ("zzz: 9\n", "there is no setting zzz"),
        ("encoder:\n  max_batch: -1\n", "encoder.max_batch"),
        ("[1, 2]", "mapping"),
        ("a: [", "not YAML"),
        ("a: \xe9", "not YAML"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        load_settings(file, environ={})


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("router:\n  api_key: s3cret: x\n", "line 2"),
        ("router: {api_key: s3cret: x}", "line 1"),
        ("router: [api_key: s3cret]", "router"),
    ],
)
def test_a_file_that_is_wrong_around_a_key_is_refused_without_it(
    tmp_path: Path, text: str, where: str
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=where) as refused:
        load_settings(file, environ={})
    assert "s3cret" not in str(refused.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read settings file"):
        load_settings(tmp_path / "none.yaml", environ={})


def service_links(service: str, port_name: str) -> dict[str, str]:
    """The variables that Kubernetes gives to pods for a Service of this name."""
    name = service.upper().replace("-", "_")
    port = port_name.upper().replace("-", "_")
    return {
        f"{name}_SERVICE_HOST": "10.96.3.7",
        f"{name}_SERVICE_PORT": "8000",
        f"{name}_SERVICE_PORT_{port}": "8000",
        f"{name}_PORT": "tcp://10.96.3.7:8000",
        f"{name}_PORT_8000_TCP": "tcp://10.96.3.7:8000",
        f"{name}_PORT_8000_TCP_PROTO": "tcp",
        f"{name}_PORT_8000_TCP_PORT": "8000",
        f"{name}_PORT_8000_TCP_ADDR": "10.96.3.7",
        f"{name}_PORT_53_UDP": "udp://10.96.3.7:53",
    }


@pytest.mark.parametrize(
    "service",
    ["splitscribe", "splitscribe-serve-svc", "splitscribe-head-svc", "splitscribe-7xkq9-head-svc"],
)
def test_what_kubernetes_tells_of_services_is_no_setting(service: str) -> None:
    links = service_links(service, "dashboard-agent")
    assert load_settings(environ=links) == Settings()
    with_port = load_settings(environ={**links, "SPLITSCRIBE_ROUTER__PORT": "2"})
    assert with_port.router.port == 2


def test_what_only_looks_like_a_service_is_still_refused() -> None:
    for name, text in (
        ("SPLITSCRIBE_PORT", "8000"),
        ("SPLITSCRIBE_ROUTER__PORT", "tcp://10.96.3.7:8000"),
        ("SPLITSCRIBE_SERVICE", "x"),
    ):
        with pytest.raises(ConfigurationError, match=f"the variable {name}( is not a setting|\\))"):
            load_settings(environ={name: text})


def test_a_mistake_names_the_variable_that_made_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("encoder: {max_batch: -1}")
    environ = {"SPLITSCRIBE_PORT": "1", "SPLITSCRIBE_ROUTER__PORT": "2"}
    with pytest.raises(ConfigurationError) as refused:
        load_settings(file, {"router": {"port": -3}}, environ)
    assert (
        "the variable SPLITSCRIBE_PORT is not a setting; did you mean SPLITSCRIBE_ROUTER__PORT?"
        in str(refused.value)
    )
    assert "encoder.max_batch: " in str(refused.value)
    assert "router.port: " in str(refused.value), "a flag is the one that counts"


@pytest.mark.parametrize(
    "names", [("PORT", "PORT__X"), ("PORT__X", "PORT"), ("PORT__X__Y", "port")]
)
def test_a_variable_for_a_part_of_another_ones_value_is_refused(names: tuple[str, str]) -> None:
    environ = {f"SPLITSCRIBE_ROUTER__{name}": "2" for name in names}
    with pytest.raises(ConfigurationError, match="as a whole") as refused:
        load_settings(environ=environ)
    assert all(name in str(refused.value) for name in environ)


def test_keys_come_as_a_text_a_list_or_a_variable_with_commas() -> None:
    for given, keys in (("a,b", ("a,b",)), (["a", "b"], ("a", "b")), (None, ()), ([], ())):
        settings = load_settings(flags={"router": {"api_key": given}}, environ={})
        assert settings.router.api_key == keys
    environ = {"SPLITSCRIBE_ROUTER__API_KEY": "a, b,"}
    assert load_settings(environ=environ).router.api_key == ("a", "b")


def test_a_list_in_a_variable_has_commas_or_is_json() -> None:
    for text in ("a.example, *.b.example", '["a.example", "*.b.example"]'):
        settings = load_settings(environ={"SPLITSCRIBE_ROUTER__HOSTS": text})
        assert settings.router.hosts == ("a.example", "*.b.example")
    environ = {"SPLITSCRIBE_MODELS__X__MODEL": "demo", "SPLITSCRIBE_MODELS__X__ALIASES": "a,b"}
    assert load_settings(environ=environ).aliases_of("x") == ("a", "b")
    for wrong in ("['s3cret']", "[s3cret", "[] s3cret"):
        with pytest.raises(ConfigurationError, match="API_KEY is not a list in JSON") as refused:
            load_settings(environ={"SPLITSCRIBE_ROUTER__API_KEY": wrong})
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("text", ["", " ", ",", " , ", "[]"])
def test_an_empty_key_in_a_variable_does_not_open_the_server(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"SPLITSCRIBE_ROUTER__API_KEY.*empty"):
        load_settings(environ={"SPLITSCRIBE_ROUTER__API_KEY": text})


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "empty"),
        (" ", "empty"),
        (["s3cret", ""], "empty"),
        ("ek_s3cret", "ek_"),
        ("s3cretß", "ASCII"),
        ("s3cret ann bob", "after a name"),
        ("s3cret ann", "the name comes first"),
        ("s3cret #comment", "line of its own"),
        ({"s3cret": 1}, "tuple"),
        ([5318008], "string"),
    ],
)
def test_what_is_no_key_is_refused_by_name_and_not_shown(key: object, why: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"router\.api_key.*{why}") as refused:
        load_settings(flags={"router": {"api_key": key}}, environ={})
    for shown in ("s3cret", "5318008"):
        assert shown not in f"{refused.value}{refused.value.__cause__}"


@pytest.mark.parametrize("key", ["", "x", "s3cret" * 5])
def test_a_cluster_key_that_can_be_guessed_is_refused_and_none_is_shown(key: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"SPLITSCRIBE_CLUSTER_KEY.*32 characters"
    ) as refused:
        load_settings(environ={"SPLITSCRIBE_CLUSTER_KEY": key})
    assert "s3cret" not in str(refused.value)
    assert "s3cret" not in repr(load_settings(flags={"cluster_key": "s3cret" * 6}, environ={}))


def test_keys_of_a_file_join_the_others(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  one#two \nann three\n")
    router = {"api_key": "zero", "api_key_file": str(file), "port": 0}
    settings = load_settings(flags={"router": router}, environ={})
    resolved = resolve_settings(settings).router
    assert (resolved.api_key, resolved.api_key_file) == (("zero",), file)
    keys = KeyFile(resolved).ring
    sent = (b"zero", b"one#two", b"three")
    assert [keys.owner(key) for key in sent] == [0, 1, 2]
    assert keys.name(2) == "ann"
    file.unlink()
    with pytest.raises(ConfigurationError, match="cannot read API keys"):
        resolve_settings(settings)


@pytest.mark.parametrize("line", ["s3cret  # of Ann", "ek_s3cret", "s3cret #Ann", "s3creté"])
def test_a_line_that_is_no_key_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\none\n{line}\n")
    with pytest.raises(ConfigurationError, match="line 3 of ") as refused:
        read_api_keys(file)
    assert "s3cr" not in str(refused.value)


@pytest.mark.parametrize("content", [None, "# nobody\n", b"\xff\xfe"])
def test_a_file_without_keys_is_told(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigurationError, match="API key"):
        read_api_keys(file)


def test_a_limit_per_key_needs_keys_and_never_shows_them() -> None:
    with pytest.raises(ConfigurationError, match="max_requests_per_key"):
        load_settings(flags={"router": {"max_requests_per_key": 2}}, environ={})
    with pytest.raises(ConfigurationError) as caught:
        load_settings(
            flags={"router": {"api_key": "secret", "port": -1, "max_requests_per_key": 1}},
            environ={},
        )
    assert "secret" not in f"{caught.value}{caught.value.__cause__}"


SEVERAL = {
    "models": {
        "large": {"model": "openai/whisper-large-v3", "aliases": "whisper-1"},
        "small": {"model": "demo", "encoder": {"replicas": 3}, "decoder": {"max_batch": 2}},
        "compact": {"model": "demo", "kv_dtype": "float8"},
    },
    "kv_dtype": "bfloat16",
    "encoder": {"max_batch": 4},
}


def test_each_of_several_models_has_the_common_settings_under_its_own() -> None:
    settings = pickle.loads(pickle.dumps(load_settings(flags=SEVERAL, environ={})))
    large, small, compact = settings.by_model().values()
    assert list(settings.by_model()) == ["large", "small", "compact"]
    assert [one.kv_dtype for one in (large, small, compact)] == ["bfloat16", "bfloat16", "float8"]
    assert (large.model, large.served_model_names) == ("openai/whisper-large-v3", ("large",))
    assert settings.aliases_of("large") == ("whisper-1",)
    assert (large.encoder.replicas, small.encoder.replicas) == (1, 3)
    assert (large.encoder.max_batch, small.encoder.max_batch) == (4, 4)
    assert (large.decoder.max_batch, small.decoder.max_batch) == (0, 2)


def test_one_model_stands_for_itself() -> None:
    (name,) = load_settings(flags={"model": "openai/whisper-tiny"}, environ={}).by_model()
    assert name == "openai/whisper-tiny"
    named = load_settings(flags={"served_model_names": ("a", "b")}, environ={}).by_model()
    assert named["a"].served_model_names == ("a", "b")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"model": "demo"}, "not both"),
        ({"served_model_names": "x"}, "not both"),
        ({"models": {"large": {"model": "demo", "aliases": ["small"]}}}, "'small'"),
        ({"models": {"small": {"encoder": {"batch": 3}}}}, r"models\.small\.encoder\.batch"),
        ({"models": {"none": {"aliases": "x"}}}, r"models\.none\.model"),
    ],
)
def test_models_that_do_not_fit_are_named(tmp_path: Path, more: dict[str, Any], named: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(SEVERAL))
    with pytest.raises(ConfigurationError, match=named):
        load_settings(file, more, environ={})


def test_the_printed_settings_can_be_read_again_and_hide_keys(tmp_path: Path) -> None:
    keys = {
        "router": {"api_key": ["H1dden", "too H1dden"]},
        "cluster_key": "H1dden" * 6,
        "batches": {"webhook_secret": f"whsec_H1dden{'x' * 26}"},
    }
    settings = load_settings(flags={**SEVERAL, **keys}, environ={})
    text = as_yaml(settings)
    assert "H1dden" not in text
    assert "H1dden" not in repr(settings)
    file = tmp_path / "printed.yaml"
    file.write_text(text)
    assert load_settings(file, keys, environ={}) == settings


def test_an_empty_variable_names_no_folder_for_batches() -> None:
    assert load_settings(environ={"SPLITSCRIBE_BATCHES__FOLDER": ""}) == Settings()


def test_what_is_on_or_off_needs_no_quotes_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("router: {page: on, metrics: off}")
    settings = load_settings(file, environ={})
    assert (settings.router.page, settings.router.metrics) == ("on", "off")
    file.write_text(as_yaml(settings))
    assert load_settings(file, environ={}) == settings


def test_webhooks_need_a_secret_that_can_sign() -> None:
    hosts = {"SPLITSCRIBE_BATCHES__WEBHOOK_HOSTS": "a.example, b.example:8443"}
    secret = {"SPLITSCRIBE_BATCHES__WEBHOOK_SECRET": f"whsec_{'A' * 32}"}
    settings = load_settings(environ={**hosts, **secret})
    assert settings.batches.webhook_hosts == ("a.example", "b.example:8443")
    with pytest.raises(ConfigurationError, match="webhook_secret"):
        load_settings(environ=hosts)
    for short in ("whsec_AAAA", "A" * 40):
        with pytest.raises(ConfigurationError, match="webhook_secret") as refused:
            load_settings(flags={"batches": {"webhook_secret": short}}, environ={})
        assert f"got '{short}'" not in str(refused.value)


def test_deployments_of_several_models_have_names_of_their_own() -> None:
    assert deployment_suffixes([]) == [""]
    names = ["openai/whisper-large-v3", "a b", "a/b", "a-b-2", "A.b"]
    suffixes = ["-openai-whisper-large-v3", "-a-b", "-a-b-2", "-a-b-2-2", "-a-b-3"]
    assert deployment_suffixes(names) == suffixes


def test_the_shipped_settings_file_tells_the_defaults() -> None:
    """Rewrite it with `python -m cluster.cli.reference_config > configs/settings.yaml`."""
    file = package_root() / "configs" / "settings.yaml"
    assert file.read_text() == reference_config()
    assert load_settings(file, environ={}) == Settings()


def test_the_network_of_speakers_is_found_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "voices").write_bytes(b"")
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    for named, found in (("voices", str(tmp_path / "voices")), ("demo", "demo"), (None, None)):
        settings = Settings.model_validate({"speakers": {"model": named}, "router": {"port": 0}})
        resolved = resolve_settings(settings)
        assert (resolved.model, resolved.speakers.model) == ("demo", found)
