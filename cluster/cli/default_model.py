"""The model of commands where none is named: openai/whisper's default, not the bundled toy."""

from __future__ import annotations

import signal

from rich.console import Console

from cluster.common.settings import BUNDLED_MODEL, BUNDLED_MODEL_IS, Settings
from cluster.common.settings_sources import load_settings

DEFAULT_MODEL = "turbo"
SIZE = "1.6 GB"  # of the weights


def default_model() -> str:
    return with_default_model(load_settings()).model


def with_default_model(settings: Settings) -> Settings:
    if settings.models or "model" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"model": DEFAULT_MODEL})


def download(model: str, err: Console) -> None:
    """Download what the Hub's cache does not have of `model`. Raises CheckpointError."""
    from cluster.common.model.checkpoint import open_checkpoint

    if model == DEFAULT_MODEL:
        _announce(err)
    # Python's own handler would wait until the Hub's threads have finished their files.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        open_checkpoint(model)
    finally:
        signal.signal(signal.SIGINT, before)


def _announce(err: Console) -> None:
    from huggingface_hub import try_to_load_from_cache

    from cluster.common.model.tensor_files import SHORT_NAMES

    hub_id = SHORT_NAMES[DEFAULT_MODEL]
    if not isinstance(try_to_load_from_cache(hub_id, "model.safetensors"), str):
        err.print(f"splitscribe: downloading the default model, {hub_id} ({SIZE}); Ctrl-C stops it")


def say_if_toy(models: set[str], err: Console) -> None:
    if BUNDLED_MODEL in models:
        err.print(
            f"splitscribe: the bundled model is {BUNDLED_MODEL_IS}; for other recordings name a "
            f"real one, such as {DEFAULT_MODEL}",
            markup=False,
        )
