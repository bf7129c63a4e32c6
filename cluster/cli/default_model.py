"""Which model transcribes a person's own files where the command line names none.

It is openai/whisper's default, since the bundled one would not understand them. Unless it is in the
Hub's cache the person is asked; where nobody can be, the command ends with what to do.
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from cluster.common.errors import ConfigurationError
from cluster.common.settings import BUNDLED_MODEL, BUNDLED_MODEL_IS, Settings
from cluster.common.settings_sources import load_settings

DEFAULT_MODEL = "turbo"
SIZE = "1.6 GB"  # of its weights
REACH_S = 3.0  # to wait for the Hub's answer
WAYS = f"name a model's folder by --model, or try the bundled toy by --model {BUNDLED_MODEL}"


def default_model() -> str:
    """What `SPLITSCRIBE_MODEL` names, else `DEFAULT_MODEL`."""
    return with_default_model(load_settings()).model


def with_default_model(settings: Settings) -> Settings:
    """`settings` with `DEFAULT_MODEL` where they name none."""
    if settings.models or "model" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"model": DEFAULT_MODEL})


def ask_before_download(model: str, *, yes: bool) -> None:
    """Ask whether `model`, which nobody named, may be downloaded; `yes`: the answer was given
    before.

    Raises ConfigurationError: it may not, nobody can be asked, or it cannot.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    from cluster.common.model.tensor_files import SHORT_NAMES

    hub_id = SHORT_NAMES[DEFAULT_MODEL]
    files = ("config.json", "model.safetensors")
    if model != DEFAULT_MODEL or all(
        isinstance(try_to_load_from_cache(hub_id, file), str) for file in files
    ):
        return
    what = f"{model} ({hub_id}, {SIZE} from {constants.ENDPOINT})"
    if constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "it cannot be reached"
        raise ConfigurationError(
            f"the default model, {what}, is not in the cache ({constants.HF_HUB_CACHE}), and "
            f"{why}: download it where there is a network, {WAYS}"
        )
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(
            f"the default model, {what}, is not here yet: say --yes to download it, {WAYS}"
        )
    if not typer.confirm(f"The default model is {what}. Download it?", default=True, err=True):
        raise ConfigurationError(f"it was not downloaded: {WAYS}")


def _answers(url: str) -> bool:
    import httpx

    try:
        httpx.head(url, timeout=REACH_S)
    except (httpx.HTTPError, OSError):
        return False
    return True


def say_if_toy(models: set[str], err: Console) -> None:
    """One line where the bundled model is one of `models`."""
    if BUNDLED_MODEL in models:
        err.print(
            f"splitscribe: the bundled model is {BUNDLED_MODEL_IS}; for other recordings name a "
            f"real one, such as {DEFAULT_MODEL}",
            markup=False,
        )
