"""Settings: precedence, strictness, and errors that name the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.build import package_root
from cluster.errors import ConfigurationError
from cluster.reference_config import reference_config
from cluster.settings import Settings, load_settings


def test_defaults_serve_the_bundled_model_on_localhost() -> None:
    settings = load_settings(environ={})
    assert settings.model == "demo"
    assert (settings.router.host, settings.router.port) == ("127.0.0.1", 8000)


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
        ("router:\n  prot: 9\n", "router.prot"),
        ("encoder:\n  max_batch: -1\n", "encoder.max_batch"),
        ("[1, 2]", "mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=named.replace(".", r"\.")):
        load_settings(file, environ={})


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read settings file"):
        load_settings(tmp_path / "none.yaml", environ={})


def test_an_unknown_variable_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"router\.prot"):
        load_settings(environ={"SPLITSCRIBE_ROUTER__PROT": "1"})


def test_settings_are_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        Settings().model = "other"  # type: ignore[misc]


def test_the_shipped_settings_file_tells_the_defaults() -> None:
    """Rewrite it with `python -m cluster.reference_config > configs/settings.yaml`."""
    file = package_root() / "configs" / "settings.yaml"
    assert file.read_text() == reference_config()
    assert load_settings(file, environ={}) == Settings()
